"""The house's own time-driven verb: what only exists for a while goes again."""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import OperationalError, connection, models, transaction
from django.utils import timezone

from config.integrity import invariants, keep_reading
from config.models import BulkAction, Canary, IdempotencyKey, IntegrityReading, SweepRun, ThrottleWindow
from config.sweeping import Sweep


def purge_expired(sweep: Sweep) -> None:
    """Old idempotency keys, throttle windows, sweep runs, results of django-q2, canaries of machines long gone."""
    from django_q.models import Task

    for rows in (
        IdempotencyKey.objects.filter(created_at__lt=sweep.now - settings.IDEMPOTENCY_WINDOW),
        ThrottleWindow.objects.filter(window_start__lt=sweep.now - timedelta(days=2)),
        # By its end: a time in the future (--now) must not take the run that is looking, nor any other at work.
        SweepRun.objects.filter(ended_at__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
        BulkAction.objects.filter(ended_at__lt=sweep.now - settings.BULK_ACTIONS_KEPT),
        IntegrityReading.objects.filter(measured_at__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
        Task.objects.filter(stopped__lt=sweep.now - settings.SWEEP_RUNS_KEPT),
        # By the true clock: `up` waits for these answers, whatever time somebody asks about.
        Canary.objects.filter(asked_at__lt=timezone.now() - settings.SWEEP_RUNS_KEPT),
    ):
        _delete(sweep, rows)


def measure_integrity(sweep: Sweep) -> None:
    """The report, kept for its trend. What is broken is shown on the page and in the metrics, not mended here.

    One by one: an invariant whose query takes too long is told, and the next run begins behind where this one stopped.
    """
    names = list(invariants())
    last = sweep.cursor.pop("invariants", names[-1:])[0]
    first = names.index(last) + 1 if last in names else 0
    for name in names[first:] + names[:first]:
        if not sweep.has_time():
            sweep.cursor["invariants"] = [last]
            sweep.counts["out_of_time"] += 1
            return
        last = name
        try:
            with transaction.atomic():
                reading = keep_reading(name, sweep.now)
        except OperationalError as error:
            if not connection.is_usable():
                raise
            sweep.fail(name, error)
        else:
            sweep.counts.update(measured=1, broken=int(bool(reading.count)))


def run_bulk_actions(sweep: Sweep) -> None:
    """What operators asked for on many rows at once."""
    from config.console.bulk import work_off

    work_off(sweep)


def _delete(sweep: Sweep, rows: models.QuerySet[Any]) -> None:
    table = rows.model._meta.db_table
    sweep.pages(rows, lambda keys: {table: rows.filter(pk__in=keys).delete()[0]}, label=table)
