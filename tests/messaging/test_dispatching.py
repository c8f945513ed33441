from datetime import timedelta

import pytest
from django.db import connection

from config import sweeping
from messaging.models import Message, MessageAttempt, MessageEvent, ProviderCircuit, Subscription, Suppression
from messaging.providers import Answer
from tests.messaging.factories import NOW, message, subscribe

pytestmark = pytest.mark.django_db


def dispatch(now=NOW):
    ran = sweeping.run("messaging.dispatch_due_messages", now=now)
    assert ran["error"] is None, ran
    return ran["counts"]


def retry(now):
    return sweeping.run("messaging.retry_errored_messages", now=now)["counts"]


def test_an_accepted_message_is_successful_with_attempt_event_and_history(carrier):
    row = message()
    assert dispatch(NOW + timedelta(seconds=1)) == {"successful": 1}
    row = Message.objects.get()
    assert (row.status, row.sent_at, row.lease_id) == ("successful", NOW + timedelta(seconds=1), None)
    assert row.provider_message_id == str(row.pk)
    attempt = MessageAttempt.objects.get()
    assert (attempt.attempt_no, attempt.outcome, attempt.provider) == (1, "accepted", "carrier")
    assert list(MessageEvent.objects.order_by("id").values_list("event_type", flat=True)) == ["created", "sent"]
    assert row.version_history["1"]["transition"] == "send"
    assert (row.version_history["1"]["from"], row.version_history["1"]["to"]) == ("pending", "successful")
    assert dispatch(NOW + timedelta(minutes=1)) == {}
    assert len(carrier.sent) == 1


def test_leaves_what_is_scheduled_for_later(carrier):
    message(scheduled_at=NOW + timedelta(minutes=1))
    assert dispatch(NOW + timedelta(seconds=59)) == {}
    assert dispatch(NOW + timedelta(minutes=1)) == {"successful": 1}


def test_higher_priority_goes_first(carrier):
    subscription = subscribe()
    rows = [message(subscription, priority=p) for p in (1, 9, 5)]
    dispatch()
    assert [sent.message_id for sent in carrier.sent] == [rows[1].pk, rows[2].pk, rows[0].pk]


NETWORK = Answer("transient", "network", "message", "refused")
LADDERS = {
    "network": (NETWORK, [30, 120, 300, 900, 900]),
    "outage": (Answer("transient", "outage", "message", "503"), [900] * 24),
    "rate_limited": (Answer("rate_limited", "rate_limited", "sender", "429"), [60, 180, 300]),
}


@pytest.mark.parametrize("kind", LADDERS)
def test_the_retry_table_holds_to_the_second(carrier, kind):
    answer, delays = LADDERS[kind]
    carrier.answer = lambda _message: answer
    message()
    now = NOW
    for number, delay in enumerate(delays):
        dispatch(now)
        row = Message.objects.get()
        assert (row.status, row.failure_type) == ("errored", kind)
        assert row.retry_counts[kind] == number
        assert row.next_attempt_at == now + timedelta(seconds=delay)
        assert row.error_details["errored_at"] == now.isoformat()
        assert retry(now + timedelta(seconds=delay - 1)) == {}
        now += timedelta(seconds=delay)
        assert retry(now) == {"retried": 1}
        row = Message.objects.get()
        assert (row.status, row.failure_type, row.next_attempt_at) == ("pending", None, None)
    dispatch(now)
    row = Message.objects.get()
    assert (row.status, row.error_reason, row.failed_at) == ("failed", "retries_exhausted", now)
    assert row.retry_counts[kind] == len(delays)


@pytest.mark.parametrize(("said", "waited"), [(1, 60), (90, 90), (299.5, 299.5), (4000, 300), (None, 60)])
def test_retry_after_is_clamped_to_one_to_five_minutes(carrier, said, waited):
    carrier.answer = lambda _message: Answer("rate_limited", "rate_limited", "sender", "429", retry_after=said)
    message()
    dispatch()
    assert Message.objects.get().next_attempt_at == NOW + timedelta(seconds=waited)


