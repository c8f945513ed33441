"""What providers report by webhook: kept once, then applied; what cannot be applied yet is parked, not lost."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import structlog
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import Q
from django.utils.dateparse import parse_datetime

from messaging.models import Channel, HoldReason, Message, Subscription, WebhookInbox
from messaging.models.addresses import address_hash
from messaging.providers import Answer
from messaging.providers.answers import storable
from messaging.providers.webhooks import Event, nhn_verdict
from messaging.services.receipts import AHEAD, record_receipt
from messaging.services.recording import fail_accepted, punish
from messaging.services.resolving import settle
from messaging.services.subscriptions import unsubscribe

log = structlog.get_logger("messaging.incoming")
State, Status = WebhookInbox.State, Message.Status
# Carriers report up to three days late, and nobody reports about a message older than that.
PARKED_FOR = timedelta(hours=72)
PAGE = 500
COMPLAINT = Answer(
    "rejected", "permanent", "recipient", subscription_status=Subscription.COMPLAINT, suppress_reason="complaint"
)


def receive_events(provider: str, events: Sequence[Event], *, now: datetime) -> Counter[str]:
    """An event that came before changes nothing. Committed before it is applied: what was told is not told again, so
    what cannot be applied at this moment is left to the sweep, and the provider need not know."""
    rows = []
    for event in events:
        row = _row(provider, event, now)
        if _names_a_number(event):
            _opt_out(row, event.address, now)
        else:
            rows.append(row)
    WebhookInbox.objects.bulk_create(rows, ignore_conflicts=True)
    kept = WebhookInbox.objects.filter(provider=provider, event_id__in=[row.event_id for row in rows])
    keys = list(kept.parked().values_list("pk", flat=True))
    try:
        return apply_events(keys, now=now)
    except DatabaseError as error:
        log.warning("events_not_applied_yet", provider=provider, events=len(keys), error=type(error).__name__)
        return Counter(parked=len(keys))


def _row(provider: str, event: Event, now: datetime) -> WebhookInbox:
    """Without the address: it is in no column. An opt-out that only names one is done with when it is stored."""
    answer = asdict(event.answer) if event.answer else None
    if answer:
        answer = {name: value for name, value in answer.items() if name not in ("raw", "latency_ms", "retry_after")}
        answer |= {name: _short(answer[name]) for name in ("code", "provider_message_id")}
        answer["since"] = event.answer.since.isoformat() if event.answer and event.answer.since else None
    by_number = _names_a_number(event)
    return WebhookInbox(
        provider=provider,
        event_id=_short(event.event_id or f"{event.kind}:{event.code}:{event.occurred_at}:{_mark(event)}"),
        event_type=event.kind,
        message_ref=str(event.message_id or ""),
        provider_message_id=_short(event.provider_message_id),
        payload={"code": _short(event.code), "answer": answer},
        state=State.APPLIED if by_number else State.PARKED,
        occurred_at=event.occurred_at,
        received_at=now,
        applied_at=now if by_number else None,
    )


def _mark(event: Event) -> str:
    return address_hash("sms", event.address) if event.address else event.provider_message_id


def _short(text: str) -> str:
    text = storable(text)
    return text if len(text) <= 255 else hashlib.sha256(text.encode()).hexdigest()


def _names_a_number(event: Event) -> bool:
    return event.kind == "unsubscribed" and bool(event.address)


@transaction.atomic
def _opt_out(row: WebhookInbox, number: str, now: datetime) -> None:
    """The carrier's opt-out service knows a number only: whoever wrote to it must stop. Told once more later, it must
    not undo the consent given since."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError:
        return
    hashes = [address_hash(channel, number) for channel in ("sms", "kakao_talk")]
    for pk in Subscription.objects.filter(token_hash__in=hashes).order_by("pk").values_list("pk", flat=True):
        unsubscribe(pk, now=now, reason="carrier_opt_out")


@transaction.atomic
def apply_events(keys: Sequence[int], *, now: datetime) -> Counter[str]:
    """Those about one message in the order they came. Locked, so the same event is applied once however many deliver
    it: all messages by key before any is changed, then recipient by recipient, so that no two batches wait in a circle.
    """
    rows = list(
        WebhookInbox.objects.parked()
        .filter(pk__in=keys)
        .order_by("pk")
        .select_for_update(skip_locked=True, of=("self",))
    )
    known = _messages(rows)
    found = {row.pk: known.get(row.message_ref) or known.get(row.provider_message_id) for row in rows}
    recipients = _locked(found.values())
    changed = []
    for row in sorted(rows, key=lambda row: (str(recipients.get(found[row.pk])), row.pk)):
        before, pk = (row.state, row.note), found[row.pk]
        row.state, row.note = _apply(row, pk, now) if pk and pk in recipients else (State.PARKED, "unknown message")
        row.message_id = pk
        if row.state == State.PARKED and row.received_at < now - PARKED_FOR:
            row.state = State.ABANDONED
        if row.state != State.PARKED:
            row.applied_at = now
        if (row.state, row.note) != before:
            changed.append(row)
    WebhookInbox.objects.bulk_update(changed, ["state", "note", "message", "applied_at"])
    return Counter(row.state for row in changed if row.state != State.PARKED)


