from datetime import UTC, datetime, timedelta

import pytest

from messaging.providers import provider_for

from .conftest import ACCEPTED, CONFIG, LIMITED, NETWORK, NUMBER, OUTAGE, UNKNOWN, summary
from .servers import DROP, HANG, Reply

STARTED = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
GONE = ("rejected", "permanent", "recipient")
BAD_MESSAGE = ("rejected", "permanent", "message")


def kakao_reply(header=0, result=0, status=200, headers=None):
    message = {
        "requestId": "R1",
        "sendResults": [
            {"recipientSeq": 1, "recipientNo": NUMBER, "resultCode": result, "resultMessage": f"for {NUMBER}"}
        ],
    }
    head = {"isSuccessful": header == 0, "resultCode": header, "resultMessage": "SUCCESS"}
    return Reply(status, {"header": head, "message": message}, headers or {})


def sms_reply(header=0, result=0):
    results = [{"recipientNo": "01012345678", "resultCode": result, "recipientSeq": 1}]
    head = {"isSuccessful": header == 0, "resultCode": header, "resultMessage": "x"}
    return Reply(200, {"header": head, "body": {"data": {"requestId": "R1", "sendResultList": results}}})


@pytest.fixture
def kakao(settings, plain_server):
    settings.PROVIDERS = {"KakaoTalk": "nhn", "SMS": "nhn"}
    settings.NHN_KAKAO_BASE_URL = settings.NHN_SMS_BASE_URL = plain_server.url
    settings.NHN_KAKAO_APPKEY, settings.NHN_KAKAO_SECRET, settings.NHN_KAKAO_SENDER_KEY = "app", "shh", "k" * 40
    settings.NHN_SMS_APPKEY, settings.NHN_SMS_SECRET, settings.NHN_SMS_FROM = "smsapp", "hush", "15446859"
    plain_server.replies(kakao_reply())
    return provider_for("KakaoTalk")


@pytest.fixture
def sms(kakao, plain_server):
    plain_server.replies(sms_reply())
    return provider_for("SMS")


@pytest.fixture
def alimtalk(message):
    return lambda **changes: message(
        "kakao_talk", **{"template_code": "ORDER1", "template_parameters": {"name": "김", "n": 2}, **changes}
    )


