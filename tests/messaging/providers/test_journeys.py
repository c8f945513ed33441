"""From a row to the wire and back: the dispatcher with real providers against servers of their protocols."""

from datetime import timedelta

import pytest

from config import sweeping
from messaging.models import Message, MessageAttempt, ProviderCircuit, Subscription, Suppression
from messaging.providers import Answer, reset_providers
from tests.messaging.factories import NOW, ApplicationFactory, message, subscribe

from .servers import DROP, Reply

pytestmark = pytest.mark.django_db


def dispatch(now=NOW):
    assert sweeping.run("messaging.dispatch_due_messages", now=now)["error"] is None


def now_of(row):
    return Message.objects.get(pk=row.pk)


@pytest.fixture
def nhn(settings, plain_server):
    settings.PROVIDERS = {"KakaoTalk": "nhn", "SMS": "nhn"}
    settings.NHN_KAKAO_BASE_URL = settings.NHN_SMS_BASE_URL = plain_server.url
    settings.NHN_KAKAO_APPKEY = settings.NHN_SMS_APPKEY = "app"
    settings.NHN_KAKAO_SECRET = settings.NHN_SMS_SECRET = "shh"
    settings.NHN_KAKAO_SENDER_KEY, settings.NHN_SMS_FROM = "k" * 40, "15446859"
    reset_providers()
    return plain_server


def test_a_stranger_to_kakaotalk_gets_a_text_instead(nhn):
    def answer(request):
        head = {"isSuccessful": True, "resultCode": 0, "resultMessage": "SUCCESS"}
        if "alimtalk" in request.path:
            results = [{"recipientSeq": 1, "recipientNo": "01000000000", "resultCode": 3019}]
            return Reply(200, {"header": head, "message": {"requestId": "K1", "sendResults": results}})
        results = [{"recipientSeq": 1, "recipientNo": "01000000000", "resultCode": 0}]
        return Reply(200, {"header": head, "body": {"data": {"requestId": "S1", "sendResultList": results}}})

    nhn.answer = answer
    application = ApplicationFactory()
    kakao = subscribe(application, "KakaoTalk", user_id="u1")
    subscribe(application, "SMS", user_id="u1")
    first = message(kakao)
    dispatch()
    dispatch(NOW + timedelta(seconds=1))
    first = now_of(first)
    second = Message.objects.get(failover_of=first)
    assert (first.status, first.error_reason) == ("failed", "not_kakao_user")
    assert Subscription.objects.get(pk=kakao.pk).status == -60
    assert (second.channel_type, second.body, second.status) == ("sms", first.body, "successful")
    assert second.provider_message_id == "S1"


def test_of_two_equal_texts_the_one_nobody_took_is_sent_again(settings, plain_server):
    settings.PROVIDERS = {"SMS": "twilio"}
    settings.TWILIO_BASE_URL, settings.TWILIO_ACCOUNT_SID = plain_server.url, "AC1"
    settings.TWILIO_AUTH_TOKEN, settings.TWILIO_FROM = "shh", "+15005550006"
    reset_providers()
    number = subscribe(type="SMS")
    taken = []

    def answer(request):
        if request.method == "GET":
            item = {"sid": "SM1", "status": "delivered", "to": number.token, "body": "Hello"}
            return Reply(200, {"messages": [item]})
        taken.append(request)
        return DROP if len(taken) == 2 else Reply(201, {"sid": f"SM{len(taken)}", "status": "queued"})

    plain_server.answer = answer
    for _n in range(2):
        message(number, body="Hello")
    dispatch()
    later = NOW + timedelta(minutes=2)
    sweeping.run("messaging.resolve_unknown_attempts", now=later)
    dispatch(later)
    assert set(Message.objects.values_list("status", "provider_message_id")) == {
        ("successful", "SM1"),
        ("successful", "SM3"),
    }


def test_a_dead_service_of_two_stops_only_itself(nhn):
    def answer(request):
        if "alimtalk" in request.path:
            return Reply(401, {"header": {"isSuccessful": False, "resultCode": -1000}})
        results = [{"recipientSeq": 1, "recipientNo": "01000000000", "resultCode": 0}]
        head = {"isSuccessful": True, "resultCode": 0, "resultMessage": "SUCCESS"}
        return Reply(200, {"header": head, "body": {"data": {"requestId": "S1", "sendResultList": results}}})

    nhn.answer = answer
    kakao, text = message(subscribe(type="KakaoTalk")), message(subscribe(type="SMS"))
    dispatch()
    assert (now_of(kakao).failure_type, now_of(text).status) == ("config", "successful")
    assert [circuit.provider for circuit in ProviderCircuit.objects.all()] == ["nhn"]
    later = message(subscribe(type="SMS"))
    dispatch(NOW + timedelta(seconds=1))
    assert now_of(later).status == "successful"
    nhn.answer = lambda _request: Reply(401, {"header": {"isSuccessful": False, "resultCode": -1000}})
    message(subscribe(type="SMS"))
    dispatch(NOW + timedelta(seconds=2))
    assert {circuit.provider for circuit in ProviderCircuit.objects.all()} == {"nhn", "nhn_sms"}
    assert set(MessageAttempt.objects.values_list("provider", flat=True)) == {"nhn"}


