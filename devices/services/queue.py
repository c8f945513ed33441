"""The queue of tasks: one runs, the oldest waiting one is next."""

from collections import Counter
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction

from config.decisions import decide, record
from config.errors import Conflict
from devices.models import Device, Task, TaskDevice
from devices.services.ends import cancel_rows

Status = Task.Status
NO_DEVICE = "no_device"


@transaction.atomic
def create_task(
    name: str,
    device_count: int,
    now: datetime,
    payload: Any = None,
    selector: dict[str, str] | None = None,
    retry_of: Task | None = None,
) -> Task:
    task = Task.objects.create(
        name=name,
        device_count=device_count,
        payload=payload,
        selector=selector or {},
        retry_of=retry_of,
        created_at=now,
    )
    promote_next_task(now)
    return Task.objects.get(pk=task.pk)


@transaction.atomic
def retry_task(task: Task, now: datetime) -> Task:
    """A new task for the devices that failed, and only them. It does not recover them."""
    task = Task.objects.locked().get(pk=task.pk)
    if task.status not in Task.ENDED or not task.devices_failed:
        raise Conflict("Only a task that ended with failed devices can be retried.", code="nothing_to_retry")
    return create_task(task.name, task.devices_failed, now, task.payload, task.selector, retry_of=task)


@transaction.atomic
def cancel_task(task: Task, now: datetime) -> Task:
    """Pending rows end at once, running ones when their result comes or their lease lapses; the next task starts."""
    task = Task.objects.locked().get(pk=task.pk)
    if task.status in Task.ENDED:
        raise Conflict("The task has ended already.", code="illegal_transition")
    was_running = task.status == Status.RUNNING
    cancel_rows(task.rows.pending(), now, TaskDevice.FailureKind.CANCELLED)  # type: ignore[attr-defined]
    Task.objects.filter(pk=task.pk).update(status=Status.CANCELLED, completed_at=now)
    if was_running:
        promote_next_task(now)
    return Task.objects.get(pk=task.pk)


@transaction.atomic
def promote_next_task(now: datetime) -> Task | None:
    """Start the oldest waiting task unless one runs; the task started.

    The advisory lock, held to the commit, lets one promoter see what the other did. Without it a task created while
    the last one ends could be seen by neither. The unique index stands behind it.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('devices.queue'))")
    if Task.objects.filter(status=Status.RUNNING).exists():
        return None
    while waiting := Task.objects.filter(status=Status.PENDING).oldest_first().first():
        # Nothing is updated when it was cancelled a moment ago: then the next one.
        if Task.objects.filter(pk=waiting.pk, status=Status.PENDING).update(status=Status.RUNNING, started_at=now):
            return waiting
    return None


def lock_active_task() -> Task | None:
    """The running task, locked. It may end while we wait for its lock, and another be running then."""
    running = Task.objects.filter(status=Status.RUNNING)
    while True:
        if (task := running.locked().first()) or not running.exists():
            return task


def settle(task_id: UUID, now: datetime) -> Task | None:
    """End the task when it is over and start the next; the task ended. The caller holds the task's lock."""
    task = Task.objects.quiet().filter(pk=task_id).first()
    if task is None or not _is_over(task):
        return None
    return _end(task, now)


def _is_over(task: Task) -> bool:
    """Nothing is open, and either all wanted devices had their turn or nobody is left to take one."""
    if task.devices_taken >= task.device_count:
        return True
    if not task.devices_taken and not TaskDevice.objects.filter(task=task).exists():
        return False
    return not Device.objects.eligible().suiting(task).without_row_of(task).exists()


def _end(task: Task, now: datetime, error: str | None = None) -> Task:
    status = Status.SUCCESS if task.devices_done else Status.FAILED
    Task.objects.filter(pk=task.pk).update(status=status, completed_at=now, error=error)
    promote_next_task(now)
    return task


@transaction.atomic
def advance_queue(now: datetime, run_id: UUID | None = None) -> Counter[str]:
    """What should have happened in the transaction of a row's end: end the running task, start the next."""
    done: Counter[str] = Counter()
    task = lock_active_task()
    if task is not None and _recount(task, run_id):
        done["recounted"] = 1
    if task is not None and (ended := settle(task.pk, now) or _give_up(task, now)):
        done["ended"] = 1
        _decide(ended, Status.RUNNING, run_id)
    if task is None and (started := promote_next_task(now)):
        done["promoted"] = 1
        _decide(started, Status.PENDING, run_id)
    return done


def _recount(task: Task, run_id: UUID | None) -> bool:
    """The rows are what is true. A count that a person's SQL left wrong would keep the task from ever ending."""
    found = Task.objects.counted().get(pk=task.pk)
    after = {"devices_taken": found.taken, "devices_done": found.done, "devices_failed": found.failed}
    before = {name: getattr(task, name) for name in after}
    if before == after or found.taken > task.device_count:
        return False
    for name, count in after.items():
        setattr(task, name, count)
    task.save(update_fields=list(after))
    record([decide("recount_rows", task, before=before, after=after, inputs={}, run_id=run_id)])
    return True


def _give_up(task: Task, now: datetime) -> Task | None:
    """No row is open and none was made for a day: nobody comes."""
    if task.open_rows:
        return None
    last = task.rows.order_by("-changed_at").values_list("changed_at", flat=True).first()  # type: ignore[attr-defined]
    since = last or task.started_at
    if since is None or now - since <= settings.TASK_STALLED_AFTER:
        return None
    return _end(task, now, error=NO_DEVICE)


def _decide(task: Task, before: str, run_id: UUID | None) -> None:
    task = Task.objects.get(pk=task.pk)
    record(
        [
            decide(
                "promote_next_task",
                task,
                before={"status": before},
                after={"status": task.status},
                inputs={
                    "device_count": task.device_count,
                    "devices_done": task.devices_done,
                    "devices_failed": task.devices_failed,
                    "error": task.error,
                },
                run_id=run_id,
            )
        ]
    )
