import base64
import multiprocessing
import os
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from messaging.providers import provider_for

from .conftest import ACCEPTED, CONFIG, LIMITED, NETWORK, NUMBER, OUTAGE, SOME_ID, UNKNOWN, summary
from .servers import DROP, HANG, Reply

STARTED = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
GONE = ("rejected", "permanent", "recipient")
TAKEN = Reply(201, {"sid": "SM1", "status": "queued", "error_code": None})


def refusal(status, code, headers=None):
    return Reply(status, {"code": code, "message": f"no good: {NUMBER}", "status": status}, headers or {})


@pytest.fixture
def twilio(settings, plain_server):
    settings.PROVIDERS = {"SMS": "twilio"}
    settings.TWILIO_BASE_URL = plain_server.url
    settings.TWILIO_ACCOUNT_SID, settings.TWILIO_AUTH_TOKEN, settings.TWILIO_FROM = "AC1", "secret", "+15005550006"
    settings.PUBLIC_URL = "https://signalbox.example"
    plain_server.replies(TAKEN)
    return provider_for("SMS")


def test_a_text_is_posted_as_a_form_with_basic_auth(twilio, plain_server, message, send_one):
    answer = send_one(twilio, message("sms", body="안녕"))
    assert summary(answer) == ACCEPTED
    assert (answer.provider_message_id, answer.code) == ("SM1", "queued")
    [request] = plain_server.requests
    assert (request.method, request.path) == ("POST", "/2010-04-01/Accounts/AC1/Messages.json")
    assert base64.b64decode(request.headers["authorization"].removeprefix("Basic ")) == b"AC1:secret"
    assert request.form == {
        "To": NUMBER, "From": "+15005550006", "Body": "안녕",
        "StatusCallback": "https://signalbox.example/api/v1/webhooks/twilio/",
    }  # fmt: skip


def test_a_message_may_bring_its_own_number(twilio, plain_server, message, send_one):
    send_one(twilio, message("sms", from_="+15005550009"))
    assert plain_server.requests[0].form["From"] == "+15005550009"


@pytest.mark.parametrize("code", [21212, 21603, 21606, 21659, 21660])
def test_a_number_that_is_not_ours_is_its_senders_affair(twilio, plain_server, message, send_one, code):
    plain_server.replies(refusal(400, code))
    answer = send_one(twilio, message("sms", from_="+15005550009"))
    assert summary(answer) == ("rejected", "permanent", "sender")
    assert (answer.code, answer.error_reason, answer.subscription_status) == (str(code), "sender_rejected", None)
    assert summary(send_one(twilio, message("sms"))) == CONFIG


def test_a_wrong_token_is_nobodys_number(twilio, plain_server, message, send_one):
    plain_server.replies(refusal(401, 20003))
    assert summary(send_one(twilio, message("sms", from_="+15005550009"))) == CONFIG


def test_a_messaging_service_is_named_as_such(settings, twilio, plain_server, message, send_one):
    settings.TWILIO_FROM = "MG1"
    send_one(twilio, message("sms"))
    assert plain_server.requests[0].form["MessagingServiceSid"] == "MG1"
    assert "From" not in plain_server.requests[0].form


def test_connections_are_reused(twilio, plain_server, message):
    for _ in range(5):
        twilio.send([message("sms")])
    assert plain_server.connections == 1


@pytest.mark.parametrize(
    ("reply", "expected", "status", "suppress"),
    [
        (refusal(400, 21211), GONE, -50, ""),
        (refusal(400, 21614), GONE, -50, ""),
        (refusal(400, 21610), GONE, -2, "unsubscribed"),
        (refusal(400, 30005), GONE, -52, ""),
        (refusal(400, 30004), GONE, -54, ""),
        (refusal(400, 30003), ("transient", "outage", "recipient"), None, ""),
        (refusal(400, 30007), ("rejected", "permanent", "sender"), None, ""),
        (refusal(401, 20003), CONFIG, None, ""),
        (refusal(400, 20003), CONFIG, None, ""),
        (refusal(404, 20404), CONFIG, None, ""),
        (refusal(400, 21606), CONFIG, None, ""),
        (refusal(400, 21608), ("config", "config", "message"), None, ""),
        (refusal(400, 21408), ("config", "config", "message"), None, ""),
        (refusal(429, 20429), LIMITED, None, ""),
        (refusal(400, 21611), LIMITED, None, ""),
        (refusal(400, 99999), ("rejected", "permanent", "message"), None, ""),
        (refusal(403, 99999), CONFIG, None, ""),
        (refusal(500, 20500), OUTAGE, None, ""),
        (Reply(503, b"busy"), OUTAGE, None, ""),
        (Reply(201, b"<html>"), UNKNOWN, None, ""),
        (Reply(201, {"status": "queued"}), UNKNOWN, None, ""),
        (Reply(302, b"", {"Location": "https://elsewhere.example"}), CONFIG, None, ""),
    ],
)
def test_each_refusal_has_its_class_scope_and_effect(
    twilio, plain_server, message, send_one, reply, expected, status, suppress
):
    plain_server.replies(reply)
    answer = send_one(twilio, message("sms"))
    assert summary(answer) == expected
    assert (answer.subscription_status, answer.suppress_reason) == (status, suppress)


