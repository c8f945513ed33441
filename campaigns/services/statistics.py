"""The funnel of a sequence, step by step."""

from typing import Any

from django.db.models import Count, Q

from campaigns.models import Execution, Sequence, Step


def sequence_stats(sequence: Sequence) -> dict[str, Any]:
    """Counted from the rows; a step taken out with a history keeps its line, without a position."""
    totals = (
        Execution.objects.filter(enrollment__sequence=sequence)
        .order_by()
        .values("step_id")
        .annotate(
            total=Count("pk"),
            sent=Count("pk", filter=Q(status="sent")),
            failed=Count("pk", filter=Q(status="failed")),
            skipped=Count("pk", filter=Q(status="skipped")),
            waiting=Count("pk", filter=Q(status__in=Execution.WAITING)),
        )
    )
    found: dict[Any, Any] = {row["step_id"]: row for row in totals}
    steps = Step.objects.filter(Q(sequence=sequence) & (Q(position__isnull=False) | Q(pk__in=found)))
    names = ("total", "sent", "failed", "skipped", "waiting")
    lines = [
        {"step_id": step.pk, "position": step.position, **{n: found.get(step.pk, {}).get(n, 0) for n in names}}
        for step in steps.order_by("position", "pk")
    ]
    return {"counters": sequence.counters, "steps": lines}
