"""How long ended tasks are kept, with their rows, attempts and events. What people did to a device stays."""

from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Exists, OuterRef

from config.retention import purge_append_only
from config.triggers import PURGING
from devices.models import Attempt, Event, Task, TaskDevice

KEPT = timedelta(days=730)
PAGE = 2000


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    """A run of a cancelled task may still be open, and a retry needs to know whose failures it is for."""
    rows = TaskDevice.objects.filter(task=OuterRef("pk"))
    retried = Task.objects.filter(retry_of=OuterRef("pk"))
    over = Task.objects.filter(completed_at__lt=now - KEPT).exclude(Exists(retried))
    closed = over.exclude(Exists(rows.filter(status__in=["pending", "running"])))
    done = {"task_devices": _purge_rows(TaskDevice.objects.filter(task__in=closed), dry_run)}
    return {**done, "tasks": purge_append_only(closed if dry_run else closed.exclude(Exists(rows)), dry_run)}


def _purge_rows(rows: Any, dry_run: bool) -> int:
    if dry_run:
        return int(rows.count())
    total = 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:PAGE]):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config(%s, 'on', true)", [PURGING])
            Event.objects.filter(task_device__in=keys).delete()
            Attempt.objects.filter(task_device__in=keys).delete()
            TaskDevice.objects.filter(pk__in=keys).delete()
        total += len(keys)
    return total
