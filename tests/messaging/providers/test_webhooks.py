import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from urllib.parse import urlencode

import pytest

from messaging.providers.webhooks import BadPayload, BadSignature, parse, verify

from .conftest import NUMBER, SOME_ID

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
URL = "https://signalbox.example/api/v1/webhooks/twilio/"
FORM = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def secrets(settings):
    settings.TWILIO_AUTH_TOKEN = "12345"
    settings.NHN_WEBHOOK_SIGNATURE = "nhn-signature"
    settings.SOLAPI_WEBHOOK_SECRET = "solapi-secret"


def signed(url, fields, token=b"12345"):
    text = url + "".join(f"{key}{fields[key]}" for key in sorted(fields))
    return base64.b64encode(hmac.new(token, text.encode(), hashlib.sha1).digest()).decode()


FIELDS = {"MessageSid": "SM1", "MessageStatus": "delivered", "To": NUMBER, "Body": "한글 & co", "Empty": ""}
BODY = urlencode(FIELDS).encode()


def test_twilios_published_example():
    """The vector of Twilio's security documentation."""
    fields = {
        "CallSid": "CA1234567890ABCDE", "Caller": "+14158675309", "Digits": "1234", "From": "+14158675309",
        "To": "+18005551212",
    }  # fmt: skip
    url = "https://mycompany.com/myapp.php?foo=1&bar=2"
    headers = {**FORM, "X-Twilio-Signature": "RSOYDt4T1cUTdK1PDd93/VVr8B8="}
    verify("twilio", url, headers, urlencode(fields).encode(), NOW)


@pytest.mark.parametrize("url", [URL, URL.replace("example/", "example:443/")])
def test_twilio_signs_the_url_with_or_without_port(url):
    verify("twilio", URL, {**FORM, "x-twilio-signature": signed(url, FIELDS)}, BODY, NOW)


def test_a_twilio_call_on_a_port_of_its_own():
    url = "http://localhost:8000/api/v1/webhooks/twilio/"
    verify("twilio", url, {**FORM, "X-Twilio-Signature": signed(url, FIELDS)}, BODY, NOW)


@pytest.mark.parametrize(
    ("url", "headers", "body"),
    [
        (URL, {**FORM, "X-Twilio-Signature": signed(URL, FIELDS, b"other")}, BODY),
        (URL, {**FORM, "X-Twilio-Signature": signed(URL, FIELDS)}, BODY + b"&x=1"),
        (URL + "?x=1", {**FORM, "X-Twilio-Signature": signed(URL, FIELDS)}, BODY),
        (URL, {**FORM, "X-Twilio-Signature": ""}, BODY),
        (URL, {**FORM, "X-Twilio-Signature": "ünïcode"}, BODY),
        (URL, FORM, BODY),
        (URL, {**JSON, "X-Twilio-Signature": signed(URL, {})}, b"{}"),
        (URL + "?bodySHA256=" + "0" * 64, {**JSON, "X-Twilio-Signature": signed(URL, {})}, b"{}"),
    ],
)
def test_a_twilio_call_that_is_not_twilios(url, headers, body):
    with pytest.raises(BadSignature):
        verify("twilio", url, headers, body, NOW)


def test_twilios_json_is_bound_to_the_url_by_its_hash():
    body = json.dumps({"MessageSid": "SM1", "MessageStatus": "delivered"}).encode()
    url = f"{URL}?bodySHA256={hashlib.sha256(body).hexdigest()}"
    headers = {**JSON, "X-Twilio-Signature": signed(url, {})}
    verify("twilio", url, headers, body, NOW)
    with pytest.raises(BadSignature):
        verify("twilio", url, headers, body + b" ", NOW)
    assert parse("twilio", headers, body)[0].kind == "delivered"


def test_nhn_shows_the_signature_we_entered():
    verify("nhn", URL, {"X-Toast-Webhook-Signature": "nhn-signature"}, b"{}", NOW)
    for wrong in ({}, {"X-Toast-Webhook-Signature": "other"}, {"X-Toast-Webhook-Signature": ""}):
        with pytest.raises(BadSignature):
            verify("nhn", URL, wrong, b"{}", NOW)


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        (URL, {"X-Solapi-Secret": hashlib.sha1(b"solapi-secret").hexdigest()}),
        (URL, {"X-Solapi-Secret": "solapi-secret"}),
        (URL + "?secret=solapi-secret", {}),
    ],
)
def test_solapi_shows_the_secret_or_its_hash(url, headers):
    verify("solapi", url, headers, b"[]", NOW)
    with pytest.raises(BadSignature):
        verify("solapi", url.replace("-secret", "-guess"), {"X-Solapi-Secret": "guess"}, b"[]", NOW)


