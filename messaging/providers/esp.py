"""E-mail services through django-anymail, which speaks to each of them; queue, retries and classes are ours."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID

import requests
from anymail.exceptions import (
    AnymailAPIError,
    AnymailConfigurationError,
    AnymailError,
    AnymailInvalidAddress,
    AnymailRecipientsRefused,
)
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMultiAlternatives, get_connection
from django.core.mail.backends.base import BaseEmailBackend

from messaging.providers.answers import (
    Answer,
    Outgoing,
    accepted,
    config,
    network,
    outage,
    rate_limited,
    rejected,
    sender_rejected,
    storable,
    unknown,
)
from messaging.providers.mime import ascii_address, message_id, sender, text_of
from messaging.providers.threads import spread

# They keep no words of ours beside a mail: their events are found by their own id.
NO_METADATA = {"anymail-mailersend", "anymail-postal"}


class ESP:
    concurrency = 8
    idempotent = False
    receipts = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.own = threading.local()
        self.pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix=name)

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        return spread(self.pool, self.concurrency, batch, self._deliver)

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        return None

    def _backend(self) -> Any:
        """One session per thread, kept."""
        if not hasattr(self.own, "backend"):
            backend: Any = get_connection(f"anymail.backends.{self.name.removeprefix('anymail-')}.EmailBackend")
            backend.timeout = settings.PROVIDER_TIMEOUT
            backend.open()
            self.own.backend = backend
        return self.own.backend

    def _deliver(self, message: Outgoing) -> Answer:
        started = time.monotonic()
        try:
            backend = self._backend()
        except (AnymailConfigurationError, ImproperlyConfigured):
            return config("not_configured").about(message, "", started)
        mail = _mail(message, backend)
        if self.name not in NO_METADATA:
            mail.metadata = {"message_id": str(message.message_id)}  # type: ignore[attr-defined]
        try:
            mail.send()
        except AnymailInvalidAddress as error:
            if message.from_ and "`from_email`" in str(error):
                return sender_rejected("bad_address").about(message, str(error), started)
            bad = rejected("recipient", "invalid_address", "invalid_address", subscription_status=-40)
            return bad.about(message, str(error), started)
        except AnymailRecipientsRefused as error:
            return _judge(mail).about(message, str(error), started)
        except AnymailAPIError as error:
            answer = _broken(error)
            if message.from_ and answer.outcome in ("config", "rejected") and _blames_from(error):
                answer = sender_rejected(answer.code)
            return answer.about(message, str(error), started)
        except (AnymailError, ValueError) as error:
            return rejected("message", type(error).__name__, "rejected").about(message, str(error), started)
        return _judge(mail).about(message, "", started)


def _mail(message: Outgoing, backend: BaseEmailBackend) -> EmailMultiAlternatives:
    headers = {**message.headers, "Message-ID": message_id(message)}
    to = [ascii_address(message.token)]
    mail = EmailMultiAlternatives(
        message.title, text_of(message.body), sender(message), to, headers=headers, connection=backend
    )
    mail.attach_alternative(message.body, "text/html")
    return mail


def _judge(mail: EmailMultiAlternatives) -> Answer:
    status = mail.anymail_status  # type: ignore[attr-defined]
    states = status.status or {"unknown"}
    if states <= {"sent", "queued"}:
        return accepted(storable(str(status.message_id or "")), "/".join(sorted(states)))
    if states & {"invalid"}:
        return rejected("recipient", "invalid", "invalid_address", subscription_status=-40)
    if states & {"rejected"}:
        # On the service's own suppression list, for a reason it keeps to itself.
        return rejected("recipient", "rejected", "suppressed_by_provider")
    return rejected("message", "failed", "rejected") if "failed" in states else unknown("malformed")


def _blames_from(error: AnymailAPIError) -> bool:
    """How the services say that a From is not registered with them; those that say so in words alone are not read."""
    try:
        said = error.response.json()
    except (AttributeError, ValueError):
        return False
    if not isinstance(said, dict):
        return False
    errors = said.get("errors")
    if isinstance(errors, list):  # SendGrid
        return any(isinstance(one, dict) and one.get("field") == "from" for one in errors)
    # Postmark: signature not found, or not confirmed; Resend: domain not verified.
    return said.get("ErrorCode") in (400, 401) or (said.get("statusCode"), said.get("name")) == (
        403,
        "validation_error",
    )


def _broken(error: AnymailAPIError) -> Answer:
    status = getattr(error, "status_code", None)
    if status is None:
        cause = error.__cause__
        code = type(cause).__name__
        never_heard = isinstance(cause, requests.ConnectTimeout) or "NewConnectionError" in repr(cause)
        return network(code) if never_heard or isinstance(cause, requests.exceptions.SSLError) else unknown(code)
    code = f"http_{status}"
    if status in (401, 403, 404):
        return config(code)
    if status == 429:
        header = error.response.headers.get("Retry-After", "") if error.response is not None else ""
        return rate_limited(code, float(header) if header.isdigit() else None)
    if status >= 500:
        return outage(code)
    return unknown("malformed") if status < 300 else rejected("message", code, "rejected")
