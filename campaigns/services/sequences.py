"""Sequences and their steps: the user's intent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F, Max
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution, Sender, SequenceSender, Step
from campaigns.models import Sequence as SequenceRow
from campaigns.services.completion import settle, skip_stale_of
from campaigns.services.drafts import Drafts
from campaigns.services.enrolling import locked_sequence
from campaigns.services.following import schedule
from campaigns.services.pools import Pools
from campaigns.services.rows import Ledger, end_enrollments, skip_executions
from campaigns.services.texts import check_template
from config.errors import Conflict, Invalid, Missing
from config.sweeping import nudge
from locks.services import check_write
from messaging.models import Application
from messaging.services import Outcome, enqueue_messages

BRANCH = "main"
SEND = "campaigns.send_due_steps"


@dataclass(frozen=True)
class Pass:
    """What the caller shows at the write gate."""

    actor: Any = None
    lock_id: Any = None
    fence: int | None = None


def ask_gate(sequence_id: UUID, shown: Pass, *, always: bool = False) -> None:
    """A sequence that people may be receiving is edited by the lock's holder only. Drafts are nobody's concern.

    Only the question: the write asks again under its own locks.
    """
    with transaction.atomic():
        if always or SequenceRow.objects.filter(pk=sequence_id).exclude(status="draft").exists():
            _gate(sequence_id, shown)


def _gate(sequence_id: UUID, shown: Pass) -> None:
    check_write(BRANCH, "sequence", str(sequence_id), lock_id=shown.lock_id, fence=shown.fence, actor=shown.actor)


@transaction.atomic
def create_sequence(
    application: Application,
    fields: Mapping[str, Any],
    *,
    sender_ids: Sequence[UUID] = (),
    steps: Sequence[Mapping[str, Any]] = (),
) -> SequenceRow:
    row = SequenceRow.objects.create(application=application, **fields)
    set_pool(row, sender_ids)
    for index, step in enumerate(steps):
        _check_step(step, f"steps.{index}.")
    ordered = sorted(enumerate(steps), key=lambda pair: (pair[1].get("position") or pair[0] + 1, pair[0]))
    Step.objects.bulk_create(
        Step(sequence=row, **{**step, "position": place}) for place, (_index, step) in enumerate(ordered, 1)
    )
    return row


def set_pool(row: SequenceRow, sender_ids: Sequence[UUID]) -> None:
    wanted = list(dict.fromkeys(sender_ids))
    known = set(
        Sender.objects.filter(pk__in=wanted, application=row.application_id, deleted_at=None).values_list(
            "pk", flat=True
        )
    )
    if unknown := [str(pk) for pk in wanted if pk not in known]:
        detail = _("There is no such sender: %(ids)s") % {"ids": ", ".join(unknown[:5])}
        raise Invalid(detail, code="does_not_exist", attr="sender_ids")
    SequenceSender.objects.filter(sequence=row).exclude(sender__in=wanted).delete()
    SequenceSender.objects.bulk_create(
        [SequenceSender(sequence=row, sender_id=pk, position=place) for place, pk in enumerate(wanted, 1)],
        update_conflicts=True,
        unique_fields=["sequence", "sender"],
        update_fields=["position"],
    )


def change_sequence(
    sequence_id: UUID, changes: Mapping[str, Any], shown: Pass, *, sender_ids: Sequence[UUID] | None = None
) -> SequenceRow:
    with transaction.atomic():
        row = _gated(sequence_id, shown)
        for name, value in changes.items():
            setattr(row, name, value)
        row.save(update_fields=list(changes)) if changes else None
        if sender_ids is not None:
            set_pool(row, sender_ids)
        return row


def _gated(sequence_id: UUID, shown: Pass, *, always: bool = False) -> SequenceRow:
    """The gate before the row: it is the first lock of every writer that passes it."""
    status = SequenceRow.objects.filter(pk=sequence_id).values_list("status", flat=True).first()
    if always or status not in (None, "draft"):
        _gate(sequence_id, shown)
    row = locked_sequence(sequence_id)
    if row.status != "draft" and status == "draft" and not always:
        _gate(sequence_id, shown)
    return row


def delete_sequence(sequence_id: UUID, shown: Pass) -> None:
    """Only what has no history; the rest is archived."""
    with transaction.atomic():
        row = _gated(sequence_id, shown)
        if row.status in ("active", "paused"):
            raise Conflict(
                _("A running sequence cannot be deleted: complete or archive it."), code="illegal_transition"
            )
        if Enrollment.objects.filter(sequence=row).exists():
            raise Conflict(_("The sequence has enrollments: archive it instead."), code="has_enrollments")
        row.delete()


@transaction.atomic
def clone_sequence(sequence_id: UUID, name: str | None = None) -> SequenceRow:
    row = locked_sequence(sequence_id)
    pool = list(row.pool.filter(sender__deleted_at=None).order_by("position").values_list("sender_id", flat=True))
    kept = ("position", "channel", "delay_seconds", "subject", "body", "stale_policy")
    steps = list(Step.objects.standing().filter(sequence=row).values(*kept))
    fields = {
        "name": name or (_("%(name)s (copy)") % {"name": row.name})[:200],
        "kind": row.kind,
        "harvest_days": row.harvest_days,
        "stale_after_multiplier": row.stale_after_multiplier,
    }
    return create_sequence(row.application, fields, sender_ids=pool, steps=steps)


def generate_sequence(sequence_id: UUID) -> SequenceRow:
    return _move(sequence_id, "generate")


def cancel_generating(sequence_id: UUID) -> SequenceRow:
    return _move(sequence_id, "cancel_generating")


def mark_sequence_ready(sequence_id: UUID) -> SequenceRow:
    return _move(sequence_id, "mark_ready")


@transaction.atomic
def _move(sequence_id: UUID, verb: str) -> SequenceRow:
    row = locked_sequence(sequence_id)
    getattr(row, verb)()
    row.save(update_fields=["status"])
    return row


def activate_sequence(sequence_id: UUID, shown: Pass, now: datetime) -> SequenceRow:
    """Needs steps, and for each of their channels a sender. The time before does not count as lateness."""
    with transaction.atomic():
        row = _gated(sequence_id, shown, always=True)
        row.activate(now)
        _check_complete(row)
        row.save(update_fields=["status", "activated_at"])
        waiting_now = Execution.objects.of([row.pk]).filter(status__in=("pending", "deferred"))
        waiting_now.filter(deferred_until=None, scheduled_at__lt=now).update(scheduled_at=now)
        waiting_now.filter(deferred_until__lt=now).update(deferred_until=now)
        nudge(SEND)
        return row


def _check_complete(row: SequenceRow) -> None:
    channels = set(Step.objects.standing().filter(sequence=row).values_list("channel", flat=True))
    if not channels:
        raise Conflict(_("The sequence has no steps."), code="no_steps")
    pools = Pools([row.pk])
    if without := sorted(channel for channel in channels if not pools.has(row.pk, channel)):
        detail = _("No healthy sender for: %(channels)s") % {"channels": ", ".join(without)}
        raise Conflict(detail, code="no_sender", extra={"channels": without})


def reactivate_sequence(sequence_id: UUID, shown: Pass, now: datetime) -> SequenceRow:
    with transaction.atomic():
        row = _gated(sequence_id, shown, always=True)
        row.reactivate(now)
        row.save(update_fields=["status", "activated_at"])
        _drop_stale(row, now, "reactivate")
        return row


@transaction.atomic
def pause_sequence(sequence_id: UUID) -> SequenceRow:
    row = locked_sequence(sequence_id)
    row.pause()
    row.save(update_fields=["status"])
    return row


@transaction.atomic
def resume_sequence(sequence_id: UUID, now: datetime) -> SequenceRow:
    row = locked_sequence(sequence_id)
    row.resume()
    row.save(update_fields=["status"])
    _drop_stale(row, now, "resume")
    return SequenceRow.objects.get(pk=row.pk)


def _drop_stale(row: SequenceRow, now: datetime, rule: str) -> None:
    """Whoever's step became stale is out; when that was everybody, the sequence is done."""
    ledger = Ledger(now)
    if skip_stale_of(Execution.objects.of([row.pk]), now, ledger, rule):
        settle([row.pk], now, ledger)
    nudge(SEND)


