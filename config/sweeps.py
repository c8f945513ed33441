"""The house's own time-driven verb: what only exists for a while goes again."""

from datetime import timedelta

from django.conf import settings

from config.models import IdempotencyKey, SweepRun, ThrottleWindow
from config.sweeping import Sweep


def purge_expired(sweep: Sweep) -> None:
    """Idempotency keys past their window, old throttle windows, old sweep runs, django-q2's kept failures."""
    from django_q.models import Task

    for outcome, rows in (
        ("idempotency_keys", IdempotencyKey.objects.filter(created_at__lt=sweep.now - settings.IDEMPOTENCY_WINDOW)),
        ("throttle_windows", ThrottleWindow.objects.filter(window_start__lt=sweep.now - timedelta(days=2))),
        ("sweep_runs", SweepRun.objects.filter(started_at__lt=sweep.now - settings.SWEEP_RUNS_KEPT)),
        ("task_results", Task.objects.filter(stopped__lt=sweep.now - settings.SWEEP_RUNS_KEPT)),
    ):
        sweep.pages(
            rows,
            lambda keys, rows=rows, outcome=outcome: {outcome: rows.filter(pk__in=keys).delete()[0]},
            label=outcome,
        )
