"""Opens, clicks and one-click unsubscriptions that come back from e-mails."""

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Max

from config.errors import DomainError
from messaging.models import HoldReason, Message, MessageHit, Subscription, TrackedLink
from messaging.services.links import tracks
from messaging.services.machines import machine_reasons
from messaging.services.receipts import record_conversion
from messaging.services.subscriptions import unsubscribe

# Enough to see what a recipient did; a script that reloads a pixel must not fill the table.
MOST_HITS = 200


def record_hit(
    message_id: UUID, kind: str, headers: Mapping[str, str], *, now: datetime, link_id: UUID | None = None
) -> MessageHit | None:
    """Kept whoever it was; only a person's hit converts the message. Where tracking is off nothing is kept."""
    message = Message.objects.select_related("application").filter(pk=message_id).first()
    if message is None or not tracks(message.application):
        return None
    reasons = machine_reasons(headers, _sent_at(message), now)
    hit = MessageHit(
        message=message,
        kind=kind,
        by=MessageHit.Class.MACHINE if reasons else MessageHit.Class.HUMAN,
        reasons=reasons,
        link_id=link_id,
        user_agent=(headers.get("User-Agent") or "").replace("\x00", "")[:300],
        occurred_at=now,
    )
    with transaction.atomic():
        if MessageHit.objects.filter(message=message)[:MOST_HITS].count() < MOST_HITS:
            hit.save(force_insert=True)
        if not reasons:
            _convert(message_id, kind, now)
    return hit


def _sent_at(message: Message) -> datetime | None:
    """Of one whose outcome nobody knows: when it was tried last."""
    if message.hold_reason != HoldReason.OUTCOME_UNKNOWN:
        return message.sent_at
    return message.attempts.aggregate(last=Max("started_at"))["last"]


def _convert(message_id: UUID, kind: str, now: datetime) -> None:
    try:
        with transaction.atomic():
            record_conversion(message_id, action=kind, now=now)
    except DomainError:
        pass  # failed or expired meanwhile: the hit is kept, the state stays


def destination(link_id: UUID) -> str | None:
    return TrackedLink.objects.filter(pk=link_id).values_list("url", flat=True).first()


def leave_list(subscription_id: UUID, *, now: datetime) -> Subscription | None:
    """One click, any number of times. A subscription that is gone has left already."""
    if not Subscription.objects.filter(pk=subscription_id).exists():
        return None
    return unsubscribe(subscription_id, now=now, reason="one_click")
