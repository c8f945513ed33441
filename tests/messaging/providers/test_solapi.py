import hashlib
import hmac
from datetime import UTC, datetime

import pytest

from messaging.providers import provider_for

from .conftest import ACCEPTED, CONFIG, LIMITED, NETWORK, OUTAGE, UNKNOWN, summary
from .servers import DROP, HANG, Reply

STARTED = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
GONE = ("rejected", "permanent", "recipient")
OUR_SENDER = ("config", "config", "sender")
TAKEN = Reply(
    200,
    {
        "groupInfo": {"groupId": "G1", "count": {"registeredSuccess": 1}},
        "failedMessageList": [],
        "messageList": [{"messageId": "M1", "statusCode": "2000"}],
    },
)


def failed(code):
    return Reply(
        200, {"groupInfo": {"groupId": "G1"}, "failedMessageList": [{"to": "01012345678", "statusCode": code}]}
    )


@pytest.fixture
def solapi(settings, plain_server):
    settings.PROVIDERS = {"SMS": "solapi", "KakaoTalk": "solapi"}
    settings.SOLAPI_BASE_URL = plain_server.url
    settings.SOLAPI_API_KEY, settings.SOLAPI_API_SECRET = "NCSKEY", "shh"
    settings.SOLAPI_FROM, settings.SOLAPI_PF_ID = "029302266", "PF1"
    plain_server.replies(TAKEN)
    return provider_for("SMS")


@pytest.mark.parametrize("reply", [failed("1062"), Reply(400, {"errorCode": "2062"})])
def test_a_number_that_is_not_registered_is_its_senders_affair(solapi, plain_server, message, send_one, reply):
    plain_server.replies(reply)
    answer = send_one(solapi, message("sms", from_="+82215440000"))
    assert (summary(answer), answer.error_reason) == (("rejected", "permanent", "sender"), "sender_rejected")
    assert plain_server.requests[0].json["messages"][0]["from"] == "0215440000"
    assert summary(send_one(solapi, message("sms"))) == ("config", "config", "sender")


def test_every_request_is_signed_anew(solapi, plain_server, message):
    solapi.send([message("sms"), message("sms")])
    salts = set()
    for request in plain_server.requests:
        scheme, _space, rest = request.headers["authorization"].partition(" ")
        fields = dict(part.split("=", 1) for part in rest.split(", "))
        signed = hmac.new(b"shh", (fields["date"] + fields["salt"]).encode(), hashlib.sha256).hexdigest()
        assert (scheme, fields["apiKey"], fields["signature"]) == ("HMAC-SHA256", "NCSKEY", signed)
        datetime.fromisoformat(fields["date"])
        salts.add(fields["salt"])
    assert len(salts) == 2


def test_a_text_carries_our_id(solapi, plain_server, message, send_one):
    sent = message("sms", body="안녕")
    answer = send_one(solapi, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == "M1"
    [request] = plain_server.requests
    assert request.path == "/messages/v4/send-many/detail"
    assert request.json["messages"] == [
        {
            "to": "01012345678",
            "from": "029302266",
            "text": "안녕",
            "type": "SMS",
            "customFields": {"message_id": str(sent.message_id)},
        }
    ]


def test_a_long_text_has_a_subject(solapi, plain_server, message, send_one):
    send_one(solapi, message("sms", body="가" * 46, title="공지"))
    [sent] = plain_server.requests[0].json["messages"]
    assert (sent["type"], sent["subject"]) == ("LMS", "공지")


def test_a_number_abroad_names_its_country(solapi, plain_server, message, send_one):
    send_one(solapi, message("sms", token="+4915112345678"))
    [sent] = plain_server.requests[0].json["messages"]
    assert (sent["country"], sent["to"]) == ("49", "15112345678")


def test_an_alimtalk_switches_off_solapis_own_failover(solapi, plain_server, message, send_one):
    sent = message("kakao_talk", template_code="T1", template_parameters={"name": "김"})
    send_one(provider_for("KakaoTalk"), sent)
    [asked] = plain_server.requests[0].json["messages"]
    assert asked["type"] == "ATA"
    assert asked["kakaoOptions"] == {
        "pfId": "PF1", "templateId": "T1", "variables": {"#{name}": "김"}, "disableSms": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "expected", "status", "failover"),
    [
        (failed("3104"), GONE, -60, True),
        (failed("3107"), GONE, -61, True),
        (failed("1061"), GONE, -2, False),
        (failed("1062"), OUR_SENDER, None, False),
        (failed("1030"), OUR_SENDER, None, False),
        (failed("1999"), ("rejected", "permanent", "message"), None, False),
        (Reply(402, {"errorCode": "NotEnoughBalance"}), OUR_SENDER, None, False),
        (Reply(400, {"errorCode": "ValidationError"}), ("rejected", "permanent", "message"), None, False),
        (Reply(403, {"errorCode": "SignatureDoesNotMatch"}), CONFIG, None, False),
        (Reply(401, {}), CONFIG, None, False),
        (Reply(400, {"errorCode": "InvalidAPIKey"}), CONFIG, None, False),
        (Reply(400, {"errorCode": "X", "failedMessageList": [{"statusCode": "3104"}]}), GONE, -60, True),
        (Reply(429, {"errorCode": "TooManyRequests"}, {"Retry-After": "9"}), LIMITED, None, False),
        (Reply(500, {"errorCode": "InternalError"}), OUTAGE, None, False),
        (Reply(200, {"hello": 1}), UNKNOWN, None, False),
        (Reply(200, b"-"), UNKNOWN, None, False),
        (DROP, UNKNOWN, None, False),
        (HANG, UNKNOWN, None, False),
    ],
)
def test_each_result_has_its_class_scope_and_effect(
    quick, solapi, plain_server, message, send_one, reply, expected, status, failover
):
    plain_server.replies(reply)
    answer = send_one(solapi, message("sms"))
    assert summary(answer) == expected
    assert (answer.subscription_status, answer.failover) == (status, failover)


def test_never_connected_is_network(solapi, message, send_one, dead_port):
    solapi.base_url = f"http://127.0.0.1:{dead_port}"
    assert summary(send_one(solapi, message("sms"))) == NETWORK


def test_an_unknown_text_is_looked_for_page_by_page(solapi, plain_server, message):
    sent = message("sms")
    ours = {"messageId": "M7", "statusCode": "4000", "customFields": {"message_id": str(sent.message_id)}}
    plain_server.replies(
        Reply(200, {"messageList": {"M1": {"messageId": "M1"}}, "nextKey": "M2"}),
        Reply(200, {"messageList": {"M7": ours}, "nextKey": None}),
    )
    answer = solapi.query(sent.message_id, "", STARTED)
    assert (answer.outcome, answer.provider_message_id, answer.code) == ("accepted", "M7", "4000")
    assert plain_server.requests[1].query["startKey"] == "M2"


def test_a_text_nobody_took_may_go_again(solapi, plain_server, message):
    plain_server.replies(Reply(200, {"messageList": {}}))
    assert solapi.query(message("sms").message_id, "", STARTED).code == "not_found"


@pytest.mark.parametrize("reply", [Reply(500, {}), Reply(200, {}), DROP])
def test_a_provider_that_cannot_tell_says_so(solapi, plain_server, message, reply):
    plain_server.replies(reply)
    assert solapi.query(message("sms").message_id, "", STARTED) is None
