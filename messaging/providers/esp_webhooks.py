"""Events of e-mail services: django-anymail checks and reads them, here they become ours."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from anymail.exceptions import AnymailError, AnymailWebhookValidationFailure
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParserError

from messaging.providers.answers import Answer, rejected
from messaging.providers.webhooks import BadPayload, Event, Kind

KINDS: dict[str, Kind] = {
    "delivered": "delivered",
    "bounced": "failed",
    "rejected": "failed",
    "failed": "failed",
    "complained": "complained",
    "unsubscribed": "unsubscribed",
    "opened": "opened",
    "clicked": "clicked",
}


# What anymail runs into when a body is not what the service sends.
ODD_BODY = (ValueError, LookupError, TypeError, AttributeError, RecursionError, MultiPartParserError)
# Services that sign with a key of their own, and the variable that holds it; the others prove nothing but the secret.
OWN_KEYS = {
    "anymail-mailersend": "MAILERSEND_SIGNING_SECRET",
    "anymail-mailgun": "MAILGUN_WEBHOOK_SIGNING_KEY",
    "anymail-mailtrap": "MAILTRAP_TRACKING_SECRET",
    "anymail-mandrill": "MANDRILL_WEBHOOK_KEY",
    "anymail-postal": "POSTAL_WEBHOOK_KEY",
}
# Mailgun signs a time, which anymail does not look at. It tries again for eight hours, perhaps with the same time.
MAILGUN_WINDOW = timedelta(hours=12)


def signed(provider: str, url: str, headers: dict[str, str], body: bytes, now: datetime) -> bool:
    """By the shared secret that each of these services can send, by the service's own key, or by both."""
    if provider not in settings.ESPS:
        return False
    if not settings.ANYMAIL.get("WEBHOOK_SECRET") and not settings.ANYMAIL.get(OWN_KEYS.get(provider, "")):
        return False
    try:
        # All of them: a view that may check a signature besides does not ask for the secret in its own check.
        _view(provider).run_validators(_request(url, headers, body))
    except (AnymailWebhookValidationFailure, ImproperlyConfigured, SuspiciousOperation, *ODD_BODY):
        return False
    return provider != "anymail-mailgun" or _recent(body, now)


def _recent(body: bytes, now: datetime) -> bool:
    """Of Mailgun's events as JSON; the old form, fields without an id, could be told again and again."""
    try:
        at = datetime.fromtimestamp(float(json.loads(body)["signature"]["timestamp"]), UTC)
    except (*ODD_BODY, OverflowError, OSError):
        return False
    return abs(now - at) <= MAILGUN_WINDOW


def events(provider: str, headers: dict[str, str], body: bytes) -> Iterator[Event]:
    try:
        found = _view(provider).parse_events(_request("", headers, body))
    except (AnymailError, *ODD_BODY) as error:
        raise BadPayload(type(error).__name__) from None
    for event in found:
        kind = KINDS.get(event.event_type, "other")
        yield Event(
            event_id=str(event.event_id or f"{event.message_id}:{event.event_type}"),
            provider_message_id=str(event.message_id or ""),
            message_id=_own_id(event.metadata),
            kind=kind,
            code=str(event.reject_reason or event.event_type),
            occurred_at=event.timestamp,
            answer=_failure(event) if kind == "failed" else None,
        )


def _failure(event: Any) -> Answer:
    code = str(event.reject_reason or event.event_type)
    if event.event_type == "bounced" and event.reject_reason == "bounced":
        return rejected("recipient", code, "hard_bounce", subscription_status=-42, suppress_reason="hard_bounce")
    if event.reject_reason == "invalid":
        return rejected("recipient", code, "invalid_address", subscription_status=-40)
    return rejected("message", code, "undelivered")


def _own_id(metadata: Any) -> UUID | None:
    try:
        return UUID(str(metadata["message_id"]))
    except (KeyError, TypeError, ValueError):
        return None


def _view(provider: str) -> Any:
    module = import_module(f"anymail.webhooks.{provider.removeprefix('anymail-')}")
    names = [n for n in vars(module) if n.endswith(("TrackingWebhookView", "CombinedWebhookView"))]
    return getattr(module, names[0])()


def _request(url: str, headers: dict[str, str], body: bytes) -> HttpRequest:
    """The call as anymail's views expect it, at the public address and not at what a proxy made of it."""
    parts = urlsplit(url or settings.PUBLIC_URL)
    return WSGIRequest(
        {
            **{f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()},
            "REQUEST_METHOD": "POST",
            "PATH_INFO": parts.path or "/",
            "QUERY_STRING": parts.query,
            "CONTENT_TYPE": headers.get("content-type", "application/json"),
            "CONTENT_LENGTH": str(len(body)),
            "SERVER_NAME": parts.hostname or "",
            "SERVER_PORT": str(parts.port or (443 if parts.scheme == "https" else 80)),
            "HTTP_HOST": parts.netloc,
            "wsgi.url_scheme": parts.scheme,
            "wsgi.input": BytesIO(body),
        }
    )
