"""An e-mail service through django-anymail: Postmark's API on loopback."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from email.header import decode_header, make_header
from email.utils import parseaddr

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


def test_a_message_may_bring_its_own_from(esp, plain_server, message, send_one):
    send_one(esp, message("email", from_='"김영희" <help@shop.example>'))
    assert parseaddr(plain_server.requests[0].json["From"])[1] == "help@shop.example"
    assert str(make_header(decode_header(plain_server.requests[0].json["From"]))).startswith("김영희")


UNKNOWN_SIGNATURE = Reply(422, {"ErrorCode": 400, "Message": "The 'From' address is not a Sender Signature"})


@pytest.mark.parametrize(
    ("own", "reply", "scope"),
    [
        ("help@shop.example", UNKNOWN_SIGNATURE, "sender"),
        ("", UNKNOWN_SIGNATURE, "message"),
        ("help@shop.example", Reply(422, {"ErrorCode": 300, "Message": "Invalid email request"}), "message"),
        ('"x', TAKEN, "sender"),
    ],
)
def test_a_from_the_service_does_not_know_is_its_senders_affair(
    esp, plain_server, message, send_one, own, reply, scope
):
    plain_server.replies(reply)
    answer = send_one(esp, message("email", from_=own))
    assert summary(answer) == ("rejected", "permanent", scope)
    assert (answer.error_reason == "sender_rejected", answer.subscription_status) == (scope == "sender", None)


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("sendgrid", Reply(403, {"errors": [{"message": "not a verified Sender Identity", "field": "from"}]})),
        ("resend", Reply(403, {"statusCode": 403, "name": "validation_error", "message": "domain is not verified"})),
    ],
)
def test_each_service_says_so_in_its_own_way(settings, plain_server, message, send_one, name, reply):
    settings.PROVIDERS = {"Email": f"anymail-{name}"}
    keys = {"API_KEY": "k", "API_URL": plain_server.url}
    settings.ANYMAIL = {f"{name.upper()}_{key}": value for key, value in keys.items()}
    settings.EMAIL_FROM = "no-reply@signalbox.example"
    plain_server.replies(reply)
    provider = provider_for("Email")
    answer = send_one(provider, message("email", from_="help@shop.example"))
    assert answer.error_reason == "sender_rejected"
    assert send_one(provider, message("email")).error_reason != "sender_rejected"


@pytest.mark.parametrize(
    ("name", "credentials", "taken"),
    [
        ("mailersend", {"MAILERSEND_API_TOKEN": "t"}, Reply(202, {}, {"X-Message-Id": "their-1"})),
        (
            "postal",
            {"POSTAL_API_KEY": "k"},
            Reply(200, {"status": "success", "data": {"messages": {ADDRESS: {"id": "their-1", "token": "x"}}}}),
        ),
    ],
)
def test_services_that_keep_no_words_of_ours_send_all_the_same(
    settings, plain_server, message, send_one, name, credentials, taken
):
    settings.PROVIDERS = {"Email": f"anymail-{name}"}
    settings.ANYMAIL = {**credentials, f"{name.upper()}_API_URL": plain_server.url}
    plain_server.replies(taken)
    answer = send_one(provider_for("Email"), message("email", body="<p>Hi</p>"))
    assert (summary(answer), answer.provider_message_id) == (ACCEPTED, "their-1")


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


@pytest.mark.parametrize("name", ["brevo", "mailjet", "mailtrap", "resend", "sendgrid", "sparkpost", "unisender_go"])
@pytest.mark.filterwarnings("ignore:django-anymail has dropped")
def test_no_service_is_believed_without_the_secret(settings, esp, name):
    """Some of anymail's views have a check of their own, which must not stand in for the secret's."""
    settings.ANYMAIL = {**settings.ANYMAIL, f"{name.upper()}_API_KEY": "k"}
    for wrong in ({"Content-Type": "application/json"}, headers("user:wrong")):
        with pytest.raises(BadSignature):
            verify(f"anymail-{name}", URL, wrong, b"[]", NOW)


def mailgun(at, key="signing"):
    token, stamp = "t" * 50, str(int(at.timestamp()))
    signature = hmac.new(key.encode(), (stamp + token).encode(), hashlib.sha256).hexdigest()
    return json.dumps(
        {"signature": {"token": token, "timestamp": stamp, "signature": signature}, "event-data": {}}
    ).encode()


def test_a_signature_with_a_time_holds_for_twelve_hours(settings, esp):
    settings.ANYMAIL = {"MAILGUN_WEBHOOK_SIGNING_KEY": "signing"}
    sent = {"Content-Type": "application/json"}
    verify("anymail-mailgun", URL, sent, mailgun(NOW), NOW)
    verify("anymail-mailgun", URL, sent, mailgun(NOW - timedelta(hours=12)), NOW)
    for body in (mailgun(NOW, "other"), mailgun(NOW - timedelta(hours=13)), mailgun(NOW + timedelta(hours=13))):
        with pytest.raises(BadSignature):
            verify("anymail-mailgun", URL, sent, body, NOW)


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
