"""Actions on more rows than a request should wait for: kept as rows, worked off by the sweep run_bulk_actions."""

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render

from config.console.audit import record_human_actions
from config.console.panels import counted
from config.models import BulkAction, BulkActionRow
from config.sweeping import Sweep, nudge

SWEEP = "config.run_bulk_actions"
SHOWN_FAILURES = 50


@transaction.atomic
def start(request: HttpRequest, action: Any, model: Any, title: str, keys: list[Any], reason: str) -> BulkAction:
    bulk = BulkAction.objects.create(
        title=title,
        model=model._meta.label,
        action=action.__name__,
        actor_id=request.user.pk,
        reason=reason,
        total=len(keys),
    )
    BulkActionRow.objects.bulk_create([BulkActionRow(bulk_action=bulk, key=str(key)) for key in keys], batch_size=5000)
    nudge(SWEEP)
    return bulk


def work_off(sweep: Sweep) -> None:
    for bulk in BulkAction.objects.filter(status=BulkAction.Status.RUNNING).order_by("created_at"):
        sweep.pages(
            BulkActionRow.objects.filter(bulk_action=bulk, outcome=""),
            lambda ids, bulk=bulk: run_batch(bulk, ids),  # type: ignore[misc]
            label=str(bulk.pk),
            failed=lambda key, error, bulk=bulk: give_up(bulk, key, error),  # type: ignore[misc]
        )
        if not finish(bulk, sweep.now):
            nudge(SWEEP)  # the time was up: go on at once, not at the next tick


def run_batch(bulk: BulkAction, ids: list[int]) -> Counter[str]:
    """The service, the audit rows and the mark that it is done are one transaction: a crash repeats nothing."""
    rows = list(BulkActionRow.objects.filter(pk__in=ids, outcome="").select_for_update(skip_locked=True))
    model = apps.get_model(bulk.model)
    keys = [model._meta.pk.to_python(row.key) for row in rows]
    present = list(model._default_manager.filter(pk__in=keys).values_list("pk", flat=True))
    done = Counter(find_run(bulk)(present, bulk.actor, bulk.reason)) if present else Counter()
    done["gone"] += len(keys) - len(present)
    record_human_actions(bulk.actor, model, present, bulk.title, bulk.reason)
    BulkActionRow.objects.filter(pk__in=[row.pk for row in rows]).update(outcome="done")
    add_counts(bulk, +done)
    return +done


@transaction.atomic
def give_up(bulk: BulkAction, row_id: int, error: Exception) -> None:
    said = f"{type(error).__name__}: {error}"
    BulkActionRow.objects.filter(pk=row_id).update(outcome=said.splitlines()[0][:500])
    add_counts(bulk, Counter(error=1))


def add_counts(bulk: BulkAction, done: Counter[str]) -> None:
    locked = BulkAction.objects.select_for_update().get(pk=bulk.pk)
    locked.counts = dict(Counter(locked.counts) + done)
    locked.save(update_fields=["counts"])


@transaction.atomic
def finish(bulk: BulkAction, now: datetime) -> bool:
    locked = BulkAction.objects.select_for_update().get(pk=bulk.pk)
    if locked.status == BulkAction.Status.RUNNING and not locked.rows.filter(outcome="").exists():
        locked.finish()
        locked.ended_at = now
        locked.save(update_fields=["status", "ended_at"])
    return bool(locked.status == BulkAction.Status.FINISHED)


def find_run(bulk: BulkAction) -> Callable[..., Any]:
    model_admin = admin.site._registry[apps.get_model(bulk.model)]
    actions: Any = model_admin.actions
    return next(action.run for action in actions if getattr(action, "__name__", "") == bulk.action)


def progress(bulk: BulkAction) -> dict[str, Any]:
    waiting = bulk.rows.filter(outcome="").count() if bulk.status == BulkAction.Status.RUNNING else 0
    failures = bulk.rows.exclude(outcome__in=["", "done"]).order_by("pk")[:SHOWN_FAILURES]
    done = bulk.total - waiting
    return {
        "bulk": bulk,
        "done": done,
        "percent": 100 * done // bulk.total if bulk.total else 100,
        "failures": list(failures),
        "counted": counted(bulk.counts),
    }


def progress_view(request: HttpRequest, pk: Any) -> HttpResponse:
    bulk = get_object_or_404(BulkAction, pk=pk)
    return render(request, "admin/console/bulk_progress.html", progress(bulk))