@pytest.mark.parametrize("provider", ["twilio", "nhn", "solapi", "nobody"])
def test_without_a_secret_of_ours_nobody_is_believed(settings, provider):
    settings.TWILIO_AUTH_TOKEN = settings.NHN_WEBHOOK_SIGNATURE = settings.SOLAPI_WEBHOOK_SECRET = ""
    empty = {"X-Toast-Webhook-Signature": "", "X-Solapi-Secret": "", "X-Twilio-Signature": signed(URL, {}, b"")}
    with pytest.raises(BadSignature):
        verify(provider, URL + "?secret=", {**FORM, **empty}, b"", NOW)


@pytest.mark.parametrize(
    ("status", "code", "kind", "subscription_status"),
    [
        ("delivered", "", "delivered", None),
        ("read", "", "delivered", None),
        ("sent", "", "other", None),
        ("queued", "", "other", None),
        ("undelivered", "30005", "failed", -52),
        ("failed", "30007", "failed", None),
        ("undelivered", "30003", "failed", None),
        ("failed", "", "failed", None),
    ],
)
def test_twilios_callbacks(status, code, kind, subscription_status):
    fields = {"MessageSid": "SM1", "MessageStatus": status, "ErrorCode": code, "To": NUMBER}
    [event] = parse("twilio", FORM, urlencode(fields).encode())
    assert (event.event_id, event.provider_message_id, event.kind) == (f"SM1:{status}", "SM1", kind)
    assert (event.answer.outcome if event.answer else "") == ("rejected" if kind == "failed" else "")
    assert (event.answer.subscription_status if event.answer else None) == subscription_status
    assert NUMBER not in repr(event)


def nhn(code, event="MESSAGE_RESULT_UPDATE", **more):
    hook = {
        "requestId": "R1", "recipientSeq": 1, "recipientNo": "01012345678", "resultCode": code, "hookId": "H1",
        "recipientGroupingKey": str(SOME_ID), "receiveDate": "2026-05-01 21:00:00.0", **more,
    }  # fmt: skip
    return json.dumps({"hooksId": "HS1", "event": event, "hooks": [hook]}).encode()


@pytest.mark.parametrize(
    ("code", "kind", "subscription_status", "failover"),
    [
        ("1000", "delivered", None, False),
        ("3018", "failed", None, True),
        ("3019", "failed", -60, True),
        ("3020", "failed", -61, True),
        ("3021", "failed", None, True),
        ("3014", "failed", None, False),
        ("3012", "failed", None, False),
        ("3005", "other", None, False),
    ],
)
def test_nhns_results_of_alimtalk(code, kind, subscription_status, failover):
    [event] = parse("nhn", JSON, nhn(code, kakaoMessageType="ALIMTALK_NORMAL"))
    assert (event.event_id, event.provider_message_id, event.message_id) == ("H1", "R1", SOME_ID)
    assert event.kind == kind
    assert event.occurred_at == NOW
    assert (event.answer.outcome if event.answer else "") == ("rejected" if kind == "failed" else "")
    found = (event.answer.subscription_status, event.answer.failover) if event.answer else (None, False)
    assert found == (subscription_status, failover)


def test_nhns_results_of_texts():
    assert parse("nhn", JSON, nhn("1000"))[0].kind == "delivered"
    [failed] = parse("nhn", JSON, nhn("3001"))
    assert (failed.kind, failed.answer.subscription_status) == ("failed", -52)
    # Elsewhere a code of KakaoTalk, here of a carrier.
    assert parse("nhn", JSON, nhn("3019"))[0].answer.failover is False


def test_an_opt_out_by_telephone_names_the_number():
    body = {"event": "UNSUBSCRIBE", "hooks": [{"hookId": "H9", "recipientNo": "01012345678"}]}
    [event] = parse("nhn", JSON, json.dumps(body).encode())
    assert (event.kind, event.address, event.message_id) == ("unsubscribed", NUMBER, None)
    assert NUMBER not in repr(event)


def test_solapis_results():
    def item(code):
        data = {"messageId": "M1", "groupId": "G1", "statusCode": code, "customFields": {"message_id": str(SOME_ID)}}
        return {"eventDataId": f"E{code}", "data": data}

    body = json.dumps([item("4000"), item("3104"), item("3000")]).encode()
    delivered, failed, underway = parse("solapi", JSON, body)
    assert (delivered.kind, delivered.event_id, delivered.message_id) == ("delivered", "E4000", SOME_ID)
    assert (failed.kind, failed.answer.subscription_status, failed.answer.failover) == ("failed", -60, True)
    assert underway.kind == "other"


@pytest.mark.parametrize(
    ("provider", "headers", "body"),
    [
        ("twilio", FORM, b""),
        ("twilio", JSON, b"[1]"),
        ("twilio", JSON, b"{"),
        ("nhn", JSON, b"{}"),
        ("nhn", JSON, b"nope"),
        ("nhn", JSON, b'{"hooks": [1]}'),
        ("solapi", JSON, b"[1]"),
        ("solapi", JSON, b"\xff"),
    ],
)
def test_nonsense_is_named_so(provider, headers, body):
    with pytest.raises(BadPayload):
        parse(provider, headers, body)