@pytest.fixture
def twilio(settings, plain_server):
    settings.PROVIDERS = {"SMS": "twilio"}
    settings.TWILIO_BASE_URL = plain_server.url
    settings.TWILIO_ACCOUNT_SID, settings.TWILIO_AUTH_TOKEN, settings.TWILIO_FROM = "AC1", "secret", "+15005550006"
    reset_providers()
    return plain_server


def test_a_text_whose_answer_was_lost_is_found_and_not_sent_again(twilio):
    phone = subscribe(type="SMS")
    row = message(phone)

    def answer(request):
        if request.method == "POST":
            return DROP
        item = {"sid": "SM1", "status": "sent", "to": phone.token, "body": "Hello"}
        return Reply(200, {"messages": [item]})

    twilio.answer = answer
    dispatch()
    row = now_of(row)
    assert (row.status, row.hold_reason) == ("pending", "outcome_unknown")
    sweeping.run("messaging.resolve_unknown_attempts", now=NOW + timedelta(minutes=2))
    dispatch(NOW + timedelta(minutes=3))
    row = now_of(row)
    assert (row.status, row.provider_message_id) == ("successful", "SM1")
    assert [request.method for request in twilio.requests] == ["POST", "GET"]


def test_an_opt_out_at_the_provider_suppresses_the_number_and_hides_it(twilio):
    phone = subscribe(type="SMS")
    twilio.replies(Reply(400, {"code": 21610, "message": f"{phone.token} has replied STOP"}))
    row = message(phone)
    dispatch()
    row = now_of(row)
    assert (row.status, row.error_reason) == ("failed", "unsubscribed")
    assert Subscription.objects.get(pk=phone.pk).status == -2
    assert Suppression.objects.get().reason == "unsubscribed"
    attempt = MessageAttempt.objects.get()
    assert (attempt.outcome, attempt.code, attempt.provider) == ("rejected", "21610", "twilio")
    assert phone.token not in attempt.raw
    assert "has replied STOP" in attempt.raw


@pytest.mark.parametrize(
    ("reply", "status", "failure_type", "wait"),
    [
        (Reply(503, b"down", {"Retry-After": "1"}), "errored", "outage", 900),
        (Reply(429, {"code": 20429}, {"Retry-After": "90"}), "errored", "rate_limited", 90),
        (Reply(429, {"code": 20429}), "errored", "rate_limited", 60),
        (Reply(401, {"code": 20003}), "errored", "config", 300),
    ],
)
def test_the_next_step_follows_the_class(twilio, reply, status, failure_type, wait):
    twilio.replies(reply)
    row = message(subscribe(type="SMS"))
    dispatch()
    row = now_of(row)
    assert (row.status, row.failure_type) == (status, failure_type)
    assert row.next_attempt_at == NOW + timedelta(seconds=wait)
    assert ProviderCircuit.objects.filter(provider="twilio").exists() == (failure_type == "config")


def test_a_provider_nobody_answers_for_is_tried_again_in_30_seconds(twilio, settings, dead_port):
    settings.TWILIO_BASE_URL = f"http://127.0.0.1:{dead_port}"
    row = message(subscribe(type="SMS"))
    dispatch()
    row = now_of(row)
    assert (row.status, row.failure_type) == ("errored", "network")
    assert row.next_attempt_at == NOW + timedelta(seconds=30)


def test_a_country_that_is_not_enabled_holds_up_only_its_own_text(twilio):
    def answer(request):
        if request.form["To"].startswith("+1"):
            return Reply(400, {"code": 21408, "message": "not enabled for the region"})
        return Reply(201, {"sid": "SM1", "status": "queued"})

    twilio.answer = answer
    abroad = message(subscribe(type="SMS", token="+14155550123"))
    at_home = message(subscribe(type="SMS", token="+821012345678"))
    dispatch()
    abroad = now_of(abroad)
    assert (abroad.status, abroad.failure_type) == ("errored", "config")
    assert abroad.next_attempt_at == NOW + timedelta(minutes=5)
    assert now_of(at_home).status == "successful"
    assert not ProviderCircuit.objects.exists()


def test_an_answer_that_cannot_be_stored_leaves_the_others_recorded(carrier):
    rows = [message(subscribe(type="SMS")) for _n in range(3)]
    carrier.answer = lambda sent: Answer(
        "accepted", provider_message_id="\ud800" if sent.message_id == rows[1].pk else "1"
    )
    assert sweeping.run("messaging.dispatch_due_messages", now=NOW)["counts"] == {"successful": 2, "error": 1}
    assert [now_of(row).status for row in rows] == ["successful", "pending", "successful"]
