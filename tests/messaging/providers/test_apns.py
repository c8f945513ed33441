"""APNs against a server that speaks HTTP/2 over TLS."""

from datetime import UTC, datetime

import jwt
import pytest
import time_machine

from messaging.providers import provider_for

from .conftest import ACCEPTED, CONFIG, NETWORK, OUTAGE, UNKNOWN, pem, summary
from .servers import DROP, GOAWAY_HEARD, GOAWAY_UNHEARD, HANG, Reply

TOKEN = "ab" * 32
GONE = ("rejected", "permanent", "recipient")
BAD_MESSAGE = ("rejected", "permanent", "message")


def refusal(status, reason, headers=None, **more):
    return Reply(status, {"reason": reason, **more}, headers or {})


@pytest.fixture
def apns(settings, h2_server, ec_key):
    settings.PROVIDERS = {"iOSPush": "apns"}
    settings.APNS_BASE_URL = h2_server.url
    settings.APNS_KEY, settings.APNS_KEY_ID, settings.APNS_TEAM_ID = pem(ec_key), "KEY0000001", "TEAM000001"
    settings.APNS_TOPIC = "com.example.app"
    h2_server.answer = lambda request: Reply(200, b"", {"apns-id": request.headers["apns-id"]})
    return provider_for("iOSPush")


@pytest.fixture
def push(message):
    return lambda **changes: message(subscription_type="iOSPush", token=TOKEN, **changes)


def test_a_push_carries_our_id_as_apns_id_and_collapse_id(apns, h2_server, push, send_one, ec_key):
    sent = push(data={"aps": {"badge": 3}, "order": 7})
    answer = send_one(apns, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == str(sent.message_id)
    [request] = h2_server.requests
    assert request.path == f"/3/device/{TOKEN}"
    assert request.headers["apns-id"] == request.headers["apns-collapse-id"] == str(sent.message_id)
    assert request.headers["apns-topic"] == "com.example.app"
    assert request.headers["apns-push-type"] == "alert"
    assert request.json["aps"] == {"badge": 3, "alert": {"title": "제목 Title", "body": "Hello"}}
    assert request.json["data"] == {"order": 7, "message_id": str(sent.message_id)}
    token = request.headers["authorization"].removeprefix("bearer ")
    assert jwt.get_unverified_header(token) == {"alg": "ES256", "kid": "KEY0000001", "typ": "JWT"}
    assert jwt.decode(token, ec_key.public_key(), algorithms=["ES256"])["iss"] == "TEAM000001"


def test_a_push_made_long_ago_waits_for_the_device_all_the_same(apns, h2_server, push, send_one):
    send_one(apns, push(created_at=datetime(2020, 1, 1, tzinfo=UTC)))
    [request] = h2_server.requests
    assert int(request.headers["apns-expiration"]) > datetime.now(UTC).timestamp() + 71 * 3600


def test_a_push_without_words_is_a_background_push(apns, h2_server, push, send_one):
    send_one(apns, push(title="", body="", data={"sync": True}))
    [request] = h2_server.requests
    assert (request.headers["apns-push-type"], request.headers["apns-priority"]) == ("background", "5")
    assert request.json["aps"] == {"content-available": 1}


def test_the_provider_token_is_reused_for_50_minutes_and_then_renewed(apns, h2_server, push):
    with time_machine.travel(datetime(2026, 5, 1, 12, 0, tzinfo=UTC), tick=False) as clock:
        for minutes in (0, 19, 30, 2):
            clock.shift(minutes * 60)
            apns.provider_token.made -= minutes * 60  # the monotonic clock cannot be moved
            apns.send([push()])
    tokens = [request.headers["authorization"] for request in h2_server.requests]
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]


