"""What providers tell us later: is it really from them (`verify`), and what does it say (`parse`)."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from urllib.parse import parse_qs, parse_qsl, urlsplit, urlunsplit
from uuid import UUID

from django.conf import settings

from messaging.providers import twilio
from messaging.providers.answers import Answer, final, rejected
from messaging.providers.korea import kakao_result, parse_local
from messaging.providers.nhn import sms_result
from messaging.providers.solapi import verdict as solapi_verdict

Kind = Literal["delivered", "failed", "unsubscribed", "complained", "opened", "clicked", "other"]
PROVIDERS = ("twilio", "nhn", "solapi", *settings.ESPS)


class BadSignature(Exception):
    """Not from the provider, or not provable: 403, nothing is stored."""


class BadPayload(ValueError):
    """Signed, but not what the provider is known to send."""


@dataclass(frozen=True)
class Event:
    event_id: str
    provider_message_id: str
    message_id: UUID | None
    kind: Kind
    code: str = ""
    occurred_at: datetime | None = None
    answer: Answer | None = None  # of a failure: its scope, the subscription's new status, whether an SMS may follow
    address: str = field(default="", repr=False)  # of an opt-out that names no message


def verify(provider: str, url: str, headers: Mapping[str, str], body: bytes, now: datetime) -> None:
    """Raise BadSignature unless the provider's secret is behind the call.

    None of the three signs a time, so there is no window to check; e-mail services that do have one.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    checks = {"twilio": _twilio_signed, "nhn": _nhn_signed, "solapi": _solapi_signed}
    if provider in checks:
        good = checks[provider](url, lowered, body)
    else:
        good = _esp_signed(provider, url, lowered, body, now)
    if not good:
        raise BadSignature(provider)


def parse(provider: str, headers: Mapping[str, str], body: bytes) -> list[Event]:
    lowered = {name.lower(): value for name, value in headers.items()}
    parsers = {"twilio": _twilio_events, "nhn": _nhn_events, "solapi": _solapi_events}
    if provider in parsers:
        return list(parsers[provider](lowered, body))
    from messaging.providers import esp_webhooks

    return list(esp_webhooks.events(provider, lowered, body))


def _same(given: str, expected: str) -> bool:
    return bool(expected) and hmac.compare_digest(given.encode(), expected.encode())


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadPayload("not JSON") from None


def _uuid(text: Any) -> UUID | None:
    try:
        return UUID(str(text))
    except ValueError:
        return None


# --- Twilio ---------------------------------------------------------------------------------------------------------


def _twilio_signed(url: str, headers: dict[str, str], body: bytes) -> bool:
    given, token = headers.get("x-twilio-signature", ""), settings.TWILIO_AUTH_TOKEN
    if not given or not token:
        return False
    digest = parse_qs(urlsplit(url).query).get("bodySHA256", [""])[0]
    if _is_form(headers):
        pairs = _form(body)
    elif digest and _same(hashlib.sha256(body).hexdigest(), digest.lower()):
        pairs = []
    else:
        return False
    # Whether the port is part of the signed URL depends on what stands between Twilio and us.
    signed = "".join(f"{key}{value}" for key, value in sorted(set(pairs)))
    return any(_same(given, twilio_signature(token, form + signed)) for form in _with_and_without_port(url))


def twilio_signature(token: str, text: str) -> str:
    return base64.b64encode(hmac.new(token.encode(), text.encode(), hashlib.sha1).digest()).decode()