def test_an_alimtalk_names_template_and_parameters_and_switches_off_nhns_own_failover(
    kakao, plain_server, alimtalk, send_one
):
    sent = alimtalk()
    answer = send_one(kakao, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == "R1"
    [request] = plain_server.requests
    assert request.path == "/alimtalk/v2.3/appkeys/app/messages"
    assert request.headers["x-secret-key"] == "shh"
    assert request.headers["x-nc-api-idempotency-key"] == str(sent.message_id)
    assert request.json == {
        "senderKey": "k" * 40,
        "templateCode": "ORDER1",
        "recipientList": [
            {
                "recipientNo": "01012345678",
                "templateParameter": {"name": "김", "n": "2"},
                "resendParameter": {"isResend": False},
                "recipientGroupingKey": str(sent.message_id),
            }
        ],
    }


@pytest.mark.parametrize(
    ("reply", "expected", "status", "failover"),
    [
        (kakao_reply(-1000), CONFIG, None, False),
        (kakao_reply(-4005), CONFIG, None, False),
        (kakao_reply(-1006), CONFIG, None, False),
        (kakao_reply(-2017), CONFIG, None, False),
        (kakao_reply(-9999), OUTAGE, None, False),
        (kakao_reply(-7000), OUTAGE, None, False),
        (kakao_reply(4), BAD_MESSAGE, None, False),
        (kakao_reply(-3003), BAD_MESSAGE, None, False),
        (kakao_reply(0, -3005), BAD_MESSAGE, None, False),
        (kakao_reply(0, -5000), GONE, -50, False),
        (kakao_reply(0, 3018), GONE, None, True),
        (kakao_reply(0, 3019), GONE, -60, True),
        (kakao_reply(0, 3020), GONE, -61, True),
        (kakao_reply(0, 3021), GONE, None, True),
        (kakao_reply(0, 3008), GONE, -50, False),
        (kakao_reply(0, 3010), OUTAGE, None, False),
        (kakao_reply(0, 4156), LIMITED, None, False),
        (kakao_reply(0, 12345), BAD_MESSAGE, None, False),
        (Reply(200, b"<html>"), UNKNOWN, None, False),
        (Reply(200, {"header": {"resultCode": 0, "isSuccessful": True}}), UNKNOWN, None, False),
        (Reply(400, kakao_reply(-1000).body), CONFIG, None, False),
        (Reply(400, kakao_reply(-5000).body), GONE, -50, False),
        (Reply(400, kakao_reply(-2000).body), BAD_MESSAGE, None, False),
        (Reply(401, {}), CONFIG, None, False),
        (Reply(429, {}, {"Retry-After": "5"}), LIMITED, None, False),
        (Reply(500, {}), OUTAGE, None, False),
    ],
)
def test_each_result_has_its_class_scope_and_effect(
    kakao, plain_server, alimtalk, send_one, reply, expected, status, failover
):
    plain_server.replies(reply)
    answer = send_one(kakao, alimtalk())
    assert summary(answer) == expected
    assert (answer.subscription_status, answer.failover) == (status, failover)


@pytest.mark.parametrize(("behaviour", "expected"), [(DROP, UNKNOWN), (HANG, UNKNOWN)])
def test_a_lost_answer_is_unknown(quick, kakao, plain_server, alimtalk, send_one, behaviour, expected):
    plain_server.replies(behaviour)
    assert summary(send_one(kakao, alimtalk())) == expected


def test_never_connected_is_network(kakao, alimtalk, send_one, dead_port):
    kakao.base_url = f"http://127.0.0.1:{dead_port}"
    assert summary(send_one(kakao, alimtalk())) == NETWORK


def found(key, message_id, **item):
    item = {"requestId": "R9", "recipientSeq": 2, "recipientGroupingKey": str(message_id), **item}
    head = {"isSuccessful": True, "resultCode": 0, "resultMessage": "SUCCESS"}
    if key == "kakao":
        return Reply(200, {"header": head, "messageSearchResultResponse": {"messages": [item], "totalCount": 1}})
    return Reply(200, {"header": head, "body": {"data": [item], "totalCount": 1}})


def nothing(key):
    head = {"isSuccessful": True, "resultCode": 0, "resultMessage": "SUCCESS"}
    if key == "kakao":
        return Reply(200, {"header": head, "messageSearchResultResponse": {"messages": [], "totalCount": 0}})
    return Reply(200, {"header": head, "body": {"data": [], "totalCount": 0}})


@pytest.mark.parametrize(
    ("item", "outcome", "failover"),
    [
        ({"messageStatus": "COMPLETED", "resultCode": "1000"}, "accepted", False),
        ({"messageStatus": "READY"}, "accepted", False),
        ({"messageStatus": "FAILED", "resultCode": "3019"}, "rejected", True),
        ({"messageStatus": "FAILED", "resultCode": "3014"}, "rejected", False),
    ],
)
def test_an_unknown_alimtalk_is_looked_for_by_our_key(kakao, plain_server, alimtalk, item, outcome, failover):
    sent = alimtalk()
    plain_server.replies(found("kakao", sent.message_id, **item))
    answer = kakao.query(sent.message_id, "", STARTED)
    assert (answer.outcome, answer.failover) == (outcome, failover)
    [request] = plain_server.requests
    assert request.query["recipientGroupingKey"] == str(sent.message_id)
    assert request.query["startRequestDate"] == "2026-05-01 20:55:00"  # Seoul
    assert request.headers["x-secret-key"] == "shh"


def test_an_alimtalk_made_weeks_ahead_is_looked_for_in_the_day_it_was_tried(kakao, plain_server, alimtalk):
    sent = alimtalk(created_at=STARTED - timedelta(days=45))
    plain_server.replies(found("kakao", sent.message_id, messageStatus="COMPLETED"))
    kakao.query(sent.message_id, "", STARTED, sent)
    assert plain_server.requests[0].query["startRequestDate"] == "2026-04-30 20:55:00"


def test_a_listed_alimtalk_that_does_not_repeat_our_key_is_ours(kakao, plain_server, alimtalk):
    """The list was asked for by the key; taking it for another's would send the message twice."""
    item = {"requestId": "R9", "messageStatus": "COMPLETED", "resultCode": "1000"}
    head = {"isSuccessful": True, "resultCode": 0, "resultMessage": "SUCCESS"}
    plain_server.replies(Reply(200, {"header": head, "messageSearchResultResponse": {"messages": [item]}}))
    assert kakao.query(alimtalk().message_id, "", STARTED).outcome == "accepted"


def test_an_alimtalk_nobody_took_may_go_again(kakao, plain_server, alimtalk):
    plain_server.replies(nothing("kakao"))
    answer = kakao.query(alimtalk().message_id, "", STARTED)
    assert (answer.outcome, answer.failure_type, answer.code) == ("transient", "network", "not_found")


@pytest.mark.parametrize("reply", [Reply(500, {}), kakao_reply(-9999), Reply(200, {}), DROP])
def test_a_provider_that_cannot_tell_says_so(kakao, plain_server, alimtalk, reply):
    plain_server.replies(reply)
    assert kakao.query(alimtalk().message_id, "", STARTED) is None


def test_a_repeated_key_means_that_the_first_was_taken(kakao, plain_server, alimtalk, send_one):
    sent = alimtalk()
    plain_server.replies(kakao_reply(-1005), found("kakao", sent.message_id, messageStatus="READY"))
    answer = send_one(kakao, sent)
    assert (answer.outcome, answer.provider_message_id) == ("accepted", "R9")


def test_a_repeated_key_that_is_not_listed_yet_stays_unknown(kakao, plain_server, alimtalk, send_one):
    plain_server.replies(kakao_reply(-1005), nothing("kakao"))
    assert summary(send_one(kakao, alimtalk())) == UNKNOWN


@pytest.mark.parametrize(
    ("body", "path"), [("가" * 45, "sms"), ("가" * 45 + "a", "mms"), ("a" * 90, "sms"), ("😀" * 46, "mms")]
)
def test_above_90_bytes_a_text_is_a_long_one(sms, plain_server, message, send_one, body, path):
    answer = send_one(sms, message("sms", body=body, title=""))
    assert summary(answer) == ACCEPTED
    [request] = plain_server.requests
    assert request.path == f"/sms/v3.0/appKeys/smsapp/sender/{path}"
    assert request.headers["x-secret-key"] == "hush"
    assert request.json["sendNo"] == "15446859"
    [recipient] = request.json["recipientList"]
    assert recipient["recipientNo"] == "01012345678"
    assert ("title" in request.json) == (path == "mms")


def test_a_number_abroad_is_given_whole(sms, plain_server, message, send_one):
    send_one(sms, message("sms", token="+14155550123"))
    assert plain_server.requests[0].json["recipientList"][0]["internationalRecipientNo"] == "14155550123"


@pytest.mark.parametrize(
    ("reply", "expected", "status"),
    [
        (sms_reply(-2019), GONE, -50),
        (sms_reply(0, -2019), GONE, -50),
        (sms_reply(-6001), GONE, -2),
        (sms_reply(-2312), CONFIG, None),
        (sms_reply(-1001), CONFIG, None),
        (sms_reply(-9999), OUTAGE, None),
        (sms_reply(-2023), BAD_MESSAGE, None),
        (Reply(200, {"header": {"resultCode": 0, "isSuccessful": True}, "body": {}}), UNKNOWN, None),
    ],
)
def test_each_result_of_a_text(sms, plain_server, message, send_one, reply, expected, status):
    plain_server.replies(reply)
    answer = send_one(sms, message("sms"))
    assert summary(answer) == expected
    assert answer.subscription_status == status


@pytest.mark.parametrize("reply", [sms_reply(-2312), sms_reply(0, -2313)])
def test_a_number_that_is_not_registered_is_its_senders_affair(sms, plain_server, message, send_one, reply):
    plain_server.replies(reply)
    answer = send_one(sms, message("sms", from_="+82215440000"))
    assert (summary(answer), answer.error_reason) == (("rejected", "permanent", "sender"), "sender_rejected")
    assert plain_server.requests[0].json["sendNo"] == "0215440000"
    assert summary(send_one(sms, message("sms"))) == CONFIG


def test_an_unknown_text_is_looked_for_among_short_and_long_ones(sms, plain_server, message):
    sent = message("sms")
    plain_server.replies(nothing("sms"), found("sms", sent.message_id, msgStatus="3", resultCode="1000"))
    assert sms.query(sent.message_id, "", STARTED).provider_message_id == "R9"
    assert [request.path.split("?")[0].rsplit("/")[-1] for request in plain_server.requests] == ["sms", "mms"]


def test_a_text_nobody_took_may_go_again(sms, plain_server, message):
    plain_server.replies(nothing("sms"))
    assert sms.query(message("sms").message_id, "", STARTED).code == "not_found"
