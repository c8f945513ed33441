"""Roll-ups, webhooks and hits while everybody writes at once."""

from datetime import timedelta

import pytest
from django.utils import timezone

from messaging.models import (
    Message,
    MessageHit,
    MessageRollupDelta,
    Subscription,
    WebhookAttempt,
    WebhookDelivery,
    WebhookInbox,
)
from messaging.providers.webhooks import Event
from messaging.services.analytics import drifted_applications, fold_deltas, message_figures, recompute_rollups
from messaging.services.incoming import receive_events
from messaging.services.tracking import record_hit
from messaging.services.webhooks import create_endpoint, deliver_due
from tests.messaging.factories import message, message_in, subscribe
from tests.messaging.test_tracking import CHROME
from tests.messaging.test_webhooks_out import Receiver

NOW = timezone.now()


@pytest.fixture(autouse=True)
def providers(settings):
    settings.PROVIDERS = dict.fromkeys(("iOSPush", "AndroidPush", "Email", "SMS", "KakaoTalk"), "null")


def test_roll_ups_agree_while_writers_folders_and_correctors_meet(at_once):
    subscription = subscribe()
    rows = [message(subscription, now=NOW, title=f"{n}") for n in range(60)]

    def write(part):
        for row in rows[part::3]:
            Message.objects.filter(pk=row.pk).update(status="successful", sent_at=NOW + timedelta(seconds=part + 1))
            if part:
                Message.objects.filter(pk=row.pk).update(status="received", received_at=NOW + timedelta(seconds=9))

    def fold():
        return sum(fold_deltas(7) for _time in range(15))

    def correct():
        return [wrong for _time in range(5) for _day, wrong in recompute_rollups()]

    results = at_once(lambda: write(0), lambda: write(1), lambda: write(2), fold, fold, correct, correct)
    assert not [result for result in results if isinstance(result, Exception)], results
    # Nothing was wrong at any moment, so the correctors found nothing.
    assert sum(results[5]) == sum(results[6]) == 0
    assert drifted_applications(NOW) == []
    figures = message_figures([subscription.application_id], NOW - timedelta(days=1), NOW + timedelta(days=1), "day")
    assert (figures["totals"]["sent"], figures["totals"]["received"]) == (60, 40)
    while fold_deltas():
        pass
    assert not MessageRollupDelta.objects.exists() and drifted_applications(NOW) == []


def test_two_correctors_add_the_difference_once(at_once):
    subscription = subscribe()
    for n in range(5):
        message(subscription, now=NOW, title=f"{n}")
    MessageRollupDelta.objects.all().delete()
    at_once(*[lambda: list(recompute_rollups())] * 4)
    assert drifted_applications(NOW) == []


def test_an_event_told_many_times_at_once_is_applied_once(at_once):
    row = message_in("successful", subscribe(type="SMS"), at=NOW)
    Message.objects.filter(pk=row.pk).update(provider_message_id="SM1")
    event = Event("SM1:delivered", "SM1", None, "delivered")
    results = at_once(*[lambda: receive_events("twilio", [event], now=NOW)] * 8)
    assert not [result for result in results if isinstance(result, Exception)], results
    assert WebhookInbox.objects.get().state == "applied"
    assert Message.objects.get(pk=row.pk).version == 2
    assert Subscription.objects.get(pk=row.subscription_id).total_messages_received == 1


def test_calls_about_the_same_messages_in_opposite_orders_do_not_wait_in_a_circle(at_once):
    rows = [message_in("successful", subscribe(type="SMS"), at=NOW) for _ in range(20)]
    kinds = ("delivered", "other")
    told = {
        kind: [Event(f"{kind}{row.pk}", "", row.pk, kind) for row in (rows if kind == "delivered" else rows[::-1])]
        for kind in kinds
    }
    results = at_once(*[lambda kind=kind: receive_events("solapi", told[kind], now=NOW) for kind in kinds])
    assert {tuple(result.items()) for result in results} == {(("applied", 20),), (("ignored", 20),)}
    assert not Message.objects.exclude(status="received").exists()


def test_each_webhook_is_told_by_one_of_many_senders(at_once, settings):
    settings.WEBHOOK_ALLOW_PRIVATE = True
    receiver, subscription = Receiver(), subscribe()
    create_endpoint(subscription.application, receiver.url)
    for n in range(30):
        message(subscription, now=NOW, title=f"{n}")
    Message.objects.update(status="successful", sent_at=NOW)
    now = timezone.now() + timedelta(seconds=1)
    at_once(*[lambda: [deliver_due(now, limit=5) for _time in range(8)]] * 4)
    receiver.server.shutdown()
    assert len(receiver.got) == len({headers["webhook-id"] for _path, headers, _body in receiver.got}) == 30
    assert WebhookDelivery.objects.filter(delivered_at=None).count() == 0
    assert WebhookAttempt.objects.count() == 30


def test_opens_at_once_convert_once(at_once):
    row = message_in("successful", subscribe(type="Email"), at=NOW - timedelta(hours=1))
    results = at_once(*[lambda: record_hit(row.pk, "open", {"User-Agent": CHROME}, now=NOW)] * 8)
    assert not [result for result in results if isinstance(result, Exception)], results
    assert MessageHit.objects.count() == 8
    assert Message.objects.get(pk=row.pk).status == "converted"
    assert Subscription.objects.get(pk=row.subscription_id).total_messages_converted == 1