def _with_and_without_port(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    bare = parts.netloc.rsplit(":", 1)[0] if parts.port else parts.netloc
    return urlunsplit(parts._replace(netloc=bare)), urlunsplit(parts._replace(netloc=f"{bare}:{port}"))


def _is_form(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").split(";")[0].strip().lower() == "application/x-www-form-urlencoded"


def _form(body: bytes) -> list[tuple[str, str]]:
    return parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=200)


def _twilio_events(headers: dict[str, str], body: bytes) -> Iterator[Event]:
    fields = dict(_form(body)) if _is_form(headers) else _json(body)
    if not isinstance(fields, dict):
        raise BadPayload("expected an object")
    sid = str(fields.get("MessageSid") or fields.get("SmsSid") or "")
    status = str(fields.get("MessageStatus") or fields.get("SmsStatus") or "").lower()
    if not sid or not status:
        raise BadPayload("MessageSid and MessageStatus are missing")
    code = str(fields.get("ErrorCode") or "")
    if status in ("failed", "undelivered", "canceled"):
        answer = final(twilio.verdict(code) or rejected("message", code or status, "undelivered"))
        yield Event(f"{sid}:{status}", sid, None, "failed", code or status, answer=answer)
    else:
        kind: Kind = "delivered" if status in ("delivered", "read") else "other"
        yield Event(f"{sid}:{status}", sid, None, kind, status)


# --- NHN Cloud ------------------------------------------------------------------------------------------------------


def _nhn_signed(url: str, headers: dict[str, str], body: bytes) -> bool:
    return _same(headers.get("x-toast-webhook-signature", ""), settings.NHN_WEBHOOK_SIGNATURE)


def _nhn_events(headers: dict[str, str], body: bytes) -> Iterator[Event]:
    call = _json(body)
    hooks = call.get("hooks") if isinstance(call, dict) else None
    if not isinstance(hooks, list) or not all(isinstance(hook, dict) for hook in hooks):
        raise BadPayload("hooks are missing")
    for hook in hooks:
        if call.get("event") == "UNSUBSCRIBE":
            yield _nhn_opt_out(hook)
        elif (hook.get("requestId") or hook.get("recipientGroupingKey")) and hook.get("resultCode") is not None:
            yield _nhn_result(hook)


def _nhn_result(hook: dict[str, Any]) -> Event:
    own, code = str(hook.get("requestId") or ""), str(hook["resultCode"])
    at = parse_local(hook.get("receiveDate") or hook.get("resultDate"))
    kind, answer = nhn_verdict(code, kakao="kakaoMessageType" in hook)
    return Event(
        event_id=str(hook.get("hookId") or f"{own or hook['recipientGroupingKey']}:{code}"),
        provider_message_id=own,
        message_id=_uuid(hook.get("recipientGroupingKey")),
        kind=kind,
        code=code,
        occurred_at=at,
        answer=answer,
    )


def nhn_verdict(code: str, *, kakao: bool) -> tuple[Kind, Answer | None]:
    """The same numbers mean one thing of an Alimtalk and another of a text message."""
    if code in ("1000", "MRC01", "MTR1"):
        return "delivered", None
    answer = kakao_result(code) if kakao else sms_result(code)
    return ("other", None) if answer.outcome in ("accepted", "unknown") else ("failed", final(answer))


def _nhn_opt_out(hook: dict[str, Any]) -> Event:
    number = str(hook.get("recipientNo") or "")
    address = f"+82{number[1:]}" if number.startswith("0") else number
    at = parse_local(hook.get("createdDateTime"))
    return Event(str(hook.get("hookId") or ""), "", None, "unsubscribed", "UNSUBSCRIBE", at, address=address)


# --- Solapi ---------------------------------------------------------------------------------------------------------


def _solapi_signed(url: str, headers: dict[str, str], body: bytes) -> bool:
    """Solapi sends the secret's SHA-1 in a header; where that is not set up, the secret stands in the address."""
    secret = settings.SOLAPI_WEBHOOK_SECRET
    hashed = hashlib.sha1(secret.encode()).hexdigest()
    header = headers.get("x-solapi-secret", "")
    in_url = parse_qs(urlsplit(url).query).get("secret", [""])[0]
    return bool(secret) and (_same(header.lower(), hashed) or _same(header, secret) or _same(in_url, secret))


def _solapi_events(headers: dict[str, str], body: bytes) -> Iterator[Event]:
    items = _json(body)
    items = items if isinstance(items, list) else [items]
    for item in items:
        data = item.get("data", item) if isinstance(item, dict) else None
        if not isinstance(data, dict):
            raise BadPayload("expected a list of events")
        if data.get("messageId") and data.get("statusCode"):
            yield _solapi_result(item, data)


def _solapi_result(item: dict[str, Any], data: dict[str, Any]) -> Event:
    own, code = str(data["messageId"]), str(data["statusCode"])
    answer = solapi_verdict(code, own)
    kind: Kind = "delivered" if code == "4000" else "other" if answer.outcome == "accepted" else "failed"
    fields = data.get("customFields")
    return Event(
        event_id=str(item.get("eventDataId") or f"{own}:{code}"),
        provider_message_id=own,
        message_id=_uuid(fields.get("message_id")) if isinstance(fields, dict) else None,
        kind=kind,
        code=code,
        occurred_at=parse_local(data.get("dateReceived") or data.get("dateReported")),
        answer=final(answer) if answer and kind == "failed" else None,
    )


# --- e-mail services ------------------------------------------------------------------------------------------------


def _esp_signed(provider: str, url: str, headers: dict[str, str], body: bytes, now: datetime) -> bool:
    from messaging.providers import esp_webhooks

    return esp_webhooks.signed(provider, url, headers, body, now)
