"""Messages that end unsent: cancelled by somebody."""

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from django.db import transaction

from messaging.models import Message
from messaging.services import quotas


@transaction.atomic
def cancel_messages(ids: Iterable[UUID], *, now: datetime, reason: str = "cancelled") -> set[UUID]:
    """Those that nobody is sending; the ids of what was cancelled. Before any attempt the quota gets them back."""
    rows = list(
        Message.objects.cancellable()
        .filter(pk__in=list(ids))
        .order_by("pk")
        .select_for_update(of=("self",))
        .values_list("pk", "application_id", "created_at", "attempt_count")
    )
    cancelled = {pk for pk, *_rest in rows}
    Message.objects.filter(pk__in=cancelled).update(
        status=Message.Status.FAILED, failed_at=now, error_reason=reason, hold_reason=None, next_attempt_at=None
    )
    quotas.refund((application, created) for _pk, application, created, attempts in rows if attempts == 0)
    return cancelled
