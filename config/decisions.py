"""Each automatic change leaves a row that says which rule fired, on what evidence, and what changed."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from django.db import models

from config.models import Decision


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
    Decision.objects.bulk_create(decisions, batch_size=1000)
