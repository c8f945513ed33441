"""The batch rules. Each works on sequences that are locked already, set-based, and writes what it decided."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, Window
from django.db.models.functions import RowNumber

from campaigns.models import EFFECTIVE_DUE, Enrollment, Execution, Sequence
from campaigns.services.completion import (
    Verdict,
    complete_finished,
    evaluate_completion,
    reopen_contradictory,
    settle,
    skip_stale_of,
)
from campaigns.services.enrolling import locked_sequence
from campaigns.services.following import adopt, move_enrollments
from campaigns.services.pools import Pools
from campaigns.services.rows import Ledger, end_enrollments, grouped, lock_sequences, skip_and_stop, skip_executions
from config.decisions import decide
from config.sweeping import nudge

Ids = Collection[UUID]
Act = Callable[[Ids, datetime, Ledger], Counter[str]]
STRANDED_PER_TICK = 500


def heal_signal(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    """Layer 2: the column as the predicate says it should be."""
    wrong = list(Sequence.objects.filter(pk__in=list(ids)).drifted())
    for value in (True, False):
        keys = [row.pk for row in wrong if row.work is value]  # type: ignore[attr-defined]
        Sequence.objects.filter(pk__in=keys).update(has_pending_work=value, pending_work_changed_at=now)
    for row in wrong:
        before, after = {"has_pending_work": row.has_pending_work}, {"has_pending_work": not row.has_pending_work}
        inputs = {"pending_work": row.work}  # type: ignore[attr-defined]
        ledger.add(
            decide("drift.has_pending_work", row, before=before, after=after, inputs=inputs, run_id=ledger.run_id)
        )
    return Counter(drift=len(wrong))


def recover_stuck(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    rows = list(Execution.objects.stuck(now).of(ids).values_list("pk", "enrollment__sequence_id", "message_id"))
    done = adopt([pk for pk, _sequence, message in rows if message], now, ledger, "stuck")
    without = Execution.objects.filter(pk__in=[pk for pk, _s, message in rows if not message], status="processing")
    # Its claim is undone with it: nobody was written to, so it does not count against the sender's allowance.
    back = list(without.select_for_update(skip_locked=True, of=("self",)).values_list("pk", flat=True))
    Execution.objects.filter(pk__in=back).update(status="pending", processing_started_at=None, sender=None)
    taken = set(back)
    keys = grouped((sequence, pk) for pk, sequence, _message in rows if pk in taken)
    ledger.bulk("stuck.pending", keys, before={"status": "processing"}, after={"status": "pending"})
    if back:
        nudge("campaigns.send_due_steps")
    return Counter({f"stuck_{name}": count for name, count in done.items()}) + Counter(stuck_pending=len(back))


def skip_orphans(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    skipped = skip_executions(Execution.objects.orphaned().of(ids), "orphaned", wait=False)
    ledger.skipped("orphans", skipped, "orphaned")
    return Counter(orphaned=len(skipped))


def end_idle(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    """A live enrollment that waits for nothing ends as its last execution did."""
    rows = Enrollment.objects.idle().filter(sequence__in=list(ids))
    last = Execution.objects.filter(enrollment=OuterRef("pk"), round=OuterRef("round"))
    found = list(
        rows.annotate(sent=Exists(last.filter(status="sent")), failed=Exists(last.filter(status="failed"))).annotate(
            skipped=Exists(last.filter(status="skipped"))
        )
    )
    done: Counter[str] = Counter()
    ends: dict[str, list[UUID]] = {"failed": [], "completed": [], "stopped": []}
    for row in found:
        over = "failed" if row.failed else "completed" if row.sent and not row.skipped else "stopped"  # type: ignore[attr-defined]
        ends[over].append(row.pk)
    for status, keys in ends.items():
        if keys:
            ended = end_enrollments(keys, status, now, wait=False)
            ledger.ended("idle", ended, status, because="nothing_left")
            done["idle"] += len(ended)
    return done


def resolve_stranded(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    """The table of the specification, 500 rows per sequence and tick, oldest due first."""
    place = Window(
        RowNumber(), partition_by=[F("enrollment__sequence_id")], order_by=[EFFECTIVE_DUE.asc(), F("pk").asc()]
    )
    rows = Execution.objects.stranded(now).of(ids).actionable(now).annotate(place=place)
    first = rows.filter(place__lte=STRANDED_PER_TICK).values_list("pk", "unmanned", "late")
    told = {pk: (unmanned, late) for pk, unmanned, late in first}
    locked = list(
        Execution.objects.filter(pk__in=told, status__in=("pending", "deferred"))
        .select_related("step", "enrollment")
        .order_by("pk")
        .select_for_update(of=("self", "enrollment"), no_key=True, skip_locked=True)
    )
    unmanned = [row for row in locked if told[row.pk][0]]
    reassigned = _reassign(unmanned, ledger)
    manned = [row for row in locked if not told[row.pk][0] or row.pk in reassigned]
    gone = [row.pk for row in unmanned if row.pk not in reassigned]
    late = [row.pk for row in manned if told[row.pk][1]]
    back = [row for row in manned if row.status == "deferred" and not told[row.pk][1]]
    done = Counter(reassigned=len(reassigned), requeued=len(back))
    for reason, keys in (("stranded_no_sender", gone), ("stale", late)):
        rows = Execution.objects.queued().filter(pk__in=keys)
        done[reason] = skip_and_stop(rows, reason, now, ledger, "stranded", wait=False)
    _requeue(back, ledger)
    if back or reassigned:
        nudge("campaigns.send_due_steps")
    return done


def _reassign(rows: list[Execution], ledger: Ledger) -> set[UUID]:
    """Enrollments whose sender is out of service go to the least loaded healthy one of the pool."""
    if not rows:
        return set()
    pools = Pools({row.enrollment.sequence_id for row in rows})
    moved: dict[UUID, Enrollment] = {}
    hands: dict[tuple[UUID | None, UUID], list[tuple[UUID, UUID]]] = defaultdict(list)
    done: set[UUID] = set()
    for row in rows:
        enrollment = moved.get(row.enrollment_id) or row.enrollment
        picked = pools.pick(enrollment.sequence_id, row.step.channel)
        if picked is None:
            continue
        hands[enrollment.sender_id, picked].append((enrollment.sequence_id, enrollment.pk))
        enrollment.sender_id = picked
        enrollment.senders = {**enrollment.senders, row.step.channel: str(picked)}
        moved[enrollment.pk] = enrollment
        done.add(row.pk)
    if moved:
        move_enrollments(list(moved.values()))
    for (gone, picked), pairs in hands.items():
        before, after = {"sender_id": str(gone) if gone else None}, {"sender_id": str(picked)}
        ledger.bulk("stranded.reassigned", grouped(pairs), before=before, after=after, of="enrollments")
    return done


def _requeue(rows: list[Execution], ledger: Ledger) -> None:
    """deferred_until stays: it is the effective due time, and a throttled row must not look older than it is."""
    Execution.objects.filter(pk__in=[row.pk for row in rows]).update(status="pending")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row in rows)
    ledger.bulk("stranded.requeued", keys, before={"status": "deferred"}, after={"status": "pending"})


def reverse(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    found = reopen_contradictory(ids, now, ledger)
    if found["reopened"]:
        nudge("campaigns.send_due_steps")
    return found


def forward(ids: Ids, now: datetime, ledger: Ledger) -> Counter[str]:
    return Counter(completed=len(complete_finished(ids, now, ledger)))


@dataclass(frozen=True)
class Rule:
    """`candidates(now)` are the sequences the rule has something to do for; with none it costs one query."""

    name: str
    candidates: Callable[[datetime], Any]
    act: Act
    # Sequences in one transaction; fewer where each may have many rows to change.
    page: int = 500


def _reconcilable(**where: Any) -> Any:
    return Sequence.objects.filter(status__in=Sequence.RECONCILABLE, **where)


def _with_executions(rows: Any) -> Any:
    return _reconcilable(pk__in=rows.order_by().values("enrollment__sequence_id"))


# The order is the specification's: first what the later rules read, completion last.
RULES = [
    Rule("drift", lambda now: Sequence.objects.drifted(), heal_signal),
    Rule("stuck", lambda now: _with_executions(Execution.objects.stuck(now)), recover_stuck, 50),
    Rule("orphans", lambda now: _with_executions(Execution.objects.orphaned()), skip_orphans, 50),
    Rule(
        "stranded", lambda now: _with_executions(Execution.objects.stranded(now).actionable(now)), resolve_stranded, 20
    ),
    Rule(
        "idle",
        lambda now: _reconcilable(pk__in=Enrollment.objects.idle().order_by().values("sequence_id")),
        end_idle,
        50,
    ),
    Rule("reverse", lambda now: Sequence.objects.contradictory(), reverse, 50),
    Rule("forward", lambda now: Sequence.objects.completable(now), forward),
]


def apply_rule(rule: Rule, ids: Ids, now: datetime, run_id: UUID | None = None, *, wait: bool = False) -> Counter[str]:
    """One page of a batch: whoever is at a sequence is left alone; the next tick finds it again."""
    with transaction.atomic():
        locked = [row.pk for row in lock_sequences(ids, skip_locked=not wait)]
        ledger = Ledger(now, run_id)
        done = rule.act(locked, now, ledger)
        ledger.write()
    return +done


@dataclass(frozen=True)
class Reconciled:
    verdict: Verdict
    changes: dict[str, int]
    sequence_id: UUID


@transaction.atomic
def reconcile_sequence(sequence_id: UUID, now: datetime, run_id: UUID | None = None) -> Reconciled:
    """All batch rules on one sequence, and what came of it."""
    before = locked_sequence(sequence_id)
    if before.status not in Sequence.RECONCILABLE:
        return Reconciled(Verdict("hold", "intent_only", None, {"status": before.status}), {}, sequence_id)
    ledger, changes = Ledger(now, run_id), Counter[str]()
    for rule in RULES:
        changes.update(rule.act([sequence_id], now, ledger))
    ledger.write()
    after = Sequence.objects.get(pk=sequence_id).status
    return Reconciled(_verdict(before.status, after, sequence_id, now), dict(+changes), sequence_id)


def _verdict(before: str, after: str, sequence_id: UUID, now: datetime) -> Verdict:
    judged = evaluate_completion(sequence_id, now)
    if after == "paused":
        return Verdict("hold", "paused", None, judged.evidence)
    if before == after == "completed":
        return Verdict("unchanged", evidence=judged.evidence)
    if before != after:
        return Verdict("completed" if after == "completed" else "reopened", evidence=judged.evidence)
    return judged


def skip_stale(ids: Ids, now: datetime, run_id: UUID | None = None) -> Counter[str]:
    """By hand: every stale execution of these sequences, not only what the batch comes across."""
    with transaction.atomic():
        locked = [row.pk for row in lock_sequences(ids)]
        ledger = Ledger(now, run_id)
        rows = Execution.objects.of(locked).filter(enrollment__sequence__status__in=Sequence.RECONCILABLE)
        done = Counter(stale=skip_stale_of(rows, now, ledger, "skip_stale"))
        settle(locked, now, ledger)
    return +done


def stale_sequences(now: datetime) -> Any:
    live = Q(enrollment__status__in=("active", "paused"))
    return _with_executions(Execution.objects.stale(now).filter(live))


def skippable(ids: Ids, now: datetime) -> Any:
    """What `skip_stale` would skip, for whoever wants to know before."""
    found = Execution.objects.of(ids).filter(enrollment__sequence__status__in=Sequence.RECONCILABLE)
    return found.stale(now).filter(enrollment__status__in=("active", "paused"))


def rule(name: str) -> Rule:
    return next(found for found in RULES if found.name == name)


def handler(rule: Rule, now: datetime, run_id: UUID) -> Callable[[list[UUID]], Counter[str]]:
    return partial(apply_rule, rule, now=now, run_id=run_id)
