"""How a row's attempt ends. The caller holds the lock of the row's task; events and the rest follow by trigger."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Case, F, Q, QuerySet, Value, When

from devices.models import Device, Task, TaskDevice

Status, Kind = TaskDevice.Status, TaskDevice.FailureKind


def end_runs(
    rows: Iterable[TaskDevice],
    tasks: dict[UUID, Task],
    now: datetime,
    *,
    kind: str,
    error: str,
    retryable: bool = True,
    ended_by: str = "",
) -> None:
    """A failed attempt: again while attempts are left, else for good; of a task that is over it is just cancelled."""
    cancelled: list[UUID] = []
    failed: list[UUID] = []
    for row in rows:
        (cancelled if tasks[row.task_id].status in Task.ENDED else failed).append(row.pk)
    if cancelled:
        cancel_runs(cancelled, now, ended_by=ended_by, error=error)
    if failed:
        _fail_runs(failed, now, kind, error, retryable, ended_by)
        cancel_rows(_out_of_use(failed), now, Kind.CANCELLED)


def _fail_runs(ids: list[UUID], now: datetime, kind: str, error: str, retryable: bool, ended_by: str) -> None:
    def when_again(again: Any, otherwise: Any) -> Any:
        return Case(When(Q(attempt__lt=F("max_attempts")), then=again), default=otherwise) if retryable else otherwise

    TaskDevice.objects.running().filter(pk__in=ids).update(
        status=when_again(Value(Status.PENDING), Value(Status.FAILED)),
        final=when_again(Value(False), Value(True)),
        completed_at=when_again(Value(None), Value(now)),
        started_at=when_again(Value(None), F("started_at")),
        deadline_at=when_again(Value(None), F("deadline_at")),
        lease_expires_at=None,
        failure_kind=kind,
        error=error,
        timed_out=kind == Kind.TIMEOUT,
        retryable=retryable,
        ended_by=ended_by,
        changed_at=now,
    )


def cancel_runs(ids: list[UUID], now: datetime, **described: Any) -> None:
    """The result of a cancelled task's run is kept and counts for nothing; the device is not blamed."""
    cancel_rows(TaskDevice.objects.running().filter(pk__in=ids), now, Kind.CANCELLED, timed_out=False, **described)


def cancel_rows(rows: QuerySet[TaskDevice], now: datetime, kind: str, **described: Any) -> int:
    return rows.update(
        status=Status.CANCELLED,
        failure_kind=kind,
        completed_at=now,
        lease_expires_at=None,
        changed_at=now,
        **described,
    )


def _out_of_use(ids: list[UUID]) -> QuerySet[TaskDevice]:
    """Rows about to wait for a device that an operator has taken out meanwhile."""
    out = [Device.Status.ERROR, Device.Status.QUARANTINED]
    return TaskDevice.objects.pending().filter(pk__in=ids, device__status__in=out)
