"""Messages that end unsent: cancelled, refused at the last look, or past their time; and what has had its time."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Case, F, Value, When

from config.decisions import decide, record
from messaging.models import CONTENT_CLEARED, HoldReason, Message
from messaging.models.messages import MessageQuerySet
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


def expire_unsent(ids: list[UUID], *, now: datetime, run_id: UUID | None = None) -> int:
    """24 h and neither accepted nor ended. One whose outcome nobody knows says so: it may have been sent."""
    reason = Case(When(hold_reason=HoldReason.OUTCOME_UNKNOWN, then=F("hold_reason")), default=Value("expired"))
    return _end(
        "expire_unsent",
        _locked(Message.objects.overdue(now), ids),
        {
            "status": Message.Status.FAILED,
            "failed_at": now,
            "error_reason": reason,
            "hold_reason": None,
            "next_attempt_at": None,
            "lease_id": None,
            "leased_until": None,
        },
        lambda row: {"created_at": row.created_at, "scheduled_at": row.scheduled_at, "hold_reason": row.hold_reason},
        run_id,
    )


def time_out_receipts(ids: list[UUID], *, now: datetime, run_id: UUID | None = None) -> int:
    return _end(
        "time_out_receipt",
        _locked(Message.objects.unreceipted(now), ids),
        {"status": Message.Status.FAILED, "failed_at": now, "error_reason": "receipt_timeout"},
        lambda row: {"channel": row.channel_type, "sent_at": row.sent_at},
        run_id,
    )


def expire_received(ids: list[UUID], *, now: datetime, run_id: UUID | None = None) -> int:
    return _end(
        "expire_received",
        _locked(Message.objects.unconverted(now), ids),
        {"expired_at": now, **CONTENT_CLEARED},
        lambda row: {"received_at": row.received_at},
        run_id,
    )


def archive_failed(ids: list[UUID], *, now: datetime, run_id: UUID | None = None) -> int:
    return _end(
        "archive_failed",
        _locked(Message.objects.archivable(now), ids),
        {"archived_at": now, **CONTENT_CLEARED},
        lambda row: {"failed_at": row.failed_at},
        run_id,
    )


# What an end takes along; its texts are not read.
LOOKED_AT = (
    "status", "channel_type", "hold_reason", "created_at", "scheduled_at", "sent_at", "received_at", "failed_at",
    "expired_at", "archived_at",
)  # fmt: skip
TOLD = ("status", "expired_at", "archived_at")


def _locked(ripe: MessageQuerySet, ids: list[UUID]) -> MessageQuerySet:
    return ripe.filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",)).only(*LOOKED_AT)


def _end(
    rule: str,
    ripe: MessageQuerySet,
    changes: dict[str, Any],
    evidence: Callable[[Message], dict[str, Any]],
    run_id: UUID | None,
) -> int:
    """One statement for all, and a decision for each. A retry leaves none: its event says why and how often."""
    rows = list(ripe)
    ended = Message.objects.filter(pk__any=[row.pk for row in rows]).update(**changes)
    after = {name: _plain(changes[name]) for name in TOLD if name in changes}
    record(
        decide(
            rule,
            row,
            before={name: _plain(getattr(row, name)) for name in after},
            after=after,
            inputs={name: _plain(value) for name, value in evidence(row).items() if value is not None},
            run_id=run_id,
        )
        for row in rows
    )
    return ended


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def retry_errored(ids: list[UUID], *, now: datetime) -> int:
    """Due again: back to pending; the trigger clears what belongs to errored and counts the retry."""
    rows = Message.objects.retryable(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",))
    return Message.objects.filter(pk__in=[pk for (pk,) in rows.values_list("pk")]).update(
        status=Message.Status.PENDING, retried_at=now
    )
