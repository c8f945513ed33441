"""The branch row is the one door: grants and endings take it alone, gated writes share it."""

from collections.abc import Iterable
from typing import Any

from django.db import connection
from django.db.models import Value
from django.db.models.functions import Now

from config.errors import Conflict
from locks.models import Branch, LockEvent

COLUMNS = ("id", "name", "state", "fence", "indexing_started_at", "indexing_completed_at", "indexing_service")


BOUND = """
    SELECT set_config('signalbox.before', current_setting('statement_timeout'), true),
           set_config('lock_timeout', '5s', true), set_config('statement_timeout', '5s', true)
"""
UNBOUND = "SELECT set_config('statement_timeout', current_setting('signalbox.before'), true)"


def patiently(statement: str) -> str:
    """The statement, which waits for a row for 5 s at most, and those around it on the same trip.

    Behind another who waits, PostgreSQL waits twice, each time for lock_timeout: for its turn, then for the row. So the
    statement as a whole is bounded too. The bounds are a statement apart, because a table that somebody has locked is
    waited for while the statement is still being read.
    """
    return f"{BOUND}; {statement}; {UNBOUND}"


def _take(where: str, values: list[Any], how: str) -> list[Branch]:
    """The ORM cannot bound the wait on the same trip; NO KEY lets the foreign keys of events through."""
    columns = ", ".join(f"b.{name}" for name in COLUMNS)
    with connection.cursor() as cursor:
        rows = f"SELECT {columns} FROM branches AS b WHERE {where} ORDER BY b.id FOR {how}"
        cursor.execute(patiently(rows), values)
        cursor.nextset()
        return [Branch.from_db(connection.alias, COLUMNS, row) for row in cursor.fetchall()]


def take_branch(name: str, *, shared: bool = False) -> Branch:
    """The branch's row until the end of the transaction, made on first use."""
    how = "SHARE OF b" if shared else "NO KEY UPDATE OF b"
    found = _take("b.name = %s", [name], how)
    if not found:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO branches (name) VALUES (%s) ON CONFLICT (name) DO NOTHING", [name])
        found = _take("b.name = %s", [name], how)
    return found[0]


def take_branch_of(lock_id: Any) -> list[Branch]:
    return _take("b.id = (SELECT branch_id FROM branch_locks WHERE id = %s)", [lock_id], "NO KEY UPDATE OF b")


def take_branches(ids: Iterable[int], *, skip_busy: bool = False) -> list[Branch]:
    """Always in the order of their ids, so two that need several cannot wait for each other."""
    how = "NO KEY UPDATE OF b" + (" SKIP LOCKED" if skip_busy else "")
    return _take("b.id = ANY(%s)", [sorted(set(ids))], how)


def move(branch: Branch, target: str, actor: str, reason: str) -> None:
    """Along one edge of the graph, with its event. The caller holds the row."""
    before, transitions = branch.state, branch.get_available_state_transitions()  # type: ignore[attr-defined]
    edge = next((found for found in transitions if found.target == target), None)
    if edge is None:
        raise Conflict(f"A branch cannot go from {before} to {target}.", code="illegal_transition", attr="state")
    getattr(branch, edge.name)()
    branch.save(update_fields=["state"])
    details = {"from": before, "to": target}
    LockEvent.objects.create(
        branch=branch, kind=LockEvent.Kind.STATE_CHANGED, actor=actor, reason=reason, details=details
    )


def mark_indexing(branch: Branch, service: str | None, *, completed: bool) -> None:
    times = (
        {"indexing_completed_at": Now()}
        if completed
        else {
            "indexing_started_at": Now(),
            "indexing_completed_at": Value(None),
            "indexing_service": Value(service),
        }
    )
    Branch.objects.filter(pk=branch.pk).update(**times)
