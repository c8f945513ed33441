"""Pausing, resuming and stopping enrollments, one by hand or many by time."""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution
from campaigns.services.completion import settle, skip_stale_of
from campaigns.services.rows import Ledger, end_enrollments, grouped, lock_sequences, skip_executions, waiting
from config.errors import Invalid, Missing
from config.sweeping import nudge

BY_HAND = "by hand"


def locked_enrollment(enrollment_id: UUID) -> Enrollment:
    """The enrollment under its sequence's lock. A row moved meanwhile is looked up again."""
    while True:
        owner = Enrollment.objects.filter(pk=enrollment_id).values_list("sequence_id", flat=True).first()
        if owner is None:
            raise Missing(_("There is no such enrollment."))
        lock_sequences([owner])
        row = Enrollment.objects.select_for_update(no_key=True).select_related(None).filter(pk=enrollment_id).first()
        if row is not None and row.sequence_id == owner:
            return row


@transaction.atomic
def pause_enrollment(enrollment_id: UUID, now: datetime, *, resume_at: datetime | None, reason: str = "") -> Enrollment:
    row = locked_enrollment(enrollment_id)
    if resume_at is not None and resume_at <= now:
        raise Invalid(_("The date of return must lie ahead."), attr="resume_at")
    row.pause()
    row.paused_at, row.resume_at, row.pause_reason = now, resume_at, reason or BY_HAND
    row.save(update_fields=["status", "paused_at", "resume_at", "pause_reason"])
    return row


@transaction.atomic
def resume_enrollment(enrollment_id: UUID, now: datetime) -> Enrollment:
    """By hand: the schedule stays as it was, and what is stale by now is not sent."""
    row = locked_enrollment(enrollment_id)
    row.resume()
    row.paused_at = row.resume_at = None
    row.pause_reason = ""
    row.save(update_fields=["status", "paused_at", "resume_at", "pause_reason"])
    ledger = Ledger(now)
    if skip_stale_of(Execution.objects.filter(enrollment=row), now, ledger, "resume_enrollment"):
        settle([row.sequence_id], now, ledger)
    nudge("campaigns.send_due_steps")
    return Enrollment.objects.get(pk=row.pk)


@transaction.atomic
def stop_enrollment(enrollment_id: UUID, now: datetime) -> Enrollment:
    row = locked_enrollment(enrollment_id)
    row.stop()
    finish_enrollments([row.pk], "stopped", "stopped", now, Ledger(now), "stop_enrollment")
    return Enrollment.objects.get(pk=row.pk)


def finish_enrollments(
    ids: Collection[UUID], status: str, skip_reason: str, now: datetime, ledger: Ledger, rule: str
) -> None:
    """End them and skip what they had queued; a step being sent at this moment has its result recorded later."""
    ended = end_enrollments(ids, status, now)
    ledger.skipped(rule, skip_executions(waiting(ids), skip_reason), skip_reason)
    ledger.ended(rule, ended, status, because=skip_reason)
    settle({row.sequence_id for row in ended}, now, ledger)


@transaction.atomic
def resume_due(ids: Collection[UUID], now: datetime, run_id: UUID | None = None) -> Counter[str]:
    """At the date of return: active again, and everything still to come moves by the length of the pause."""
    owners = Enrollment.objects.filter(pk__in=list(ids)).values_list("sequence_id", flat=True)
    locked = [row.pk for row in lock_sequences(set(owners), skip_locked=True)]
    rows = Enrollment.objects.resumable(now).filter(pk__in=list(ids), sequence__in=locked).order_by("pk")
    pairs = list(rows.select_for_update(of=("self",), skip_locked=True, no_key=True).values_list("pk", "sequence_id"))
    keys = [pk for pk, _sequence in pairs]
    if not keys:
        return Counter()
    shift_waiting(keys, now)
    Enrollment.objects.filter(pk__in=keys).update(status="active", resume_at=None, paused_at=None, pause_reason="")
    ledger = Ledger(now, run_id)
    before, after = {"status": "paused"}, {"status": "active"}
    ledger.bulk("resume.due", grouped((s, pk) for pk, s in pairs), before=before, after=after, of="enrollments")
    ledger.write()
    nudge("campaigns.send_due_steps")
    return Counter(resumed=len(keys))


def shift_waiting(enrollment_ids: Collection[UUID], now: datetime) -> None:
    """By how long each was paused, never before now, so nothing is stale by it. Each row moves by its own length."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE sequence_step_executions x
               SET scheduled_at = CASE WHEN x.deferred_until IS NULL
                                       THEN greatest(x.scheduled_at + v.pause, %(now)s)
                                       ELSE x.scheduled_at + v.pause END,
                   deferred_until = CASE WHEN x.deferred_until IS NULL THEN NULL
                                         ELSE greatest(x.deferred_until + v.pause, %(now)s) END
              FROM (SELECT id, greatest(%(now)s - coalesce(paused_at, %(now)s), interval '0') AS pause
                      FROM sequence_enrollments WHERE id = ANY(%(ids)s::uuid[])) v
             WHERE x.enrollment_id = v.id AND x.status IN ('pending', 'deferred', 'awaiting_enrichment')
            """,
            {"now": now, "ids": list(enrollment_ids)},
        )