@transaction.atomic
def complete_sequence(sequence_id: UUID, now: datetime) -> SequenceRow:
    """By force: everything that waits is skipped, everybody's enrollment ends."""
    row = locked_sequence(sequence_id)
    row.complete(now)
    row.save(update_fields=["status", "completed_at"])
    _end_everything(row, "force_completed", now)
    return row


@transaction.atomic
def archive_sequence(sequence_id: UUID, now: datetime) -> SequenceRow:
    row = locked_sequence(sequence_id)
    row.archive()
    row.save(update_fields=["status"])
    _end_everything(row, "archived", now)
    return row


def _end_everything(row: SequenceRow, reason: str, now: datetime) -> None:
    ledger = Ledger(now)
    rows = Execution.objects.of([row.pk]).filter(status__in=("pending", "deferred", "awaiting_enrichment"))
    ledger.skipped("ended", skip_executions(rows, reason), reason)
    live = Enrollment.objects.live().filter(sequence=row).values_list("pk", flat=True)
    ledger.ended("ended", end_enrollments(list(live), "stopped", now), "stopped", because=reason)
    ledger.write()


def _check_step(fields: Mapping[str, Any], at: str = "") -> None:
    for name in ("subject", "body"):
        check_template(str(fields.get(name, "")), f"{at}{name}")


def add_step(sequence_id: UUID, fields: Mapping[str, Any], shown: Pass) -> Step:
    """At its position, the later ones move back; without one at the end."""
    with transaction.atomic():
        row = _gated(sequence_id, shown)
        _refuse_ended(row)
        _check_step(fields)
        last = row.steps.aggregate(last=Max("position"))["last"] or 0
        place = min(fields.get("position") or last + 1, last + 1)
        row.steps.filter(position__gte=place).update(position=F("position") + 1)
        return Step.objects.create(sequence=row, **{**fields, "position": place})