@pytest.mark.parametrize(
    ("reply", "expected", "status"),
    [
        (refusal(400, "BadDeviceToken"), GONE, -10),
        (refusal(400, "DeviceTokenNotForTopic"), GONE, -14),
        (refusal(410, "Unregistered", timestamp=1777600000000), GONE, -10),
        (refusal(410, "ExpiredToken", timestamp=1777600000000), GONE, -10),
        (Reply(410, b""), GONE, -10),
        (refusal(400, "BadTopic"), CONFIG, None),
        (refusal(400, "MissingTopic"), CONFIG, None),
        (refusal(400, "TopicDisallowed"), CONFIG, None),
        (refusal(403, "InvalidProviderToken"), CONFIG, None),
        (refusal(403, "Forbidden"), CONFIG, None),
        (refusal(404, "BadPath"), CONFIG, None),
        (refusal(405, "MethodNotAllowed"), CONFIG, None),
        (refusal(429, "TooManyProviderTokenUpdates"), CONFIG, None),
        (refusal(429, "TooManyRequests"), ("rate_limited", "rate_limited", "recipient"), None),
        (refusal(413, "PayloadTooLarge"), BAD_MESSAGE, None),
        (refusal(400, "BadCollapseId"), BAD_MESSAGE, None),
        (refusal(400, "PayloadEmpty"), BAD_MESSAGE, None),
        (refusal(500, "InternalServerError"), OUTAGE, None),
        (refusal(503, "ServiceUnavailable"), OUTAGE, None),
        (refusal(503, "Shutdown"), OUTAGE, None),
        (Reply(502, b"bad gateway"), OUTAGE, None),
    ],
)
def test_each_refusal_has_its_class_scope_and_effect(apns, h2_server, push, send_one, reply, expected, status):
    h2_server.replies(reply)
    answer = send_one(apns, push())
    assert summary(answer) == expected
    assert answer.subscription_status == status


def test_a_dead_token_tells_since_when(apns, h2_server, push, send_one):
    h2_server.replies(refusal(410, "Unregistered", timestamp=1777600000000))
    assert send_one(apns, push()).since == datetime.fromtimestamp(1777600000, UTC)


def test_an_expired_provider_token_is_renewed_once(apns, h2_server, push, send_one):
    h2_server.replies(refusal(403, "ExpiredProviderToken"), Reply(200, b""))
    assert send_one(apns, push()).outcome == "accepted"
    first, second = (request.headers["authorization"] for request in h2_server.requests)
    assert first != second


def test_a_provider_token_that_stays_expired_is_our_set_up(apns, h2_server, push, send_one):
    h2_server.replies(refusal(403, "ExpiredProviderToken"))
    assert summary(send_one(apns, push())) == CONFIG
    assert len(h2_server.requests) == 2
    assert summary(send_one(apns, push())) == CONFIG
    assert len(h2_server.requests) == 3


def test_retry_after_is_handed_on(apns, h2_server, push, send_one):
    h2_server.replies(refusal(429, "TooManyRequests", {"retry-after": "90"}))
    assert send_one(apns, push()).retry_after == 90


@pytest.mark.parametrize(
    ("behaviour", "expected"), [(DROP, UNKNOWN), (GOAWAY_HEARD, UNKNOWN), (GOAWAY_UNHEARD, NETWORK)]
)
def test_a_lost_answer_is_unknown(apns, h2_server, push, send_one, behaviour, expected):
    h2_server.replies(behaviour)
    assert summary(send_one(apns, push())) == expected


def test_silence_after_the_body_is_unknown_and_the_neighbours_are_served(quick, apns, h2_server, push):
    silent = push()
    h2_server.answer = lambda request: HANG if request.headers["apns-id"] == str(silent.message_id) else Reply(200, b"")
    answers = apns.send([push(), silent, push()])
    assert [answer.outcome for answer in answers] == ["accepted", "unknown", "accepted"]


def test_never_connected_is_network(apns, h2_server, push, send_one):
    h2_server.close()
    assert summary(send_one(apns, push())) == NETWORK


def test_after_a_goaway_the_next_batch_takes_a_new_connection(apns, h2_server, push):
    h2_server.replies(GOAWAY_HEARD, Reply(200, b""))
    assert [apns.send([push()])[0].outcome for _ in range(2)] == ["unknown", "accepted"]
    assert h2_server.connections == 2


def test_many_unknown_tokens_are_a_mixed_up_environment_and_no_dead_devices(apns, h2_server, push):
    h2_server.replies(refusal(400, "BadDeviceToken"))
    answers = apns.send([push() for _ in range(12)])
    assert {summary(answer) for answer in answers} == {("config", "config", "sender")}
    assert {answer.subscription_status for answer in answers} == {None}


def test_no_log_line_names_the_device(apns, h2_server, push, caplog):
    caplog.set_level("INFO")
    h2_server.replies(Reply(200, b""), refusal(400, "BadDeviceToken"), DROP)
    for _ in range(3):
        apns.send([push()])
    assert TOKEN not in caplog.text


def test_a_batch_shares_one_connection(apns, h2_server, push):
    answers = apns.send([push() for _ in range(150)])
    assert [answer.outcome for answer in answers] == ["accepted"] * 150
    assert h2_server.connections == 1
