"""When a sequence is finished, and when it is not: the four guards, completion and reopening."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from campaigns.models import Execution, Sequence
from campaigns.models.sequences import JUST_ACTIVATED
from campaigns.services.rows import Ledger, skip_and_stop
from campaigns.triggers import LIVE
from config.decisions import decide


@dataclass(frozen=True)
class Verdict:
    """`guard` is the one that holds; without one the sequence is (to be) completed."""

    verdict: str  # completed | reopened | hold | unchanged
    guard: str | None = None
    until: datetime | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


def judge(sequence: Any, now: datetime) -> Verdict:
    """Over a row of `with_guards(now)`. The order of the guards is the rule: the first that holds decides."""
    if sequence.work:
        return Verdict("hold", "pending_work", None, {"pending_work": True})
    if sequence.harvest_until is not None and now < sequence.harvest_until:
        evidence = {"last_reply_at": sequence.last_reply_at.isoformat(), "harvest_days": sequence.harvest_days}
        return Verdict("hold", "reply_harvest", sequence.harvest_until, evidence)
    if sequence.untouched and now < sequence.activated_at + JUST_ACTIVATED:
        until = sequence.activated_at + JUST_ACTIVATED
        return Verdict("hold", "just_activated", until, {"activated_at": sequence.activated_at.isoformat()})
    last = sequence.last_reply_at.isoformat() if sequence.last_reply_at else None
    return Verdict("completed", evidence={"pending_work": False, "last_reply_at": last, **sequence.counters})


def evaluate_completion(sequence_id: UUID, now: datetime) -> Verdict:
    return judge(Sequence.objects.with_guards(now).get(pk=sequence_id), now)


def complete_finished(ids: Collection[UUID], now: datetime, ledger: Ledger) -> set[UUID]:
    """Complete those of the (locked) sequences that no guard holds: by compare-and-set on their status."""
    rows = list(Sequence.objects.filter(pk__in=list(ids)).completable(now).order_by("pk"))
    if not rows:
        return set()
    keys = [row.pk for row in rows]
    Sequence.objects.filter(pk__in=keys, status="active").update(status="completed", completed_at=now)
    for row in rows:
        before, after = {"status": "active"}, {"status": "completed"}
        inputs = judge(row, now).evidence
        ledger.add(decide("forward.completed", row, before=before, after=after, inputs=inputs, run_id=ledger.run_id))
    return set(keys)


def reopen_contradictory(ids: Collection[UUID], now: datetime, ledger: Ledger) -> Counter[str]:
    """Completed sequences (locked) with work: what is stale is skipped first; only fresh work reopens them."""
    candidates = list(Sequence.objects.filter(pk__in=list(ids)).contradictory().values_list("pk", flat=True))
    if not candidates:
        return Counter()
    stale = skip_stale_of(Execution.objects.of(candidates), now, ledger, "reverse")
    left = list(Sequence.objects.filter(pk__in=candidates).contradictory().with_fresh_work(now).order_by("pk"))
    # Stale work that another transaction holds at this moment is still there; it is no reason to reopen.
    fresh = [(row.pk, row.waiting_count) for row in left if row.fresh]
    keys = {pk for pk, _waiting in fresh}
    Sequence.objects.filter(pk__in=keys, status="completed").update(status="active")
    for pk, count in fresh:
        before, after, inputs = {"status": "completed"}, {"status": "active"}, {"pending_work": True, "waiting": count}
        row = Sequence(pk=pk)
        ledger.add(decide("reverse.reopened", row, before=before, after=after, inputs=inputs, run_id=ledger.run_id))
    return Counter(stale=stale, reopened=len(keys), cleared=len(candidates) - len(left))


def skip_stale_of(rows: Any, now: datetime, ledger: Ledger, rule: str) -> int:
    """Skip the stale ones among `rows` and end their enrollments.

    What another transaction holds waits for the next tick: nobody sends what is stale.
    """
    found = rows.stale(now).filter(enrollment__status__in=LIVE)
    return skip_and_stop(found, "stale", now, ledger, rule, wait=False)


def reopen(ids: Collection[UUID], now: datetime, ledger: Ledger | None = None) -> None:
    """New work came: it reopens what was completed. Nothing has ended, so nothing is completed by it."""
    own = ledger or Ledger(now)
    reopen_contradictory(ids, now, own)
    own.write()


def settle(ids: Collection[UUID], now: datetime, ledger: Ledger | None = None) -> None:
    """The evaluation that belongs to an event, in its transaction: new work reopens, the last work done completes."""
    own = ledger or Ledger(now)
    reopen_contradictory(ids, now, own)
    complete_finished(ids, now, own)
    own.write()


def next_tick(now: datetime) -> datetime:
    """When the reconciler runs next: every full five minutes."""
    return (
        now - timedelta(minutes=now.minute % 5, seconds=now.second, microseconds=now.microsecond) + timedelta(minutes=5)
    )


def display_until(sequence: Any, now: datetime) -> datetime | None:
    """Until when `display_state` (of `with_display`) will say so."""
    ends = {
        "reply_harvest": sequence.harvest_until,
        "partially_paused": sequence.first_resume_at,
        "finalizing": next_tick(now),
    }
    return ends.get(sequence.display_state)
