"""Leads come into a sequence: once, and again only when they failed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution, Lead, Sender, Step
from campaigns.models import Sequence as SequenceRow
from campaigns.services.completion import reopen
from campaigns.services.following import new_execution, schedule
from campaigns.services.leads import look_again, subscribe_missing
from campaigns.services.pools import Pools
from campaigns.services.rows import Ledger, lock_sequences
from config.errors import Conflict, Missing
from config.sweeping import nudge
from messaging.models import Message, Subscription
from messaging.services.content import address_problem

SEND = "campaigns.send_due_steps"


@dataclass(frozen=True)
class Enrolled:
    lead_id: UUID
    status: str  # enrolled | already_enrolled | not_found | suppressed
    enrollment_id: UUID | None = None


def locked_sequence(sequence_id: UUID) -> SequenceRow:
    for row in lock_sequences([sequence_id]):
        return row
    raise Missing(_("There is no such sequence."))


def standing_steps(sequence: SequenceRow) -> list[Step]:
    steps = list(Step.objects.standing().filter(sequence=sequence))
    if not steps:
        raise Conflict(_("The sequence has no steps."), code="no_steps")
    return steps


def check_enrollable(sequence: SequenceRow) -> None:
    if sequence.status not in SequenceRow.ENROLLABLE:
        detail = _("Nobody can be enrolled while the sequence is %(status)s.") % {"status": sequence.status}
        raise Conflict(detail, code="illegal_transition")


@transaction.atomic
def enroll_leads(sequence_id: UUID, lead_ids: Sequence[UUID], now: datetime) -> list[Enrolled]:
    """One result per id, in order. A fixed number of statements, however many leads."""
    sequence = locked_sequence(sequence_id)
    check_enrollable(sequence)
    steps = standing_steps(sequence)
    leads = {lead.pk: lead for lead in Lead.objects.filter(pk__in=lead_ids, application=sequence.application_id)}
    subscribe_missing(list(leads.values()), now)
    there = dict(Enrollment.objects.filter(sequence=sequence, lead__in=leads).values_list("lead_id", "pk"))
    unreachable = suppressed_leads(leads.values(), steps[0].channel)
    fresh = [pk for pk in dict.fromkeys(lead_ids) if pk in leads and pk not in there and pk not in unreachable]
    new = _insert(sequence, steps, [leads[pk] for pk in fresh], now)
    reopen([sequence.pk], now)
    nudge(SEND)
    results, seen = [], set()
    for pk in lead_ids:
        if pk in new and pk not in seen:
            seen.add(pk)
            results.append(Enrolled(pk, "enrolled", new[pk]))
        elif pk in there or pk in new:
            results.append(Enrolled(pk, "already_enrolled", there.get(pk) or new[pk]))
        else:
            results.append(Enrolled(pk, "suppressed" if pk in leads else "not_found"))
    return results


def _insert(sequence: SequenceRow, steps: list[Step], leads: list[Lead], now: datetime) -> dict[UUID, UUID]:
    if not leads:
        return {}
    pools = Pools([sequence.pk])
    channels = list(dict.fromkeys(step.channel for step in steps))
    senders = {row.pk: row for row in Sender.objects.filter(pools__sequence=sequence)}
    enrollments, executions = [], []
    for lead in leads:
        chosen = {channel: pools.pick(sequence.pk, channel) for channel in channels}
        enrollment = Enrollment(
            sequence=sequence,
            lead=lead,
            sender_id=chosen[steps[0].channel],
            senders={channel: str(pk) for channel, pk in chosen.items() if pk},
            current_step=steps[0],
        )
        enrollments.append(enrollment)
        first = chosen[steps[0].channel]
        executions.append(new_execution(enrollment, steps[0], now, senders.get(first) if first else None, now))
    Enrollment.objects.bulk_create(enrollments)
    Execution.objects.bulk_create(executions)
    look_again([row for row in executions if row.status == "awaiting_enrichment"])
    return {row.lead_id: row.pk for row in enrollments}


def suppressed_leads(leads: Collection[Lead], channel: str) -> set[UUID]:
    """Those whose address of this channel must not be written to."""
    of = {lead.subscription_id(channel): lead.pk for lead in leads if lead.subscription_id(channel)}
    barred = Subscription.objects.filter(pk__in=of).filter(
        Q(status__lte=0) | Q(Exists(Subscription.objects.suppressed().filter(pk=OuterRef("pk"))))
    )
    shared = set(barred.values_list("pk", flat=True))
    return {lead.pk for lead in leads if lead.subscription_id(channel) in shared}


@transaction.atomic
def reenroll_failed(sequence_id: UUID, now: datetime) -> dict[str, list[dict[str, Any]]]:
    """A new round for each failed enrollment whose lead can be reached; the others with the reason."""
    sequence = locked_sequence(sequence_id)
    check_enrollable(sequence)
    steps = standing_steps(sequence)
    rows = list(
        Enrollment.objects.filter(sequence=sequence, status="failed")
        .select_related("lead")
        .order_by("pk")
        .select_for_update(of=("self",), no_key=True)
    )
    subscribe_missing([row.lead for row in rows], now)
    reasons = _refusals(rows, steps)
    taken = [row for row in rows if row.pk not in reasons]
    unsent = {row.pk: step for row, step in _first_unsent(taken, steps)}
    for row in taken:
        row.round += 1
        row.sequence = sequence
    if taken:
        Enrollment.objects.bulk_update(taken, ["round"])
        Enrollment.objects.filter(pk__in=[row.pk for row in taken]).update(status="active", ended_at=None)
        schedule(_again(taken, unsent, now), now)
        ledger = Ledger(now)
        keys = {sequence.pk: [row.pk for row in taken]}
        before, after = {"status": "failed"}, {"status": "active"}
        ledger.bulk("reenroll_failed", keys, before=before, after=after, of="enrollments")
        reopen([sequence.pk], now, ledger)
        nudge(SEND)

    def told(row: Enrollment) -> dict[str, Any]:
        return {"enrollment_id": row.pk, "lead_id": row.lead_id}

    refused = [{**told(row), "reason": reasons[row.pk]} for row in rows if row.pk in reasons]
    return {"taken": [told(row) for row in taken], "refused": refused}


def _again(rows: list[Enrollment], unsent: dict[UUID, Step], now: datetime) -> list[tuple[Enrollment, Step, datetime]]:
    """A step that was tried had waited out its delay: it is due at once. One that never was waits as any next step."""
    failed = Execution.objects.filter(enrollment__in=[row.pk for row in rows], status="failed")
    tried = set(failed.values_list("enrollment_id", "step_id"))
    plans = []
    for row in rows:
        step = unsent[row.pk]
        waited = timedelta(seconds=step.delay_seconds) if (row.pk, step.pk) in tried else timedelta()
        plans.append((row, step, now - waited))
    return plans


def _refusals(rows: list[Enrollment], steps: list[Step]) -> dict[UUID, str]:
    reasons: dict[UUID, str] = {}
    pending = dict(_first_unsent(rows, steps))
    bounced = set(
        Execution.objects.filter(enrollment__in=[row.pk for row in rows], status="failed")
        .filter(Exists(Message.objects.filter(pk=OuterRef("message_id"), error_reason="hard_bounce")))
        .values_list("enrollment_id", flat=True)
    )
    suppressed: dict[str, set[UUID]] = {}
    for row in rows:
        step = pending.get(row)
        if step is None:
            reasons[row.pk] = "nothing_left"
            continue
        if step.channel not in suppressed:
            suppressed[step.channel] = suppressed_leads([one.lead for one in rows], step.channel)
        address = row.lead.address(step.channel)
        if not address or address_problem(step.channel, address):
            reasons[row.pk] = "invalid_address"
        elif row.pk in bounced:
            reasons[row.pk] = "bounced"
        elif row.lead_id in suppressed[step.channel]:
            reasons[row.pk] = "suppressed"
    return reasons


def _first_unsent(rows: list[Enrollment], steps: list[Step]) -> list[tuple[Enrollment, Step]]:
    sent = set(
        Execution.objects.filter(enrollment__in=[row.pk for row in rows], status="sent").values_list(
            "enrollment_id", "step_id"
        )
    )
    found = ((row, next((step for step in steps if (row.pk, step.pk) not in sent), None)) for row in rows)
    return [(row, step) for row, step in found if step is not None]
