from datetime import timedelta

import pytest

from config import sweeping
from config.models import Decision, SweepRun
from messaging.models import Message, MessageEvent
from tests.messaging.factories import NOW, message, message_in, subscribe

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)


def sweep(name, now):
    ran = sweeping.run(f"messaging.{name}", now=now)
    assert ran["error"] is None
    return ran["counts"]


@pytest.mark.parametrize("status", ["pending", "errored"])
@pytest.mark.parametrize("later", [timedelta(0), timedelta(hours=5)])
def test_unsent_for_24_hours_is_expired(status, later):
    row = message_in(status, scheduled_at=NOW + later if later else None)
    deadline = NOW + later + timedelta(hours=24)
    assert sweep("expire_messages", deadline - SECOND) == {}
    assert sweep("expire_messages", deadline) == {"expired": 1}
    row = Message.objects.get()
    assert (row.status, row.error_reason, row.failed_at) == ("failed", "expired", deadline)
    assert sweep("expire_messages", deadline) == {}
    event = MessageEvent.objects.latest("id")
    assert (event.event_type, event.occurred_at, event.metadata["reason"]) == ("failed", deadline, "expired")


def test_a_schedule_in_the_past_does_not_shorten_the_day():
    message(scheduled_at=NOW - timedelta(days=3))
    assert sweep("expire_messages", NOW + timedelta(hours=24) - SECOND) == {}
    assert sweep("expire_messages", NOW + timedelta(hours=24)) == {"expired": 1}


@pytest.mark.parametrize("kind", ["AndroidPush", "SMS", "KakaoTalk", "InAppMessage"])
def test_72_hours_without_a_receipt_is_a_timeout(kind):
    message_in("successful", subscribe(type=kind))
    deadline = NOW + timedelta(hours=72)
    assert sweep("expire_messages", deadline - SECOND) == {}
    assert sweep("expire_messages", deadline) == {"receipt_timeout": 1}
    row = Message.objects.get()
    assert (row.status, row.error_reason, row.sent_at) == ("failed", "receipt_timeout", NOW)
    assert row.version_history[str(row.version)]["transition"] == "timeout"


def test_for_mail_accepted_is_final():
    message_in("successful", subscribe(type="Email"))
    assert sweep("expire_messages", NOW + timedelta(days=400)) == {}


def test_received_for_30_days_expires_and_loses_its_content():
    message_in("received", data={"a": 1})
    deadline = NOW + timedelta(days=30)
    assert sweep("expire_messages", deadline - SECOND) == {}
    assert sweep("expire_messages", deadline) == {"received_expired": 1}
    row = Message.objects.get()
    assert (row.status, row.expired_at, row.title, row.body, row.data) == ("received", deadline, "", "", {})
    assert row.version_history[str(row.version)]["transition"] == "expire"
    assert sweep("expire_messages", deadline) == {}
    assert MessageEvent.objects.latest("id").event_type == "received"


def test_failed_for_90_days_is_archived_and_loses_its_content():
    message_in("failed")
    deadline = NOW + timedelta(days=90)
    assert sweep("archive_messages", deadline - SECOND) == {}
    assert sweep("archive_messages", deadline) == {"archived": 1}
    row = Message.objects.get()
    assert (row.status, row.archived_at, row.title, row.body, row.data) == ("failed", deadline, "", "", {})
    assert sweep("archive_messages", deadline) == {}
    assert MessageEvent.objects.count() == 2


def test_what_a_template_was_filled_with_is_content_too():
    row = message_in("failed")
    Message.objects.filter(pk=row.pk).update(template_parameters={"name": "Kim"})
    sweep("archive_messages", NOW + timedelta(days=90))
    assert Message.objects.get().template_parameters == {}


@pytest.mark.parametrize(
    ("status", "age", "rule", "changed", "evidence"),
    [
        ("pending", timedelta(hours=24), "expire_unsent", "status", "created_at"),
        ("errored", timedelta(hours=24), "expire_unsent", "status", "created_at"),
        ("successful", timedelta(hours=72), "time_out_receipt", "status", "sent_at"),
        ("received", timedelta(days=30), "expire_received", "expired_at", "received_at"),
        ("failed", timedelta(days=90), "archive_failed", "archived_at", "failed_at"),
    ],
)
def test_each_end_leaves_the_rule_and_its_evidence(status, age, rule, changed, evidence):
    row, at = message_in(status), NOW + age
    name = "archive_messages" if status == "failed" else "expire_messages"
    assert sweep(name, at - SECOND) == {} and not Decision.objects.exists()
    sweep(name, at)
    sweep(name, at)
    decision = Decision.objects.get()
    assert (decision.rule, decision.object_type, decision.object_id) == (rule, "messages", str(row.pk))
    ended = (status, "failed") if changed == "status" else (None, at.isoformat())
    assert (decision.before, decision.after) == ({changed: ended[0]}, {changed: ended[1]})
    assert decision.inputs[evidence] == NOW.isoformat()
    assert SweepRun.objects.filter(pk=decision.run_id, name=f"messaging.{name}").exists()


def test_converted_is_left_alone():
    message_in("converted")
    assert sweep("expire_messages", NOW + timedelta(days=400)) == {}
    assert Message.objects.get().body


def test_past_its_day_it_is_not_sent_though_no_sweep_came(carrier):
    message()
    sweep("dispatch_due_messages", NOW + timedelta(hours=24))
    assert carrier.sent == []


def test_a_retry_past_the_day_is_no_retry():
    message_in("errored")
    Message.objects.update(next_attempt_at=NOW + timedelta(hours=24))
    assert sweep("retry_errored_messages", NOW + timedelta(hours=24)) == {}
