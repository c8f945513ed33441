"""FCM HTTP v1 against a server that speaks HTTP/2 over TLS and a token endpoint on loopback."""

import json

import jwt
import pytest

from messaging.providers import provider_for

from .conftest import ACCEPTED, CONFIG, LIMITED, NETWORK, OUTAGE, PUSH_TOKEN, UNKNOWN, summary
from .servers import DROP, GOAWAY_HEARD, GOAWAY_UNHEARD, HANG, REFUSED, RESET, Reply

TAKEN = Reply(200, {"name": "projects/signalbox-test/messages/0:1"})


def refusal(status, google, code="", message="", fields=(), headers=None):
    details = []
    if code:
        details.append({"@type": "type.googleapis.com/google.firebase.fcm.v1.FcmError", "errorCode": code})
    if fields:
        violations = [{"field": field, "description": "bad"} for field in fields]
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations})
    error = {"code": status, "status": google, "message": message or PUSH_TOKEN, "details": details}
    return Reply(status, {"error": error}, headers or {})


@pytest.fixture
def tokens(plain_server):
    """Google's token endpoint."""
    plain_server.answer = lambda request: Reply(
        200, {"access_token": f"ya29.{len(plain_server.requests)}", "expires_in": 3599, "token_type": "Bearer"}
    )
    return plain_server


@pytest.fixture
def fcm(settings, h2_server, tokens, service_account):
    settings.PROVIDERS = {"AndroidPush": "fcm"}
    settings.FCM_BASE_URL = h2_server.url
    settings.FCM_CREDENTIALS = service_account(f"{tokens.url}/token")
    h2_server.replies(TAKEN)
    return provider_for("AndroidPush")