def test_a_permanent_error_ends_the_message_and_only_its_recipients_scope_the_subscription(carrier):
    first, second = message(), message()
    carrier.answer = lambda m: Answer(
        "rejected",
        "permanent",
        "recipient" if m.message_id == first.pk else "message",
        "404",
        error_reason="unregistered",
        subscription_status=-10,
    )
    dispatch()
    assert set(Message.objects.values_list("status", "error_reason")) == {("failed", "unregistered")}
    assert Subscription.objects.get(pk=first.subscription_id).status == -10
    assert Subscription.objects.get(pk=second.subscription_id).status == 1


def test_a_hard_bounce_suppresses_the_address(carrier):
    row = message(subscribe(type="Email"))
    carrier.says(
        "rejected", "permanent", "recipient",
        error_reason="hard_bounce", subscription_status=-42, suppress_reason="hard_bounce",
    )  # fmt: skip
    dispatch()
    found = Suppression.objects.get()
    assert (found.channel_type, found.reason, found.evidence["message_id"]) == ("email", "hard_bounce", str(row.pk))


def test_a_set_up_fault_opens_the_breaker_and_spares_the_others(carrier):
    subscription = subscribe()
    for _ in range(3):
        message(subscription)
    carrier.says("config", "config", "sender", code="401")
    dispatch()
    assert MessageAttempt.objects.count() == 1
    assert Message.objects.filter(status="pending", attempt_count=0).count() == 2
    broken = Message.objects.get(status="errored")
    circuit = ProviderCircuit.objects.get()
    assert broken.failure_type == "config"
    assert broken.next_attempt_at == circuit.probe_at == NOW + timedelta(minutes=5)
    # Before its time nothing is tried; then exactly one message is.
    retry(NOW + timedelta(minutes=4))
    dispatch(NOW + timedelta(minutes=4))
    assert MessageAttempt.objects.count() == 1
    probe = NOW + timedelta(minutes=5)
    retry(probe)
    dispatch(probe)
    assert MessageAttempt.objects.count() == 2
    assert ProviderCircuit.objects.get().probe_at == probe + timedelta(minutes=5)
    carrier.answer = lambda _message: Answer("accepted")
    recovery = probe + timedelta(minutes=5)
    retry(recovery)
    assert dispatch(recovery) == {"successful": 3}
    assert not ProviderCircuit.objects.exists()
    assert set(Message.objects.values_list("network_retries", "outage_retries")) == {(0, 0)}


def test_ten_failures_in_a_row_of_different_messages_open_the_breaker(carrier):
    subscription = subscribe()
    for _ in range(12):
        message(subscription)
    carrier.says("transient", "outage", "provider", code="503")
    dispatch()
    assert ProviderCircuit.objects.get().reason == "outage"
    assert MessageAttempt.objects.count() == 10
    assert Message.objects.filter(status="pending", attempt_count=0).count() == 2


def test_a_breaker_closed_by_hand_counts_anew(carrier):
    subscription = subscribe()
    for _ in range(12):
        message(subscription)
    carrier.says("transient", "outage", "provider", code="503")
    dispatch()
    ProviderCircuit.objects.all()._raw_delete("default")
    dispatch()
    assert not ProviderCircuit.objects.exists()


def test_one_message_failing_over_and_over_does_not_open_the_breaker(carrier):
    message()
    carrier.says("transient", "network", "provider")
    now = NOW
    for _ in range(5):
        dispatch(now)
        now = Message.objects.get().next_attempt_at
        retry(now)
    assert not ProviderCircuit.objects.exists()


def test_a_dead_provider_stops_only_its_own_channel(carrier, settings):
    from messaging import providers
    from tests.messaging.carriers import Carrier

    settings.PROVIDERS = {**settings.PROVIDERS, "Email": "smtp"}
    providers._built[("smtp", "")] = dead = Carrier("smtp")
    dead.says("transient", "network", "provider")
    mail, push = subscribe(type="Email"), subscribe()
    for _ in range(15):
        message(mail)
        message(push)
    dispatch()
    assert Message.objects.filter(channel_type="push", status="successful").count() == 15
    assert len(dead.sent) == 10


