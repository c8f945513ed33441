"""Locks, and the set-based moves of executions and enrollments that every verb is made of.

Whoever writes executions or enrollments locks their sequences first, in id order: the triggers would lock them later,
after other rows, and two such transactions could wait for each other.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from campaigns.models import Enrollment, Execution, Sequence
from campaigns.models.executions import QUEUED
from config.decisions import decide_bulk
from config.decisions import record as record_decisions
from config.models import Decision

Ids = Collection[UUID]


def lock_sequences(ids: Iterable[Any], *, skip_locked: bool = False) -> list[Sequence]:
    rows = Sequence.objects.filter(pk__in=list(ids)).order_by("pk")
    return list(rows.select_for_update(no_key=True, skip_locked=skip_locked))


class Moved(NamedTuple):
    """A row whose state was changed, and which one it had before."""

    pk: UUID
    enrollment_id: UUID
    sequence_id: UUID
    before: str


def skip_executions(rows: Any, reason: str, *, wait: bool = True) -> list[Moved]:
    """Skip what the queryset finds. A sweep does not `wait` for what another transaction holds, be it only the
    enrollment: the next tick finds it again."""
    known = rows.select_related("enrollment").only("status", "enrollment", "enrollment__sequence").order_by("pk")
    locked = known.select_for_update(of=("self", "enrollment"), no_key=True, skip_locked=not wait)
    found = [Moved(row.pk, row.enrollment_id, row.enrollment.sequence_id, row.status) for row in locked]
    Execution.objects.filter(pk__in=[row.pk for row in found]).update(status="skipped", skip_reason=reason)
    return found


def end_enrollments(ids: Ids, status: str, now: datetime, *, wait: bool = True) -> list[Moved]:
    """End the live ones among them."""
    # NO KEY: a new execution locks its enrollment's key and then waits for the sequence, which we hold.
    live = Enrollment.objects.live().filter(pk__in=list(ids)).order_by("pk")
    rows = live.select_for_update(no_key=True, skip_locked=not wait)
    ended = [
        Moved(pk, pk, sequence, before) for pk, sequence, before in rows.values_list("pk", "sequence_id", "status")
    ]
    Enrollment.objects.filter(pk__in=[row.pk for row in ended]).update(
        status=status, ended_at=now, resume_at=None, paused_at=None
    )
    return ended


def skip_and_stop(rows: Any, reason: str, now: datetime, ledger: "Ledger", rule: str, *, wait: bool = True) -> int:
    """A step that was not sent leads to no next one: its enrollment ends, and whatever else it had queued with it."""
    skipped = skip_executions(rows, reason, wait=wait)
    if not skipped:
        return 0
    ended = end_enrollments({row.enrollment_id for row in skipped}, "stopped", now)
    ledger.skipped(rule, skipped, reason)
    ledger.ended(rule, ended, "stopped", because=reason)
    ledger.skipped(rule, skip_executions(waiting([row.pk for row in ended]), "orphaned", wait=wait), "orphaned")
    return len(skipped)


def waiting(enrollment_ids: Ids, states: tuple[str, ...] = QUEUED) -> Any:
    return Execution.objects.filter(enrollment__in=list(enrollment_ids), status__in=states)


def grouped(pairs: Iterable[tuple[UUID, UUID]]) -> dict[UUID, list[UUID]]:
    found: dict[UUID, list[UUID]] = defaultdict(list)
    for owner, pk in pairs:
        found[owner].append(pk)
    return dict(found)


class Ledger:
    """The decisions of one run, written with its changes, as of the time it goes by."""

    def __init__(self, now: datetime, run_id: UUID | None = None) -> None:
        self.now = now
        self.run_id = run_id
        self.kept: list[Decision] = []

    def bulk(
        self,
        rule: str,
        keys_by_sequence: dict[UUID, list[UUID]],
        *,
        before: dict[str, Any],
        after: dict[str, Any],
        inputs: dict[str, Any] | None = None,
        of: str = "executions",
    ) -> None:
        """One decision per sequence for any number of its rows."""
        for sequence_id, keys in keys_by_sequence.items():
            owner, said = Sequence(pk=sequence_id), {"rows": of, **(inputs or {})}
            self.kept.append(
                decide_bulk(rule, owner, keys, before=before, after=after, inputs=said, run_id=self.run_id)
            )

    def counted(self, rule: str, rows: Iterable[tuple[UUID, int, str, str]], **said: dict[str, Any]) -> None:
        """Like `bulk`, where the database has counted: (sequence, count, first id, last id)."""
        for sequence_id, count, first, last in rows:
            decision = decide_bulk(rule, Sequence(pk=sequence_id), [first, last], run_id=self.run_id, **said)
            decision.affected, decision.inputs["rows"] = count, "executions"
            self.kept.append(decision)

    def skipped(self, rule: str, rows: list[Moved], reason: str, **inputs: Any) -> None:
        self._moved(f"{rule}.{reason}", rows, {"status": "skipped", "skip_reason": reason}, inputs, "executions")

    def ended(self, rule: str, rows: list[Moved], status: str, **inputs: Any) -> None:
        self._moved(f"{rule}.{status}", rows, {"status": status}, inputs, "enrollments")

    def _moved(self, rule: str, rows: list[Moved], after: dict[str, Any], inputs: dict[str, Any], of: str) -> None:
        for sequence_id, keys in grouped((row.sequence_id, row.pk) for row in rows).items():
            states = sorted({row.before for row in rows if row.sequence_id == sequence_id})
            before = {"status": states[0] if len(states) == 1 else states}
            self.bulk(rule, {sequence_id: keys}, before=before, after=after, inputs=inputs, of=of)

    def add(self, *decisions: Decision) -> None:
        self.kept.extend(decisions)

    def write(self) -> None:
        for decision in self.kept:
            decision.created_at = self.now
        record_decisions(self.kept)
        self.kept = []
