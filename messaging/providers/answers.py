"""What goes to a provider, what comes back, and how an answer is masked before anybody may keep it."""

import json
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Protocol
from urllib.parse import quote, quote_plus
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from config.observe import redact

Outcome = Literal["accepted", "rejected", "transient", "rate_limited", "config", "unknown"]
FailureType = Literal["", "network", "outage", "rate_limited", "permanent", "config"]
Scope = Literal["", "recipient", "message", "sender", "provider"]
RAW_LENGTH = 500
# Seconds in which a batch starts its messages; with the longest exchange after it a batch ends within a 2 min lease.
SEND_BUDGET = 45.0


@dataclass(frozen=True)
class Outgoing:
    message_id: UUID
    attempt_no: int
    channel_type: str
    subscription_type: str
    token: str = field(repr=False)
    kind: str = "notice"
    title: str = ""
    body: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    template_code: str = ""
    template_parameters: dict[str, Any] = field(default_factory=dict)
    from_: str = ""
    created_at: datetime = field(default_factory=timezone.now)
    locale: str = ""
    others: frozenset[str] = frozenset()  # the provider's ids of other messages to this recipient


@dataclass(frozen=True)
class Answer:
    """One provider's word on one message. Only scope `recipient` may touch a subscription or suppress an address."""

    outcome: Outcome
    failure_type: FailureType = ""
    scope: Scope = ""
    code: str = ""
    provider_message_id: str = ""
    raw: str = ""
    retry_after: float | None = None
    subscription_status: int | None = None
    suppress_reason: str = ""
    error_reason: str = ""
    latency_ms: int = 0
    since: datetime | None = None  # the address is dead since then: one registered again later is not
    failover: bool = False  # the recipient cannot be reached on KakaoTalk: an SMS may take over

    def about(self, message: Outgoing, raw: str, started: float) -> "Answer":
        """With the raw words behind it, masked of the address, and how long it took."""
        elapsed = round((time.monotonic() - started) * 1000)
        return replace(self, raw=masked(raw, message.token), latency_ms=elapsed)


class Provider(Protocol):
    name: str
    concurrency: int  # messages under way at once; more in a batch wait, those unsent after SEND_BUDGET are transient
    idempotent: bool  # a repeat with the same message id is seen once by the recipient
    receipts: bool  # tells later whether the message arrived

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        """Never raises; one answer per item, in order."""

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        """What became of an attempt that ended unknown; None = the provider cannot tell.

        A transient answer with the code `not_found` means that the provider never took it: it may be sent again.
        Ask a minute or more after the attempt, lists lag. Twilio keeps no id of ours and needs the message itself.
        """


def begun_after(message: Outgoing | None, started_at: datetime) -> datetime:
    """Earlier none of its attempts can have begun: with weeks between making and sending, lists are too long to read
    and providers refuse the question."""
    if message is None:
        return started_at
    return max(min(message.created_at, started_at), started_at - settings.MESSAGE_LIFE)


def accepted(provider_message_id: str = "", code: str = "") -> Answer:
    return Answer("accepted", code=code, provider_message_id=provider_message_id)


def rejected(
    scope: Scope, code: str, reason: str, *, subscription_status: int | None = None, suppress_reason: str = ""
) -> Answer:
    return Answer(
        "rejected",
        "permanent",
        scope,
        code,
        error_reason=reason,
        subscription_status=subscription_status,
        suppress_reason=suppress_reason,
    )


def network(code: str) -> Answer:
    return Answer("transient", "network", "provider", code, error_reason="network")


def sender_rejected(code: str) -> Answer:
    """The From that this message brought with it is not taken: its sender's affair, and no reason to stop others."""
    return rejected("sender", code, "sender_rejected")


def outage(code: str, scope: Scope = "provider") -> Answer:
    return Answer("transient", "outage", scope, code, error_reason="outage")


def rate_limited(code: str, retry_after: float | None = None, scope: Scope = "sender") -> Answer:
    return Answer("rate_limited", "rate_limited", scope, code, retry_after=retry_after, error_reason="rate_limited")


def config(code: str, scope: Scope = "provider") -> Answer:
    return Answer("config", "config", scope, code, error_reason="config")


def blamed(answer: Answer, message: Outgoing, codes: Collection[str]) -> Answer:
    """Our set-up is wrong, by one of these codes: that of one sender only, where the message brought its own From."""
    ours = answer.outcome == "config" and answer.code in codes
    return sender_rejected(answer.code) if ours and message.from_ else answer


def unknown(code: str) -> Answer:
    return Answer("unknown", "", "", code, error_reason="outcome_unknown")


def final(answer: Answer) -> Answer:
    """Once a provider has taken a message and given up on it, there is nothing left to retry."""
    if answer.outcome == "rejected":
        return answer
    return rejected("recipient" if answer.scope == "recipient" else "message", answer.code, "undelivered")


def masked(raw: str, token: str) -> str:
    """Trimmed only after masking, so that no half of an address is left at the end. Of a long text only the beginning
    is looked at: a megabyte without a blank would keep the patterns busy for hours."""
    spellings = sorted(_spellings(token), key=len, reverse=True)
    longest = len(spellings[0]) if spellings else 0
    beginning = raw[: 4 * RAW_LENGTH + longest]
    for spelling in spellings:
        beginning = re.sub(re.escape(spelling), "[address]", beginning, flags=re.IGNORECASE)
    if len(raw) > 4 * RAW_LENGTH + longest:
        beginning = beginning[: len(beginning) - longest]
    return redact(storable(beginning)).strip()[:RAW_LENGTH]


def storable(text: str) -> str:
    """Without what no column can hold, though JSON can spell it."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


def _spellings(token: str) -> set[str]:
    """The ways a provider may echo an address: as sent, quoted for a URL or JSON, a number without its prefix."""
    forms = {token, quote(token, safe=""), quote_plus(token), json.dumps(token)[1:-1], json.dumps(token)[1:-1].lower()}
    if re.fullmatch(r"\+\d{7,15}", token):
        forms |= {token[1:], domestic(token)}
    return {form for form in forms if len(form) >= 4}


def domestic(number: str) -> str:
    """Korean gateways take +821012345678 as 01012345678; other countries keep their digits."""
    return "0" + number[3:] if number.startswith("+82") else number.lstrip("+")