@pytest.mark.parametrize(
    ("local", "until"),
    [
        ("2026-03-10T20:59:59+09:00", None),
        ("2026-03-10T21:00:00+09:00", "2026-03-11T08:00:00+09:00"),
        ("2026-03-11T07:59:59+09:00", "2026-03-11T08:00:00+09:00"),
        ("2026-03-11T08:00:00+09:00", None),
    ],
)
def test_marketing_waits_for_the_recipients_morning(carrier, local, until):
    from datetime import datetime

    now = datetime.fromisoformat(local)
    message(subscribe(time_zone="Asia/Seoul", marketing_consent=True), kind="marketing", now=now)
    dispatch(now)
    row = Message.objects.get()
    if until is None:
        assert row.status == "successful"
    else:
        assert (row.status, row.next_attempt_at) == ("pending", datetime.fromisoformat(until))
        assert not MessageAttempt.objects.exists()
        dispatch(row.next_attempt_at)
        assert Message.objects.get().status == "successful"


def test_night_consent_lets_marketing_through_at_night(carrier):
    from datetime import datetime

    now = datetime.fromisoformat("2026-03-10T23:00:00+09:00")
    consents = {"marketing_consent": True, "night_consent": True}
    message(subscribe(time_zone="Asia/Seoul", **consents), kind="marketing", now=now)
    assert dispatch(now) == {"successful": 1}


@pytest.mark.parametrize(("change", "reason"), [({"status": -2}, "unsubscribed"), ({"status": -31}, "not_sendable")])
def test_looks_at_the_subscription_once_more_before_calling(carrier, change, reason):
    row = message()
    Subscription.objects.filter(pk=row.subscription_id).update(**change)
    dispatch()
    row = Message.objects.get(pk=row.pk)
    assert (row.status, row.error_reason, row.error_details["scope"]) == ("failed", reason, "recipient")
    assert not carrier.sent and not MessageAttempt.objects.exists()


def test_a_poison_message_stops_nobody(carrier):
    poison, subscription = message(), subscribe()
    Subscription.objects.filter(pk=poison.subscription_id).update(token_encrypted="garbage", time_zone="Nowhere/Else")
    for _ in range(3):
        message(subscription)
    counts = dispatch()
    assert counts == {"successful": 3, "failed": 1}
    poison = Message.objects.get(pk=poison.pk)
    assert poison.error_reason == "address_unreadable"


def test_data_deeper_than_python_can_follow_stops_nobody(carrier):
    poison, other = message(), message()
    with connection.cursor() as cursor:
        deep = "UPDATE messages SET data = (repeat('{\"a\":', 3000) || '1' || repeat('}', 3000))::jsonb WHERE id = %s"
        cursor.execute(deep, [poison.pk])
    assert dispatch() == {"successful": 2}
    assert {sent.message_id: sent.data for sent in carrier.sent} == {poison.pk: {}, other.pk: {}}


def test_what_breaks_one_lane_is_told_and_leaves_the_others(carrier):
    mail = message(subscribe(type="Email"), title="x", body='<a href="https://shop.example/">x</a>')
    push, text = message(subscribe(type="iOSPush")), message(subscribe(type="SMS"))
    with connection.cursor() as cursor:
        cursor.execute("CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no room''; END'")
        cursor.execute("CREATE TRIGGER broken BEFORE INSERT ON tracked_links EXECUTE FUNCTION broken()")
    ran = sweeping.run("messaging.dispatch_due_messages", now=NOW)
    assert ran["counts"] == {"successful": 2, "error": 1}
    assert ran["error"].startswith("Email: ") and "no room" in ran["error"]
    assert {sent.message_id for sent in carrier.sent} == {push.pk, text.pk}
    left = Message.objects.get(pk=mail.pk)
    assert (left.status, left.lease_id, left.attempts.count()) == ("pending", None, 0)


def test_an_answer_the_database_refuses_is_left_out_and_the_rest_recorded(carrier):
    rows = [message() for _ in range(4)]
    carrier.answer = lambda m: Answer("accepted", latency_ms=2**40 if m.message_id == rows[2].pk else 1)
    counts = dispatch()
    assert counts["successful"] == 3 and counts["error"] == 1
    rows[2] = Message.objects.get(pk=rows[2].pk)
    assert rows[2].status == "pending" and rows[2].lease_id is not None