def _standing_step(row: SequenceRow, step_id: UUID) -> Step:
    step = Step.objects.standing().filter(sequence=row, pk=step_id).first()
    if step is None:
        raise Missing(_("There is no such step."))
    return step


def _refuse_ended(row: SequenceRow) -> None:
    if row.status == "archived":
        raise Conflict(_("An archived sequence cannot be changed."), code="illegal_transition")


def change_step(sequence_id: UUID, step_id: UUID, changes: Mapping[str, Any], shown: Pass) -> Step:
    with transaction.atomic():
        row = _gated(sequence_id, shown)
        _refuse_ended(row)
        step = _standing_step(row, step_id)
        changed = {**changes}
        if changed.get("channel", step.channel) != step.channel:
            _refuse_waiting(row, step)
        place = changed.pop("position", None)
        for name, value in changed.items():
            setattr(step, name, value)
        _check_step({"subject": step.subject, "body": step.body})
        step.save(update_fields=list(changed)) if changed else None
        if place is not None and place != step.position:
            _refuse_waiting(row, step)
            _place(row, step, place)
        return step


def _place(row: SequenceRow, step: Step, place: int) -> None:
    others = list(Step.objects.standing().filter(sequence=row).exclude(pk=step.pk))
    others.insert(max(0, min(place, len(others) + 1) - 1), step)
    for position, one in enumerate(others, 1):
        one.position = position
    Step.objects.bulk_update(others, ["position"])


def _refuse_waiting(row: SequenceRow, step: Step) -> None:
    """Nobody's next message may vanish or change its place while the sequence runs."""
    stands = Execution.objects.filter(step=step, status__in=Execution.WAITING)
    count = stands.count()
    if row.status == "active" and count:
        detail = _("%(count)s executions of this step are waiting.") % {"count": count}
        ids = [str(pk) for pk in stands.order_by("pk").values_list("pk", flat=True)[:5]]
        raise Conflict(detail, code="step_has_waiting_executions", extra={"waiting": count, "samples": ids})


def remove_step(sequence_id: UUID, step_id: UUID, shown: Pass, now: datetime) -> None:
    """Whoever waited for it goes on to the next one. A step with a history keeps its row."""
    with transaction.atomic():
        row = _gated(sequence_id, shown)
        _refuse_ended(row)
        step = _standing_step(row, step_id)
        _refuse_waiting(row, step)
        if Execution.objects.filter(step=step, status="processing").exists():
            raise Conflict(_("The step is being sent."), code="step_has_waiting_executions")
        _skip_removed(row, step, now)
        position = step.position
        if Execution.objects.filter(step=step).exists():
            Step.objects.filter(pk=step.pk).update(position=None)
        else:
            step.delete()
        if position is not None:
            row.steps.filter(position__gt=position).update(position=F("position") - 1)


def _skip_removed(row: SequenceRow, step: Step, now: datetime) -> None:
    states = ("pending", "deferred", "awaiting_enrichment")
    waiting_rows = Execution.objects.filter(step=step, status__in=states)
    skipped = skip_executions(waiting_rows, "step_removed")
    if not skipped:
        return
    ledger = Ledger(now)
    ledger.skipped("remove_step", skipped, "step_removed")
    following = Step.objects.standing().filter(sequence=row, position__gt=step.position or 0).first()
    live = Enrollment.objects.live().filter(pk__in={one.enrollment_id for one in skipped})
    if following is None:
        keys = list(live.values_list("pk", flat=True))
        ledger.ended("remove_step", end_enrollments(keys, "completed", now), "completed", because="no_next_step")
    else:
        schedule([(enrollment, following, now) for enrollment in live.select_related("lead")], now)
    settle([row.pk], now, ledger)


def send_test(sequence_id: UUID, lead: Any, step_id: UUID | None, now: datetime) -> Outcome:
    """One step to one lead now, outside of enrollments, allowances and counters."""
    row = SequenceRow.objects.get(pk=sequence_id)
    steps = Step.objects.standing().filter(sequence=row)
    step = steps.filter(pk=step_id).first() if step_id else steps.first()
    if step is None:
        if step_id:
            raise Invalid(_("There is no such step."), code="does_not_exist", attr="step_id")
        raise Conflict(_("The sequence has no steps."), code="no_steps")
    sender_id = Pools({row.pk}).pick(row.pk, step.channel)
    trial = Execution(step=step, enrollment=Enrollment(sequence=row, lead=lead, sender_id=sender_id), scheduled_at=now)
    with transaction.atomic():
        drafts = Drafts([trial], now)
        if drafts.incomplete:
            raise Conflict(_("The lead lacks an address or a variable of this step."), code="incomplete_lead")
        draft = drafts.as_test(trial, now)
        (outcome,) = enqueue_messages([draft], now=now)
    if outcome.refused:
        raise Conflict(outcome.detail, code=str(outcome.code))
    return outcome