def test_a_push_carries_our_id_where_a_repeat_is_dropped(fcm, h2_server, message, send_one):
    sent = message(data={"order": {"id": 7}, "count": 3, "word": "예"})
    answer = send_one(fcm, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == "projects/signalbox-test/messages/0:1"
    [request] = h2_server.requests
    assert (request.method, request.path) == ("POST", "/v1/projects/signalbox-test/messages:send")
    asked = request.json["message"]
    assert asked["token"] == PUSH_TOKEN
    assert asked["notification"] == {"title": "제목 Title", "body": "Hello"}
    assert asked["android"]["collapse_key"] == str(sent.message_id)
    assert asked["data"] == {
        "order": '{"id": 7}', "count": "3", "word": "예", "message_id": str(sent.message_id),
    }  # fmt: skip


def test_the_access_token_is_asked_for_once_with_a_signed_assertion(fcm, h2_server, tokens, message, rsa_key):
    answers = fcm.send([message() for _ in range(20)]) + fcm.send([message()])
    assert {answer.outcome for answer in answers} == {"accepted"}
    [asked] = tokens.requests
    claims = jwt.decode(
        asked.form["assertion"], rsa_key.public_key(), algorithms=["RS256"], audience=f"{tokens.url}/token"
    )
    assert claims["iss"] == "sender@signalbox-test.iam.example"
    assert claims["scope"] == "https://www.googleapis.com/auth/firebase.messaging"
    assert {request.headers["authorization"] for request in h2_server.requests} == {"Bearer ya29.1"}
    assert h2_server.connections == 1


@pytest.mark.parametrize(
    ("reply", "expected", "status", "code"),
    [
        (refusal(404, "NOT_FOUND", "UNREGISTERED"), ("rejected", "permanent", "recipient"), -10, "UNREGISTERED"),
        (
            Reply(404, {"error": {"code": 404, "details": [{"errorCode": "UNREGISTERED"}]}}),
            ("rejected", "permanent", "recipient"), -10, "UNREGISTERED",
        ),
        (refusal(403, "PERMISSION_DENIED", "SENDER_ID_MISMATCH"), ("rejected", "permanent", "recipient"), -6, None),
        (
            refusal(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "The registration token is not a valid FCM token"),
            ("rejected", "permanent", "recipient"), -10, None,
        ),
        (
            refusal(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", fields=["message.token"]),
            ("rejected", "permanent", "recipient"), -10, None,
        ),
        (
            refusal(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT", fields=["message.data[0].value"]),
            ("rejected", "permanent", "message"), None, "INVALID_ARGUMENT",
        ),
        (
            refusal(400, "INVALID_ARGUMENT", "", "Message is too big"),
            ("rejected", "permanent", "message"), None, None,
        ),
        (refusal(401, "UNAUTHENTICATED", "THIRD_PARTY_AUTH_ERROR"), CONFIG, None, "THIRD_PARTY_AUTH_ERROR"),
        (refusal(401, "UNAUTHENTICATED"), CONFIG, None, "UNAUTHENTICATED"),
        (refusal(403, "PERMISSION_DENIED"), CONFIG, None, "PERMISSION_DENIED"),
        (refusal(429, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED"), LIMITED, None, "QUOTA_EXCEEDED"),
        (refusal(503, "UNAVAILABLE", "UNAVAILABLE"), OUTAGE, None, "UNAVAILABLE"),
        (refusal(500, "INTERNAL", "INTERNAL"), OUTAGE, None, "INTERNAL"),
        (Reply(502, b"<html>Bad gateway</html>"), OUTAGE, None, "http_502"),
        (Reply(200, b"<html>Welcome</html>"), UNKNOWN, None, "malformed"),
        (Reply(200, {"id": 4}), UNKNOWN, None, "malformed"),
        (Reply(400, []), ("rejected", "permanent", "message"), None, "http_400"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_class_scope_and_effect(fcm, h2_server, message, send_one, reply, expected, status, code):
    h2_server.replies(reply)
    answer = send_one(fcm, message())
    assert summary(answer) == expected
    assert answer.subscription_status == status
    assert code is None or answer.code == code


@pytest.mark.parametrize("name", ["a\ud800", "a\x00"])
def test_what_no_column_can_hold_is_left_out(fcm, h2_server, message, send_one, name):
    h2_server.replies(Reply(200, {"name": name}), refusal(403, name))
    assert send_one(fcm, message()).provider_message_id in ("a", "a?")
    assert send_one(fcm, message()).code in ("a", "a?")


def test_retry_after_is_handed_on(fcm, h2_server, message, send_one):
    h2_server.replies(refusal(429, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", headers={"retry-after": "77"}))
    assert send_one(fcm, message()).retry_after == 77


@pytest.mark.parametrize("refused", [refusal(401, "UNAUTHENTICATED"), refusal(403, "PERMISSION_DENIED")])
def test_a_refused_access_token_is_fetched_anew_once(fcm, h2_server, tokens, message, send_one, refused):
    h2_server.replies(refused, TAKEN)
    assert send_one(fcm, message()).outcome == "accepted"
    assert [request.headers["authorization"] for request in h2_server.requests] == ["Bearer ya29.1", "Bearer ya29.2"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(400, {"error": "invalid_grant"}), CONFIG),
        (Reply(401, {"error": "invalid_client"}), CONFIG),
        (Reply(503, b"down"), OUTAGE),
        (Reply(200, b"not json"), OUTAGE),
        (Reply(429, {}), LIMITED),
        (DROP, NETWORK),
    ],
)
def test_without_an_access_token_no_message_was_sent(fcm, h2_server, tokens, message, send_one, reply, expected):
    tokens.replies(reply)
    assert summary(send_one(fcm, message())) == expected
    assert h2_server.requests == []


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [(DROP, UNKNOWN), (RESET, UNKNOWN), (GOAWAY_HEARD, UNKNOWN), (REFUSED, NETWORK), (GOAWAY_UNHEARD, NETWORK)],
)
def test_a_lost_answer_is_unknown_and_an_unprocessed_request_is_not(
    fcm, h2_server, message, send_one, behaviour, expected
):
    h2_server.replies(behaviour)
    assert summary(send_one(fcm, message())) == expected


def test_silence_after_the_body_is_unknown(quick, fcm, h2_server, message, send_one):
    h2_server.replies(HANG)
    assert summary(send_one(fcm, message())) == UNKNOWN
    assert len(h2_server.requests) == 1


def test_a_goaway_before_a_request_was_processed_repeats_it_on_a_new_connection(fcm, h2_server, message):
    h2_server.replies(TAKEN, GOAWAY_UNHEARD, TAKEN)
    fcm.send([message()])
    [answer] = fcm.send([message()])
    assert answer.outcome == "accepted"
    assert h2_server.connections == 2


def test_never_connected_is_network(fcm, h2_server, message, send_one):
    h2_server.close()
    assert summary(send_one(fcm, message())) == NETWORK


def test_a_certificate_of_nobody_we_trust_is_never_connected(settings, fcm, h2_server, message, send_one):
    settings.PROVIDER_CA_FILE = ""
    assert summary(send_one(fcm, message())) == NETWORK
    assert h2_server.requests == []


def test_a_batch_keeps_its_order_with_different_fates(fcm, h2_server, message):
    def fate(request):
        return TAKEN if int(request.json["message"]["data"]["n"]) % 2 else refusal(404, "NOT_FOUND", "UNREGISTERED")

    h2_server.answer = fate
    answers = fcm.send([message(data={"n": n}) for n in range(40)])
    assert [answer.outcome for answer in answers] == ["rejected", "accepted"] * 20


def test_the_raw_answer_is_masked_and_trimmed(fcm, h2_server, message, send_one):
    h2_server.replies(refusal(404, "NOT_FOUND", "UNREGISTERED", f"{PUSH_TOKEN} is gone " * 40))
    raw = send_one(fcm, message()).raw
    assert "[address] is gone" in raw
    assert PUSH_TOKEN[:20] not in raw
    assert len(raw) <= 500
    assert json.dumps(raw)
