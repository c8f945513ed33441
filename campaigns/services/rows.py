"""Locks, and the set-based moves of executions and enrollments that every verb is made of.

Whoever writes executions or enrollments locks their sequences first, in id order: the triggers would lock them later,
after other rows, and two such transactions could wait for each other.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any
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


def locked_ids(rows: Any) -> list[tuple[UUID, UUID, UUID]]:
    """(execution, enrollment, sequence) of the rows, locked; what another transaction holds is its to finish."""
    locked = rows.select_for_update(of=("self",), skip_locked=True)
    return list(locked.values_list("pk", "enrollment_id", "enrollment__sequence_id"))


def skip_executions(rows: Any, reason: str) -> list[tuple[UUID, UUID, UUID]]:
    """Skip what the queryset finds; the (execution, enrollment, sequence) ids of what was skipped."""
    found = locked_ids(rows)
    Execution.objects.filter(pk__in=[pk for pk, *_rest in found]).update(status="skipped", skip_reason=reason)
    return found


def end_enrollments(ids: Ids, status: str, now: datetime) -> dict[UUID, list[UUID]]:
    """End the live ones among them; the ids of those that ended, by sequence."""
    # NO KEY: a new execution locks its enrollment's key and then waits for the sequence, which we hold.
    rows = Enrollment.objects.live().filter(pk__in=list(ids)).order_by("pk").select_for_update(no_key=True)
    ended = grouped(rows.values_list("sequence_id", "pk"))
    Enrollment.objects.filter(pk__in=[pk for pks in ended.values() for pk in pks]).update(
        status=status, ended_at=now, resume_at=None, paused_at=None
    )
    return ended


def waiting(enrollment_ids: Ids, states: tuple[str, ...] = QUEUED) -> Any:
    return Execution.objects.filter(enrollment__in=list(enrollment_ids), status__in=states)


def grouped(pairs: Iterable[tuple[UUID, UUID]]) -> dict[UUID, list[UUID]]:
    found: dict[UUID, list[UUID]] = defaultdict(list)
    for owner, pk in pairs:
        found[owner].append(pk)
    return dict(found)


class Ledger:
    """The decisions of one run, written with its changes."""

    def __init__(self, run_id: UUID | None = None) -> None:
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

    def skipped(self, rule: str, rows: list[tuple[UUID, UUID, UUID]], reason: str, **inputs: Any) -> None:
        keys = grouped((sequence, pk) for pk, _enrollment, sequence in rows)
        after = {"status": "skipped", "skip_reason": reason}
        self.bulk(f"{rule}.{reason}", keys, before={"status": "waiting"}, after=after, inputs=inputs)

    def ended(self, rule: str, ids: dict[UUID, list[UUID]], status: str, **inputs: Any) -> None:
        before, after = {"status": "live"}, {"status": status}
        self.bulk(f"{rule}.{status}", ids, before=before, after=after, inputs=inputs, of="enrollments")

    def add(self, *decisions: Decision) -> None:
        self.kept.extend(decisions)

    def write(self) -> None:
        record_decisions(self.kept)
        self.kept = []
