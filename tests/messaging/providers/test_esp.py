"""An e-mail service through django-anymail: Postmark's API on loopback."""

import base64
import json
from datetime import UTC, datetime

import pytest

from messaging.providers import provider_for
from messaging.providers.webhooks import BadPayload, BadSignature, parse, verify

from .conftest import ACCEPTED, ADDRESS, CONFIG, LIMITED, NETWORK, OUTAGE, SOME_ID, UNKNOWN, summary
from .servers import DROP, HANG, Reply

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
TAKEN = Reply(200, {"To": ADDRESS, "MessageID": "pm-1", "ErrorCode": 0, "Message": "OK"})


@pytest.fixture
def esp(settings, plain_server):
    settings.PROVIDERS = {"Email": "anymail-postmark"}
    settings.ANYMAIL = {
        "POSTMARK_SERVER_TOKEN": "pm-token",
        "POSTMARK_API_URL": plain_server.url,
        "WEBHOOK_SECRET": "user:p4ss",
    }
    settings.EMAIL_FROM = "no-reply@signalbox.example"
    plain_server.replies(TAKEN)
    return provider_for("Email")


def test_a_mail_is_handed_over_with_our_id(esp, plain_server, message, send_one):
    sent = message("email", body="<p>Hi</p>", headers={"List-Unsubscribe": "<https://x.example/u/1>"})
    answer = send_one(esp, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == "pm-1"
    [request] = plain_server.requests
    assert request.headers["x-postmark-server-token"] == "pm-token"
    assert (request.json["To"], request.json["HtmlBody"], request.json["TextBody"]) == (ADDRESS, "<p>Hi</p>", "Hi")
    assert request.json["Metadata"] == {"message_id": str(sent.message_id)}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(401, {"ErrorCode": 10, "Message": "bad token"}), CONFIG),
        (Reply(429, {}, {"Retry-After": "30"}), LIMITED),
        (Reply(500, {}), OUTAGE),
        (Reply(422, {"ErrorCode": 300, "Message": "Invalid email request"}), ("rejected", "permanent", "message")),
        (
            Reply(
                422, {"ErrorCode": 406, "Message": f"Found inactive addresses: {ADDRESS}. Inactive recipients are …"}
            ),
            ("rejected", "permanent", "recipient"),
        ),
        (Reply(200, b"<html>"), UNKNOWN),
        (DROP, UNKNOWN),
        (HANG, UNKNOWN),
    ],
)
def test_each_refusal_has_its_class_and_scope(quick, esp, plain_server, message, send_one, reply, expected):
    plain_server.replies(reply)
    assert summary(send_one(esp, message("email"))) == expected


def test_never_connected_is_network(settings, esp, message, send_one, dead_port):
    settings.ANYMAIL = {**settings.ANYMAIL, "POSTMARK_API_URL": f"http://127.0.0.1:{dead_port}"}
    assert summary(send_one(esp, message("email"))) == NETWORK


def test_without_credentials_it_is_our_set_up(settings, esp, message):
    settings.ANYMAIL = {}
    assert [summary(answer) for answer in esp.send([message("email")] * 10)] == [CONFIG] * 10


def test_a_batch_keeps_its_order(esp, plain_server, message):
    plain_server.answer = lambda request: Reply(
        200, {"To": ADDRESS, "MessageID": request.json["Subject"], "ErrorCode": 0, "Message": "OK"}
    )
    answers = esp.send([message("email", title=f"n{n}") for n in range(21)])
    assert [answer.provider_message_id for answer in answers] == [f"n{n}" for n in range(21)]


def hook(**fields):
    event = {
        "RecordType": "Delivery", "MessageID": "pm-1", "Recipient": ADDRESS, "DeliveredAt": "2026-05-01T11:00:00Z",
        "Metadata": {"message_id": str(SOME_ID)},
    }  # fmt: skip
    return json.dumps({**event, **fields}).encode()


def headers(secret="user:p4ss"):
    basic = base64.b64encode(secret.encode()).decode()
    return {"Content-Type": "application/json", "Authorization": f"Basic {basic}"}


URL = "https://signalbox.example/api/v1/webhooks/anymail-postmark/"


def test_an_event_proves_itself_by_the_shared_secret(esp):
    verify("anymail-postmark", URL, headers(), hook(), NOW)
    with pytest.raises(BadSignature):
        verify("anymail-postmark", URL, headers("user:wrong"), hook(), NOW)
    with pytest.raises(BadSignature):
        verify("anymail-postmark", URL, {}, hook(), NOW)


def test_without_a_secret_nobody_is_believed(settings, esp):
    settings.ANYMAIL = {}
    with pytest.raises(BadSignature):
        verify("anymail-postmark", URL, headers(), hook(), NOW)


def test_a_delivery_a_bounce_and_a_complaint(esp):
    [delivered] = parse("anymail-postmark", headers(), hook())
    assert (delivered.kind, delivered.provider_message_id, delivered.message_id) == ("delivered", "pm-1", SOME_ID)
    assert delivered.occurred_at == datetime(2026, 5, 1, 11, 0, tzinfo=UTC)
    bounce = hook(RecordType="Bounce", Type="HardBounce", TypeCode=1, ID=42, Email=ADDRESS)
    [failed] = parse("anymail-postmark", headers(), bounce)
    assert (failed.kind, failed.event_id) == ("failed", "42")
    assert (failed.answer.subscription_status, failed.answer.suppress_reason) == (-42, "hard_bounce")
    spam = hook(RecordType="SpamComplaint", Type="SpamComplaint", ID=43, Email=ADDRESS)
    assert parse("anymail-postmark", headers(), spam)[0].kind == "complained"


def test_nonsense_is_named_so(esp):
    with pytest.raises(BadPayload):
        parse("anymail-postmark", headers(), b"[")
