from datetime import timedelta

import pytest

from messaging.models import Message, Subscription
from messaging.providers import Answer
from messaging.services import fail_accepted
from tests.messaging.factories import NOW, message, message_in, subscribe
from tests.messaging.test_dispatching import dispatch

pytestmark = pytest.mark.django_db
NOT_A_USER = Answer(
    "rejected", "permanent", "recipient", "3019", error_reason="kakao_not_user", subscription_status=-60, failover=True
)


def both_channels():
    kakao = subscribe(type="KakaoTalk", user_id="u1")
    return kakao, subscribe(kakao.application, "SMS", user_id="u1")


def test_an_sms_takes_over_with_the_same_text(carrier):
    kakao, sms = both_channels()
    first = message(kakao, body="안녕하세요", campaign="c", kind="transactional")
    carrier.answer = lambda m: NOT_A_USER if m.channel_type == "kakao_talk" else Answer("accepted")
    dispatch()
    dispatch(NOW + timedelta(seconds=1))
    second = Message.objects.get(failover_of=first)
    assert (second.subscription_id, second.body, second.campaign, second.kind) == (
        sms.pk, "안녕하세요", "c", "transactional",
    )  # fmt: skip
    assert second.status == "successful"
    assert (Message.objects.get(pk=first.pk).status, Subscription.objects.get(pk=kakao.pk).status) == ("failed", -60)


def test_the_other_way_has_its_own_from(carrier):
    kakao, _sms = both_channels()
    first = message(kakao, from_address="@profile")
    carrier.answer = lambda m: NOT_A_USER if m.channel_type == "kakao_talk" else Answer("accepted")
    dispatch()
    assert Message.objects.get(failover_of=first).from_address == ""


@pytest.mark.parametrize("status", [-2, -52, None])
def test_without_a_number_to_send_to_nobody_takes_over(carrier, status):
    kakao, sms = both_channels()
    Subscription.objects.filter(pk=sms.pk).update(**({"user_id": "u2"} if status is None else {"status": status}))
    message(kakao)
    carrier.answer = lambda _message: NOT_A_USER
    dispatch()
    assert Message.objects.get().status == "failed"


def test_a_later_word_of_the_provider_fails_over_once():
    kakao, _sms = both_channels()
    row = message_in("successful", kakao)
    assert fail_accepted([(row.pk, NOT_A_USER)], now=NOW) == {row.pk}
    assert fail_accepted([(row.pk, NOT_A_USER)], now=NOW) == set()
    assert Message.objects.filter(failover_of=row, channel_type="sms").count() == 1
    row = Message.objects.get(pk=row.pk)
    assert (row.status, row.error_details["scope"], row.sent_at) == ("failed", "recipient", NOW)


def test_a_fault_of_the_message_asks_for_no_other_way(carrier):
    kakao, _sms = both_channels()
    message(kakao)
    carrier.answer = lambda _message: Answer("rejected", "permanent", "message", "3016", error_reason="rejected")
    dispatch()
    assert Message.objects.count() == 1
    assert Subscription.objects.get(pk=kakao.pk).status == 1
