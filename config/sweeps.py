"""The house's own time-driven verb: what only exists for a while goes again."""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models

from config.models import Canary, IdempotencyKey, SweepRun, ThrottleWindow
from config.sweeping import Sweep


def purge_expired(sweep: Sweep) -> None:
    """Old idempotency keys, throttle windows, sweep runs, results of django-q2, canaries of machines long gone."""
    from django_q.models import Task

    for rows in (
        IdempotencyKey.objects.filter(created_at__lt=sweep.now - settings.IDEMPOTENCY_WINDOW),
        ThrottleWindow.objects.filter(window_start__lt=sweep.now - timedelta(days=2)),
        SweepRun.objects.filter(started_at__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
        Task.objects.filter(stopped__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
        Canary.objects.filter(asked_at__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
    ):
        _delete(sweep, rows)


def _delete(sweep: Sweep, rows: models.QuerySet[Any]) -> None:
    table = rows.model._meta.db_table
    sweep.pages(rows, lambda keys: {table: rows.filter(pk__in=keys).delete()[0]}, label=table)