@pytest.mark.parametrize(
    ("header", "expected"), [("120", 120), ("soon", None), (format_datetime(datetime(2020, 1, 1, tzinfo=UTC)), 0)]
)
def test_retry_after_in_its_forms(twilio, plain_server, message, send_one, header, expected):
    plain_server.replies(refusal(429, 20429, {"Retry-After": header}))
    assert send_one(twilio, message("sms")).retry_after == expected


def test_a_dropped_connection_is_unknown(twilio, plain_server, message, send_one):
    plain_server.replies(DROP)
    assert summary(send_one(twilio, message("sms"))) == UNKNOWN
    assert len(plain_server.requests) == 1


def test_silence_after_the_body_is_unknown(quick, twilio, plain_server, message, send_one):
    plain_server.replies(HANG)
    assert summary(send_one(twilio, message("sms"))) == UNKNOWN
    assert len(plain_server.requests) == 1


def test_never_connected_is_network(settings, message, send_one, twilio, dead_port):
    twilio.base_url = f"http://127.0.0.1:{dead_port}"
    assert summary(send_one(twilio, message("sms"))) == NETWORK


def test_no_log_line_names_the_number(twilio, plain_server, message, caplog):
    caplog.set_level("INFO")
    twilio.send([message("sms")])
    plain_server.replies(DROP)
    twilio.send([message("sms"), message("sms", from_=5)])
    twilio.query(SOME_ID, "", STARTED, message("sms"))
    assert NUMBER[1:] not in caplog.text


def test_a_defect_of_ours_leaves_one_message_unknown_and_sends_the_rest(twilio, message):
    outcomes = [answer.outcome for answer in twilio.send([message("sms"), message("sms", from_=5), message("sms")])]
    assert outcomes == ["accepted", "unknown", "accepted"]


def test_a_child_process_has_connections_of_its_own(twilio, plain_server, message):
    twilio.send([message("sms")])
    child = multiprocessing.get_context("fork").Process(target=_send_as_a_child, args=(message("sms"),))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert twilio.send([message("sms")])[0].outcome == "accepted"
    assert len(plain_server.requests) == 3
    assert plain_server.connections == 2


def _send_as_a_child(message):
    os._exit(0 if provider_for("SMS").send([message])[0].outcome == "accepted" else 1)


def listed(**changes):
    item = {
        "sid": "SM7", "status": "delivered", "to": NUMBER, "body": "Hello", "direction": "outbound-api",
        "date_created": format_datetime(STARTED), "error_code": None,
    }  # fmt: skip
    return {**item, **changes}


@pytest.mark.parametrize(
    ("items", "outcome", "found"),
    [
        ([listed()], "accepted", "SM7"),
        ([listed(body="Sent from your Twilio trial account - Hello")], "accepted", "SM7"),
        ([listed(status="undelivered", error_code=30005)], "rejected", ""),
        ([listed(status="undelivered", error_code=30003)], "rejected", ""),
        ([listed(body="Other words")], "transient", ""),
        ([listed(date_created=format_datetime(STARTED - timedelta(hours=1)))], "transient", ""),
        ([listed(direction="inbound")], "transient", ""),
        ([], "transient", ""),
    ],
)
def test_an_unknown_text_is_looked_for_by_number_words_and_time(twilio, plain_server, message, items, outcome, found):
    plain_server.replies(Reply(200, {"messages": items}))
    answer = twilio.query(SOME_ID, "", STARTED, message("sms"))
    assert (answer.outcome, answer.provider_message_id) == (outcome, found)
    assert plain_server.requests[0].query["To"] == NUMBER
    if outcome == "transient":
        assert (answer.failure_type, answer.code) == ("network", "not_found")


def test_another_messages_text_is_not_taken_for_ours(twilio, plain_server, message):
    plain_server.replies(Reply(200, {"messages": [listed()]}))
    assert twilio.query(SOME_ID, "", STARTED, message("sms", others=frozenset({"SM7"}))).code == "not_found"


def test_a_text_heard_by_an_earlier_attempt_is_found(twilio, plain_server, message):
    plain_server.replies(Reply(200, {"messages": [listed()]}))
    later = STARTED + timedelta(hours=2)
    assert twilio.query(SOME_ID, "", later, message("sms", created_at=STARTED)).outcome == "accepted"


def test_a_known_text_is_asked_for_by_its_sid(twilio, plain_server):
    plain_server.replies(Reply(200, listed()))
    assert twilio.query(SOME_ID, "SM7", STARTED).outcome == "accepted"
    assert plain_server.requests[0].path == "/2010-04-01/Accounts/AC1/Messages/SM7.json"


@pytest.mark.parametrize("reply", [Reply(500, {}), Reply(200, b"x"), DROP])
def test_a_provider_that_cannot_tell_says_so(twilio, plain_server, message, reply):
    plain_server.replies(reply)
    assert twilio.query(SOME_ID, "", STARTED, message("sms")) is None
