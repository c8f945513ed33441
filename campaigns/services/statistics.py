"""The funnel of a sequence, step by step, and when people answer."""

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import Count, Exists, OuterRef, Q
from django.db.models.functions import ExtractHour

from campaigns.models import Execution, Reply, Sequence, Step

ANSWERED_WITHIN = timedelta(days=30)


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


def reply_hours(sequence: Sequence, now: datetime, zone: ZoneInfo) -> dict[int, tuple[int, int]]:
    """Hour of the day → (steps sent in it, answered by a person), of the last 30 days.

    A reply answers the last step sent before it, so it is counted once however many steps the lead got.
    """
    sent = Execution.objects.filter(enrollment__sequence=sequence, status="sent", executed_at__gt=now - ANSWERED_WITHIN)
    later = Execution.objects.filter(
        enrollment=OuterRef("enrollment"), status="sent", executed_at__lte=OuterRef("received_at")
    )
    answer = Reply.objects.filter(
        ~Exists(later.filter(executed_at__gt=OuterRef(OuterRef("executed_at")))),
        enrollment=OuterRef("enrollment"), kind="human", received_at__gte=OuterRef("executed_at"),
    )  # fmt: skip
    rows = (
        sent.annotate(hour=ExtractHour("executed_at", tzinfo=zone), answered=Exists(answer))
        .order_by()
        .values_list("hour")
        .annotate(sent=Count("pk"), answers=Count("pk", filter=Q(answered=True)))
    )
    return {hour: (count, answers) for hour, count, answers in rows}
