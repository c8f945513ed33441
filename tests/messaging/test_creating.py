import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from messaging.models import Message, MessageEvent
from messaging.services import enqueue_messages
from tests.messaging.factories import NOW, draft, message, subscribe

pytestmark = pytest.mark.django_db


def test_five_hundred_drafts_take_few_queries_and_keep_their_order():
    subscription = subscribe()
    drafts = [draft(subscription, title=f"No. {n}", idempotency_key=f"k{n}") for n in range(500)]
    with CaptureQueriesContext(
        connection,
    ) as queries:
        outcomes = enqueue_messages(drafts, now=NOW)
    assert len(queries) <= 20
    assert all(outcome.created for outcome in outcomes)
    titles = dict(Message.objects.values_list("pk", "title"))
    assert [titles[outcome.message_id] for outcome in outcomes] == [f"No. {n}" for n in range(500)]
    assert MessageEvent.objects.filter(event_type="created", occurred_at=NOW).count() == 500


def test_one_bad_draft_spoils_none_of_the_others():
    good, gone = subscribe(), subscribe(status=-2)
    outcomes = enqueue_messages([draft(good), draft(gone), draft(good, title="", body=""), draft(good)], now=NOW)
    assert [outcome.code for outcome in outcomes] == [None, "unsubscribed", "required", None]
    assert Message.objects.count() == 2


def test_a_key_used_again_gives_the_first_message():
    subscription = subscribe()
    first = message(subscription, idempotency_key="a")
    again, other, twin = enqueue_messages([draft(subscription, idempotency_key=k) for k in ("a", "b", "b")], now=NOW)
    assert (again.message_id, again.created) == (first.pk, False)
    assert other.created and not twin.created and twin.message_id == other.message_id