def _locked(ids: Iterable[UUID | None]) -> dict[UUID | None, UUID]:
    """The messages' subscriptions."""
    rows = Message.objects.filter(pk__in={pk for pk in ids if pk}).order_by("pk").select_for_update(of=("self",))
    return dict(rows.values_list("pk", "subscription_id"))


def _messages(rows: Sequence[WebhookInbox]) -> dict[str, UUID]:
    """By our own id, which some providers give back, or by theirs."""
    ours = [row.message_ref for row in rows if row.message_ref]
    theirs = [row.provider_message_id for row in rows if row.provider_message_id]
    found: dict[str, UUID] = {}
    matching = Message.objects.filter(Q(pk__in=ours) | Q(provider_message_id__in=theirs))
    for pk, provider_message_id in matching.order_by("created_at").values_list("pk", "provider_message_id"):
        found[str(pk)] = pk
        if provider_message_id:
            found[provider_message_id] = pk
    return found


def _apply(row: WebhookInbox, pk: UUID, now: datetime) -> tuple[str, str]:
    """(state, note). Never a step back: a message that is delivered, converted or failed stays so."""
    message = Message.objects.select_for_update(of=("self",)).get(pk=pk)
    if row.event_type in ("unsubscribed", "complained"):
        return _recipient_said(row.event_type, message, now)
    kind, answer = _verdict(row, message)
    if kind not in ("delivered", "failed"):
        return State.IGNORED, "not about delivery"
    if message.hold_reason == HoldReason.OUTCOME_UNKNOWN:
        # The provider speaks of it, so it was taken: better proof than any question.
        settle(message, Answer("accepted", code="webhook", provider_message_id=row.provider_message_id), now=now)
    if message.status in (Status.PENDING, Status.ERRORED):
        return State.PARKED, "the message's own result is not recorded yet"
    if message.status != Status.SUCCESSFUL:
        if kind == "failed" and _came_back(message, answer or _answer(row), now):
            return State.APPLIED, f"the message stays {message.status}, its address is dead"
        return State.IGNORED, f"the message is {message.status} already"
    if kind == "delivered":
        at = min(row.occurred_at or now, now + AHEAD)
        record_receipt(pk, now=now, occurred_at=at)
        return State.APPLIED, "delivered"
    fail_accepted([(pk, answer or _answer(row))], now=now)
    return State.APPLIED, "failed"


def _came_back(message: Message, answer: Answer, now: datetime) -> bool:
    """Mail servers take a mail and return it later: no step back for the message, but the last one to its address."""
    arrived = message.status in (Status.RECEIVED, Status.CONVERTED)
    if message.channel_type != Channel.EMAIL or not arrived or answer.scope != "recipient":
        return False
    punish([(message, answer)], now=now)
    return True


def _verdict(row: WebhookInbox, message: Message) -> tuple[str, Answer | None]:
    """NHN tells the results of both its services in one form: which of them it was, the message knows for certain."""
    code = str(row.payload.get("code") or "")
    if row.provider != "nhn" or row.event_type == "delivered" or not code:
        return row.event_type, None
    return nhn_verdict(code, kakao=message.channel_type == Channel.KAKAO_TALK)


def _answer(row: WebhookInbox) -> Answer:
    said: dict[str, Any] = dict(row.payload.get("answer") or {})
    if not said or said.get("outcome") != "rejected":
        # Retrying is over once a provider has taken a message: its later word of failure is final.
        reason = said.get("error_reason") or "undelivered"
        return Answer("rejected", "permanent", "message", row.payload.get("code", ""), error_reason=reason)
    said["since"] = parse_datetime(said["since"]) if said.get("since") else None
    return Answer(**said)


def _recipient_said(kind: str, message: Message, now: datetime) -> tuple[str, str]:
    if kind == "unsubscribed":
        unsubscribe(message.subscription_id, now=now, reason="provider_opt_out")
    else:
        punish([(message, COMPLAINT)], now=now)
    return State.APPLIED, kind
