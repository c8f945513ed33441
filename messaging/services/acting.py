"""What an operator does to many rows at once; each function counts what became of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

from django.db import transaction

from config.errors import DomainError
from messaging.models import Message, Subscription, Suppression
from messaging.services.creating import enqueue_messages
from messaging.services.ending import cancel_messages
from messaging.services.operating import draft_again
from messaging.services.resolving import resolve_message
from messaging.services.subscriptions import disable_subscription, enable_subscription
from messaging.services.suppressions import lift_suppression


def cancel_many(ids: Sequence[UUID], *, now: datetime) -> Counter[str]:
    cancelled = len(cancel_messages(ids, now=now))
    return Counter(cancelled=cancelled, left=len(ids) - cancelled)


@transaction.atomic
def retry_many(ids: Sequence[UUID], *, now: datetime) -> Counter[str]:
    """Failed messages whose content is still there, each sent anew once."""
    rows = Message.objects.filter(pk__in=ids, status=Message.Status.FAILED, archived_at=None, retries=None)
    old = list(rows.order_by("pk").select_for_update(of=("self",)))
    outcomes = enqueue_messages([draft_again(row) for row in old], now=now)
    counts = Counter("sent_anew" if outcome.created else outcome.code or "left" for outcome in outcomes)
    return counts + Counter(left=len(ids) - len(old))


def resolve_many(ids: Sequence[UUID], outcome: str, *, now: datetime) -> Counter[str]:
    return _each(ids, lambda pk: resolve_message(pk, outcome, now=now), outcome)


def disable_many(ids: Sequence[UUID], reason: str, *, now: datetime) -> Counter[str]:
    return _each(ids, lambda pk: disable_subscription(pk, now=now, reason=reason[:100]), "disabled")


def enable_many(ids: Sequence[UUID], *, now: datetime) -> Counter[str]:
    """Not those who have opted out: an operator's word is not their consent."""
    asked = list(Subscription.objects.filter(pk__in=ids).values_list("pk", flat=True))
    return _each(asked, lambda pk: enable_subscription(pk, consent=False, now=now), "enabled")


def lift_many(ids: Sequence[UUID], note: str, by: str, *, now: datetime) -> Counter[str]:
    active = list(Suppression.objects.active().filter(pk__in=ids).values_list("pk", flat=True))
    done = _each(active, lambda pk: lift_suppression(pk, note=note, by=by, now=now), "lifted")
    return done + Counter(left=len(ids) - len(active))


def _each(ids: Sequence[UUID], act: Callable[[UUID], object], word: str) -> Counter[str]:
    """One by one, each with a savepoint: what one row refuses does not stop the others."""
    counts: Counter[str] = Counter()
    for pk in ids:
        try:
            with transaction.atomic():
                act(pk)
            counts[word] += 1
        except DomainError as refusal:
            counts[refusal.code] += 1
    return counts
