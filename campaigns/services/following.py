"""From a message's result to the execution's end, and from there to the next step."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from campaigns.models import Enrollment, Execution, Sender, Step
from campaigns.services.completion import settle
from campaigns.services.leads import look_again
from campaigns.services.pools import Pools
from campaigns.services.rows import Ledger, end_enrollments, grouped, lock_sequences
from campaigns.services.texts import missing
from campaigns.services.windows import opening
from config.decisions import decide
from messaging.models import Message

# A recipient-scoped failure tells what became of the lead; every other one is a plain failure.
ENDS = {"hard_bounce": "bounced", "unsubscribed": "unsubscribed"}
# Messaging's word for a From that its provider does not take.
SENDER_REJECTED = "sender_rejected"


def record_results(ids: Collection[UUID], now: datetime, run_id: UUID | None = None) -> Counter[str]:
    """Adopt the results of the messages of these processing executions; not of a sequence somebody is at."""
    with transaction.atomic():
        rows = Execution.objects.filter(pk__in=list(ids))
        sequences = set(rows.values_list("enrollment__sequence_id", flat=True))
        locked = [row.pk for row in lock_sequences(sequences, skip_locked=True)]
        ledger = Ledger(now, run_id)
        done = adopt(rows.of(locked).values_list("pk", flat=True), now, ledger, "follow")
        settle(locked, now, ledger)
    return done


def adopt(ids: Iterable[UUID], now: datetime, ledger: Ledger, rule: str) -> Counter[str]:
    """The sequences are locked. Messages still under way are left alone; one that is gone cannot be asked any more."""
    rows = list(
        Execution.objects.filter(pk__in=list(ids), status="processing", message_id__isnull=False)
        .select_related("step", "message", "enrollment__lead", "enrollment__sequence")
        .order_by("pk")
        .select_for_update(of=("self", "enrollment"), no_key=True, skip_locked=True)
    )
    sent = [row for row in rows if row.message is not None and row.message.sent_at is not None]
    failed = [row for row in rows if row.message is None or _failed_unsent(row.message)]
    busy = report_errors(failed, ledger)
    failed = [row for row in failed if row.sender_id not in busy]
    _record_sent(sent, ledger, rule)
    advance(sent, now, ledger)
    _record_failed(failed, now, ledger, rule)
    return Counter({"sent": len(sent), "failed": len(failed)})


def report_errors(rows: Sequence[Execution], ledger: Ledger) -> set[UUID]:
    """A sender whose address was refused sends no more until somebody mends it. Returns those another worker holds.

    Nobody waits here: senders come before sequences, and those are locked. What a held sender failed is left for the
    next look. A sender whose address was changed meanwhile is not blamed for the old one.
    """
    refused: dict[UUID, list[Message]] = defaultdict(list)
    for row in rows:
        if row.sender_id and row.message and row.message.error_reason == SENDER_REJECTED:
            refused[row.sender_id].append(row.message)
    healthy = Sender.objects.healthy().filter(pk__in=list(refused))
    free = list(healthy.order_by("pk").select_for_update(no_key=True, skip_locked=True))
    busy = set(healthy.values_list("pk", flat=True)) - {sender.pk for sender in free}
    blamed = [(sender, [said for said in refused[sender.pk] if sender.address in said.from_address]) for sender in free]
    _record_errors([(sender, found) for sender, found in blamed if found], ledger)
    return busy


def _record_errors(blamed: Sequence[tuple[Sender, list[Message]]], ledger: Ledger) -> None:
    for sender, found in blamed:
        code = str((found[0].error_details or {}).get("code", ""))
        sender.report_error(f"{SENDER_REJECTED} {code}".strip())
        before, after = {"status": "active"}, {"status": "error"}
        inputs = {"code": code, "messages": len(found), "message_id": str(found[0].pk)}
        ledger.add(decide("sender.rejected", sender, before=before, after=after, inputs=inputs, run_id=ledger.run_id))
    Sender.objects.bulk_update([sender for sender, _found in blamed], ["status", "last_error"])


def _failed_unsent(message: Any) -> bool:
    return message.status == "failed" and message.sent_at is None


def _record_sent(rows: list[Execution], ledger: Ledger, rule: str) -> None:
    if not rows:
        return
    for row in rows:
        row.executed_at = row.message.sent_at if row.message else None
    finish([(row.pk, row.executed_at, "") for row in rows if row.executed_at], "sent")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row in rows)
    ledger.bulk(f"{rule}.sent", keys, before={"status": "processing"}, after={"status": "sent"})


def _record_failed(rows: list[Execution], now: datetime, ledger: Ledger, rule: str) -> None:
    if not rows:
        return
    told = [(row.pk, (row.message and row.message.failed_at) or now, _reason(row.message)) for row in rows]
    finish(told, "failed")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row in rows)
    ledger.bulk(f"{rule}.failed", keys, before={"status": "processing"}, after={"status": "failed"})
    ends: dict[str, set[UUID]] = defaultdict(set)
    for row in rows:
        ends[_end(row.message)].add(row.enrollment_id)
    for status, enrollments in ends.items():
        end_failed(enrollments, status, now, ledger, rule)


def end_failed(enrollments: Collection[UUID], status: str, now: datetime, ledger: Ledger, rule: str) -> None:
    """A failed execution ends its enrollment; rows beside it (written by hand) end with it."""
    ended = end_enrollments(enrollments, status, now)
    ledger.ended(rule, ended, status, because="failed")


def _reason(message: Any) -> str:
    return str(message.error_reason or "")[:255] if message is not None else "message_missing"


def _end(message: Any) -> str:
    if message is None or (message.error_details or {}).get("scope") != "recipient":
        return "failed"
    return ENDS.get(message.error_reason, "failed")


def finish(rows: Iterable[tuple[UUID, datetime, str]], status: str) -> None:
    """Each row with its own time in one statement, which QuerySet.update cannot."""
    ids, times, reasons = zip(*rows, strict=True)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_step_executions x SET status = %s, executed_at = v.at, failure = v.reason"
            " FROM unnest(%s::uuid[], %s::timestamptz[], %s::text[]) v(id, at, reason)"
            " WHERE x.id = v.id AND x.status = 'processing'",
            [status, list(ids), list(times), list(reasons)],
        )


def advance(rows: Sequence[Execution], now: datetime, ledger: Ledger) -> None:
    """The next step of each live enrollment whose execution was sent, or its completion."""
    live = [row for row in rows if row.enrollment.is_live]
    if not live:
        return
    upcoming = _steps({row.enrollment.sequence_id for row in live})
    plans, over = [], []
    for row in live:
        position = row.step.position or 0
        following = next((s for s in upcoming[row.enrollment.sequence_id] if (s.position or 0) > position), None)
        if following is None:
            over.append(row.enrollment_id)
        else:
            plans.append((row.enrollment, following, row.executed_at or now))
    schedule(plans, now)
    if over:
        ledger.ended("advance", end_enrollments(over, "completed", now), "completed", because="no_next_step")


def _steps(sequence_ids: Collection[UUID]) -> dict[UUID, list[Step]]:
    found: dict[UUID, list[Step]] = {pk: [] for pk in sequence_ids}
    for step in Step.objects.standing().filter(sequence__in=list(sequence_ids)):
        found[step.sequence_id].append(step)
    return found


def schedule(plans: list[tuple[Enrollment, Step, datetime]], now: datetime) -> list[Execution]:
    """Create the execution of `step` for each enrollment, counted from a moment, inside the window of its sender."""
    if not plans:
        return []
    known = {
        pk for enrollment, _step, _at in plans for pk in (*_sticky(enrollment).values(), enrollment.sender_id) if pk
    }
    senders = {str(sender.pk): sender for sender in Sender.objects.filter(pk__in=known)}
    pools: Pools | None = None
    created = []
    for enrollment, step, start in plans:
        current = senders.get(str(enrollment.sender_id))
        # A row written by hand names its present sender only: the same one goes on.
        written = str(current.pk) if current and current.channel == step.channel else None
        chosen = _sticky(enrollment).get(step.channel) or written
        if chosen is None:
            pools = pools or Pools({enrollment.sequence_id for enrollment, _step, _at in plans})
            picked = pools.pick(enrollment.sequence_id, step.channel)
            chosen = str(picked) if picked else None
            if chosen and chosen not in senders:
                senders[chosen] = Sender.objects.get(pk=chosen)
        enrollment.current_step, enrollment.sender_id = step, UUID(chosen) if chosen else None
        if chosen:
            enrollment.senders = {**enrollment.senders, step.channel: chosen}
        created.append(new_execution(enrollment, step, start, senders.get(chosen or ""), now))
    Execution.objects.bulk_create(created, ignore_conflicts=True)
    look_again([row for row in created if row.status == "awaiting_enrichment"])
    move_enrollments([enrollment for enrollment, _step, _at in plans])
    return created


def _sticky(enrollment: Enrollment) -> dict[str, str]:
    return {str(channel): str(pk) for channel, pk in (enrollment.senders or {}).items()}


def new_execution(
    enrollment: Enrollment, step: Step, start: datetime, sender: Sender | None, now: datetime
) -> Execution:
    at = start + timedelta(seconds=step.delay_seconds)
    lead = enrollment.lead
    return Execution(
        enrollment=enrollment,
        step=step,
        round=enrollment.round,
        status="awaiting_enrichment" if missing(step, lead) else "pending",
        scheduled_at=opening(sender, lead.time_zone, at) if sender else at,
        created_at=now,
    )


def move_enrollments(rows: list[Enrollment]) -> None:
    """Current step and senders of many, each its own, in one statement."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_enrollments e"
            "   SET current_step_id = v.step, sender_id = v.sender, senders = v.senders::jsonb"
            " FROM unnest(%s::uuid[], %s::uuid[], %s::uuid[], %s::text[]) v(id, step, sender, senders)"
            " WHERE e.id = v.id",
            [
                [row.pk for row in rows],
                [row.current_step_id for row in rows],
                [row.sender_id for row in rows],
                [json.dumps(row.senders) for row in rows],
            ],
        )
