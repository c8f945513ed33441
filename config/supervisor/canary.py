"""The cluster's sign of life: a task that goes the whole round, from the broker through a worker to the monitor.

A worker that merely ran it is not enough: with a monitor that hangs, every task would run and none be acknowledged.
"""

from datetime import datetime
from typing import Any

from django import db
from django.utils import timezone
from django_q.brokers import get_broker
from django_q.tasks import async_task

from config.models import Canary

TASK = "config.supervisor.canary.sing"


def ask(lane: str) -> datetime:
    """Put the question; only an answer to the latest one counts, as an older one may have been under way for long."""
    now = timezone.now()
    Canary.objects.update_or_create(host=lane, defaults={"asked_at": now})
    get_broker(lane).delete_queue()
    async_task(TASK, lane, now, cluster=lane, save=False, task_name="canary")
    return now


def sing(lane: str, asked_at: datetime) -> None:
    """Runs in a worker. Nothing to do: getting here and back is the point."""


def hear(sender: object, task: dict[str, Any], **_kwargs: object) -> None:
    """Runs in the monitor, after it acknowledged the task."""
    if task["func"] == TASK and task["success"]:
        lane, asked_at = task["args"]
        db.close_old_connections()
        Canary.objects.filter(host=lane, asked_at=asked_at).update(answered_at=timezone.now())


def answered(lane: str, asked_at: datetime) -> bool:
    return Canary.objects.filter(host=lane, answered_at__gte=asked_at).exists()
