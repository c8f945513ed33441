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
NOT_FOUND = Answer("transient", "network", "message", "not_found")
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


@pytest.mark.parametrize("kind", ["AndroidPush", "SMS"])
def test_unknown_past_its_day_stays_unknown(carrier, kind):
    carrier.known = lambda _id: NOT_FOUND
    die_in_flight(kind)
    late = NOW + timedelta(hours=24)
    assert resolve(late) == {"lost": 1}
    sweeping.run("messaging.expire_messages", now=late)
    assert (only().status, only().error_reason, carrier.asked) == ("failed", "outcome_unknown", [])


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
    carrier.known = lambda _id: Answer("accepted", provider_message_id="SM1")
    assert resolve(NOW)["accepted"] == 1
    assert carrier.asked == [row.pk]
    assert (only().status, only().provider_message_id) == ("successful", "SM1")
    assert MessageAttempt.objects.get().outcome == "accepted"


def test_it_is_asked_after_and_sent_again_from_the_same_number(carrier):
    message(subscribe(type="SMS"), from_address="+15005550009")
    asked = []
    carrier.says("unknown")
    dispatch()
    carrier.query = lambda pk, own, started, message=None: asked.append(message.from_) or NOT_FOUND
    resolve(NOW + timedelta(minutes=2))
    carrier.says("accepted")
    dispatch(NOW + timedelta(minutes=3))
    assert asked == ["+15005550009"]
    assert [sent.from_ for sent in carrier.sent] == ["+15005550009"] * 2
    assert only().status == "successful"


def test_of_two_equal_texts_only_one_adopts_what_was_taken_once(carrier):
    carrier.answer = lambda _message: UNKNOWN
    number = subscribe(type="SMS")
    for _n in range(2):
        message(number)
    dispatch()
    carrier.known = lambda _id: Answer("accepted", provider_message_id="SM1")
    assert resolve(NOW) == {"accepted": 1, "asked_later": 1}
    held = Message.objects.get(status="pending")
    assert (held.hold_reason, held.next_attempt_at) == ("outcome_unknown", NOW + timedelta(minutes=1))


def test_a_text_message_the_provider_never_took_is_sent_again(carrier):
    die_in_flight("SMS")
    carrier.known = lambda _id: Answer("transient", "network", "message", "not_found")
    assert resolve(LATER)["repeated"] == 1
    assert dispatch(LATER) == {"successful": 1}


def test_what_is_not_listed_within_a_minute_may_only_not_be_listed_yet(carrier):
    carrier.answer = lambda _message: UNKNOWN
    carrier.known = lambda _id: NOT_FOUND
    message(subscribe(type="SMS"))
    dispatch()
    assert resolve(NOW) == {"asked_later": 1}
    again = NOW + timedelta(minutes=1)
    assert (only().hold_reason, only().next_attempt_at) == ("outcome_unknown", again)
    assert resolve(again) == {"repeated": 1}
    assert only().hold_reason is None


def test_what_was_called_a_repeat_is_not_sent_again_though_it_is_not_listed(carrier):
    carrier.answer = lambda _message: Answer("unknown", code="-1005")
    carrier.known = lambda _id: NOT_FOUND
    message(subscribe(type="KakaoTalk"))
    dispatch()
    assert resolve(NOW + timedelta(minutes=10)) == {"asked_later": 1}
    assert only().hold_reason == "outcome_unknown"


def test_a_question_that_breaks_off_leaves_the_other_answers(carrier):
    first, second = die_in_flight("SMS"), message(subscribe(type="SMS"))
    claim_batch("SMS", "null", 10, now=NOW)

    def known(pk):
        if pk == first.pk:
            raise RuntimeError
        return Answer("accepted", provider_message_id="SM2")

    carrier.known = known
    assert resolve(LATER) == {"lost": 2, "accepted": 1, "asked_later": 1}
    assert Message.objects.get(pk=second.pk).status == "successful"


@pytest.mark.parametrize(("kind", "held"), [("AndroidPush", None), ("Email", "outcome_unknown")])
def test_held_by_hand_though_never_tried_stops_nobody(carrier, kind, held):
    row = message(subscribe(type=kind))
    Message.objects.filter(pk=row.pk).update(hold_reason="outcome_unknown", next_attempt_at=NOW)
    resolve(NOW)
    assert only().hold_reason == held


def test_a_lease_without_an_attempt_holds_nobody_back(carrier):
    row = message()
    Message.objects.filter(pk=row.pk).update(lease_id=row.pk, leased_until=NOW)
    dispatch(NOW - timedelta(seconds=1))
    assert carrier.sent == []
    dispatch(NOW)
    assert (only().status, only().lease_id) == ("successful", None)


def test_a_lease_without_an_attempt_does_not_outlive_the_day():
    row = message()
    Message.objects.filter(pk=row.pk).update(lease_id=row.pk, leased_until=None)
    sweeping.run("messaging.expire_messages", now=NOW + timedelta(hours=24))
    assert (only().status, only().error_reason, only().lease_id) == ("failed", "expired", None)


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
