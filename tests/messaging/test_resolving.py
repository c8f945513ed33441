from datetime import timedelta

import pytest

from config import sweeping
from config.errors import Conflict
from messaging.models import Message, MessageAttempt
from messaging.providers import Answer
from messaging.services.claiming import claim_batch
from messaging.services.resolving import Policy, policy_for, resolve_message
from tests.messaging.factories import NOW, message, subscribe
from tests.messaging.test_dispatching import dispatch

pytestmark = pytest.mark.django_db
UNKNOWN = Answer("unknown", code="read_timeout")
LATER = NOW + timedelta(minutes=3)


def resolve(now):
    ran = sweeping.run("messaging.resolve_unknown_attempts", now=now)
    assert ran["error"] is None, ran
    return {word: count for word, count in ran["counts"].items() if count}


def only():
    return Message.objects.get()


def die_in_flight(kind):
    """A dispatcher that claims and is never heard of again."""
    row = message(subscribe(type=kind))
    claim_batch(kind, "null", 10, now=NOW)
    return row


def test_the_table_of_unknown_outcomes():
    assert policy_for("push", "marketing") is Policy.REPEAT_ONCE
    assert policy_for("sms", "notice") is policy_for("kakao_talk", "notice") is Policy.ASK
    assert policy_for("email", "transactional") is Policy.REPEAT_ONCE
    assert policy_for("email", "notice") is policy_for("email", "marketing") is Policy.HOLD


def test_leaves_a_living_lease_alone():
    die_in_flight("AndroidPush")
    assert resolve(LATER - timedelta(seconds=1)) == {}
    assert MessageAttempt.objects.get().ended_at is None


def written_by_hand(row, number=1, **fields):
    MessageAttempt.objects.create(message=row, attempt_no=number, started_at=NOW, provider="null", **fields)


def test_an_open_attempt_that_nobody_holds_is_unknown():
    row = message(subscribe(type="Email"))
    written_by_hand(row)
    ran = sweeping.run("messaging.resolve_unknown_attempts", now=LATER, dry_run=True)
    assert ran["counts"]["lost"] == 1
    assert resolve(LATER - timedelta(seconds=1)) == {}
    assert resolve(LATER) == {"lost": 1, "held": 1}
    assert (MessageAttempt.objects.get().outcome, only().hold_reason) == ("unknown", "outcome_unknown")


def test_a_dispatcher_counts_on_from_attempts_written_by_hand(carrier):
    application = subscribe().application
    ended, begun, other = (message(subscribe(application)) for _n in range(3))
    for number in (1, 2):
        written_by_hand(ended, number, ended_at=NOW, outcome="transient")
    written_by_hand(begun)
    dispatch(NOW)
    assert {sent.message_id: sent.attempt_no for sent in carrier.sent} == {ended.pk: 3, other.pk: 1}
    assert resolve(NOW)["lost"] == 1
    dispatch(NOW)
    assert [sent.attempt_no for sent in carrier.sent if sent.message_id == begun.pk] == [2]
    assert set(Message.objects.values_list("status", flat=True)) == {"successful"}


def test_a_push_is_repeated_once_with_the_same_ids_and_then_held(carrier):
    row = die_in_flight("AndroidPush")
    counts = resolve(LATER)
    assert counts["lost"] == 1 and counts["repeated"] == 1
    assert MessageAttempt.objects.get().outcome == "unknown"
    carrier.answer = lambda _message: UNKNOWN
    dispatch(LATER)
    assert [(m.message_id, m.attempt_no) for m in carrier.sent] == [(row.pk, 2)]
    assert only().hold_reason == "outcome_unknown"
    assert resolve(LATER)["held"] == 1
    assert (only().status, only().hold_reason, only().next_attempt_at) == ("pending", "outcome_unknown", None)
    dispatch(LATER + timedelta(hours=1))
    assert resolve(LATER + timedelta(hours=1)) == {}
    assert len(carrier.sent) == 1


def test_ordinary_mail_is_held_and_fails_as_unknown_after_a_day(carrier):
    carrier.answer = lambda _message: UNKNOWN
    message(subscribe(type="Email"))
    dispatch()
    resolve(NOW)
    dispatch(NOW + timedelta(hours=1))
    assert len(carrier.sent) == 1
    sweeping.run("messaging.expire_messages", now=NOW + timedelta(hours=24) - timedelta(seconds=1))
    assert only().status == "pending"
    sweeping.run("messaging.expire_messages", now=NOW + timedelta(hours=24))
    assert (only().status, only().error_reason) == ("failed", "outcome_unknown")


def test_transactional_mail_is_repeated_once(carrier):
    carrier.answer = lambda _message: UNKNOWN
    message(subscribe(type="Email"), kind="transactional")
    for _ in range(3):
        dispatch()
        resolve(NOW)
    assert len(carrier.sent) == 2
    assert only().hold_reason == "outcome_unknown"


def test_a_text_message_is_asked_after_and_adopts_the_answer(carrier):
    carrier.answer = lambda _message: UNKNOWN
    row = message(subscribe(type="SMS"))
    dispatch()
    resolve(NOW)
    assert carrier.asked == []  # lists lag: not within the first minute
    carrier.known = lambda _id: Answer("accepted", provider_message_id="SM1")
    assert resolve(NOW + timedelta(minutes=1))["accepted"] == 1
    assert carrier.asked == [row.pk]
    assert (only().status, only().provider_message_id) == ("successful", "SM1")
    assert MessageAttempt.objects.get().outcome == "accepted"


def test_a_text_message_the_provider_never_took_is_sent_again(carrier):
    die_in_flight("SMS")
    carrier.known = lambda _id: Answer("transient", "network", "message", "not_found")
    assert resolve(LATER)["repeated"] == 1
    assert dispatch(LATER) == {"successful": 1}


def test_a_question_without_an_answer_is_asked_again_later(carrier):
    die_in_flight("SMS")
    assert resolve(LATER)["asked_later"] == 1
    row = only()
    assert (row.hold_reason, row.next_attempt_at, row.lease_id) == (
        "outcome_unknown",
        LATER + timedelta(minutes=5),
        None,
    )


def test_an_operator_decides_what_nobody_knows(carrier):
    carrier.answer = lambda _message: UNKNOWN
    row = message(subscribe(type="Email"))
    with pytest.raises(Conflict):
        resolve_message(row.pk, "accepted", now=NOW)
    dispatch()
    resolve_message(row.pk, "rejected", now=NOW)
    assert (only().status, only().error_reason) == ("failed", "rejected")
    with pytest.raises(Conflict):
        resolve_message(row.pk, "accepted", now=NOW)
