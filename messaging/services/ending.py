"""Messages that end unsent: cancelled, refused at the last look, or past their time; and what has had its time."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Case, F, Value, When

from messaging.models import CONTENT_CLEARED, HoldReason, Message
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


# What the recipient stands for, as opposed to the application or the provider.
OF_RECIPIENT = {"unsubscribed", "suppressed", "not_sendable", "no_consent"}


def fail_unsent(reasons: Mapping[UUID, str], *, now: datetime) -> None:
    """Locked pending messages that must not be sent any more, each with its reason; no provider is called."""
    if not reasons:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE messages SET status = 'failed', failed_at = %s, error_reason = r.reason, failure_type = 'permanent',
                   next_attempt_at = NULL, error_details = jsonb_build_object('scope', r.scope)
              FROM unnest(%s::uuid[], %s::text[], %s::text[]) AS r (id, reason, scope)
             WHERE messages.id = r.id AND status = 'pending'
            """,
            [
                now,
                list(reasons),
                list(reasons.values()),
                ["recipient" if reason in OF_RECIPIENT else "message" for reason in reasons.values()],
            ],
        )


def expire_unsent(ids: list[UUID], *, now: datetime) -> int:
    """24 h and neither accepted nor ended. One whose outcome nobody knows says so: it may have been sent."""
    rows = Message.objects.overdue(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    reason = Case(When(hold_reason=HoldReason.OUTCOME_UNKNOWN, then=F("hold_reason")), default=Value("expired"))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        status=Message.Status.FAILED,
        failed_at=now,
        error_reason=reason,
        hold_reason=None,
        next_attempt_at=None,
        lease_id=None,
        leased_until=None,
    )


def time_out_receipts(ids: list[UUID], *, now: datetime) -> int:
    rows = Message.objects.unreceipted(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        status=Message.Status.FAILED, failed_at=now, error_reason="receipt_timeout"
    )


def expire_received(ids: list[UUID], *, now: datetime) -> int:
    rows = Message.objects.unconverted(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        expired_at=now, **CONTENT_CLEARED
    )


def archive_failed(ids: list[UUID], *, now: datetime) -> int:
    rows = Message.objects.archivable(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        archived_at=now, **CONTENT_CLEARED
    )


def retry_errored(ids: list[UUID], *, now: datetime) -> int:
    """Due again: back to pending; the trigger clears what belongs to errored and counts the retry."""
    rows = Message.objects.retryable(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        status=Message.Status.PENDING, retried_at=now
    )
