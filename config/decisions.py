"""Each automatic change leaves a row that says which rule fired, on what evidence, and what changed."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

from django.db import connection, models

from config.models import Decision

BATCH = 5000
COLUMNS = ("run_id", "rule", "object_type", "object_id", "inputs", "before", "after", "won", "affected", "created_at")
INSERT = f"""
    INSERT INTO decisions ({", ".join(COLUMNS)})
    SELECT run_id, rule, object_type, object_id, inputs, before, after, won, affected,
           COALESCE(created_at, statement_timestamp())
    FROM json_to_recordset(%s::json) AS row(
        run_id uuid, rule text, object_type text, object_id text, inputs jsonb, before jsonb, after jsonb,
        won boolean, affected integer, created_at timestamptz)
"""


def decide(
    rule: str,
    row: models.Model,
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    run_id: UUID | None = None,
    won: bool = True,
) -> Decision:
    """The decision about one row, unsaved: `record` writes any number of them in one statement."""
    return Decision(
        run_id=run_id,
        rule=rule,
        object_type=row._meta.db_table,
        object_id=str(row.pk),
        inputs=inputs or {},
        before=before,
        after=after,
        won=won,
    )


def decide_bulk(
    rule: str,
    owner: models.Model,
    keys: Sequence[Any],
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    run_id: UUID | None = None,
) -> Decision:
    """One decision for many rows of one owner: the count, and the first and last id as evidence."""
    decision = decide(rule, owner, before=before, after=after, inputs=inputs, run_id=run_id)
    ordered = sorted(str(key) for key in keys)
    decision.affected = len(ordered)
    if ordered:
        decision.inputs = {**decision.inputs, "first_id": ordered[0], "last_id": ordered[-1]}
    return decision


def record(decisions: Iterable[Decision]) -> None:
    """Write them, each batch as one statement with one parameter.

    bulk_create spends ten times the database's own time on compiling a statement with a placeholder per value.
    """
    rows = iter(decisions)
    while batch := list(islice(rows, BATCH)):
        with connection.cursor() as cursor:
            cursor.execute(INSERT, [json.dumps([_plain(decision) for decision in batch])])


def _plain(decision: Decision) -> dict[str, Any]:
    row = {name: getattr(decision, name) for name in COLUMNS}
    row["run_id"] = str(decision.run_id) if decision.run_id else None
    # Unset it is an expression, the database's clock.
    row["created_at"] = decision.created_at.isoformat() if isinstance(decision.created_at, datetime) else None
    return row
