"""Claims and what becomes of them. Lock order everywhere: PC, tasks by id, their rows, devices by id."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, FilteredRelation, OuterRef, Q, QuerySet
from django.utils.crypto import constant_time_compare, salted_hmac
from uuid_utils.compat import uuid7

from config.decisions import decide, record
from config.errors import Conflict, Missing
from devices.models import LEASE, PC, RUN_LIMIT, Device, PCSummary, Task, TaskDevice
from devices.services.ends import cancel_rows, cancel_runs, end_runs
from devices.services.queue import lock_active_task, settle

Status, Kind = TaskDevice.Status, TaskDevice.FailureKind
UP = [Device.Status.ONLINE, Device.Status.BUSY]


class TokenNotCurrent(Conflict):
    code = "token_not_current"

    def __init__(self) -> None:
        super().__init__("This token is not the current one of a running attempt.", attr="token")


@dataclass(frozen=True)
class Grant:
    """One device's run, as handed to the agent. Its token is `claim_token(id, attempt)`."""

    task: Task
    device: Device
    id: UUID
    attempt: int
    lease_expires_at: datetime
    deadline_at: datetime


def claim_token(row_id: UUID | str, attempt: int) -> str:
    """Derived from the secret key, so that it can be said again and is stored nowhere. It begins with its attempt."""
    return f"{attempt}-{salted_hmac('devices.claim_token', f'{row_id}:{attempt}', algorithm='sha256').hexdigest()}"


def attempt_of(row_id: UUID, token: str) -> int | None:
    """The attempt a token was given for, None when we never gave it."""
    number = token.partition("-")[0]
    if not (number.isascii() and number.isdigit() and len(number) < 5):
        return None
    return int(number) if constant_time_compare(token, claim_token(row_id, int(number))) else None


@transaction.atomic
def claim_task_devices(pc: PC, max_to_claim: int, now: datetime) -> list[Grant]:
    """Up to as many runs of the active task as the PC has free slots; waiting rows first, the oldest before others.

    All agents meet at the task's lock, so what can be known without it is asked before: under the PC's lock its free
    slots can only become more.
    """
    PC.objects.select_for_update(no_key=True).values_list("pk").get(pk=pc.pk)
    wanted = min(max_to_claim, PCSummary.objects.values_list("free_slots", flat=True).get(pk=pc.pk))
    task = lock_active_task() if wanted else None
    if task is None:
        return []
    chosen = _choose(task, _candidates(task, pc), wanted)
    if not chosen:
        return []
    started = TaskDevice.objects.start_runs(task, pc, [(d.row_id or uuid7(), d.pk) for d in chosen], now)
    return [Grant(task, device, *started[device.pk]) for device in chosen if device.pk in started]


def _choose(task: Task, candidates: list[Any], wanted: int) -> list[Any]:
    waiting = [device for device in candidates if device.row_id]
    again = sorted(waiting, key=lambda device: (device.row_created_at, device.row_id))[:wanted]
    room = max(0, min(wanted - len(again), task.device_count - task.devices_taken))
    return [*again, *[device for device in candidates if not device.row_id][:room]]


def _candidates(task: Task, pc: PC) -> list[Any]:
    """The PC's idle devices that may run the task now, locked: another PC's list must not take them meanwhile.

    Idle is who has no run; one that says busy without it is as good as online.
    """
    row = FilteredRelation("rows", condition=Q(rows__task=task))
    running = TaskDevice.objects.running().filter(device=OuterRef("pk"))
    waiting = Q(row__status=Status.PENDING, row__attempt__lt=F("row__max_attempts"))
    return list(
        Device.objects.suiting(task)
        .annotate(row=row)
        .annotate(row_id=F("row__id"), row_created_at=F("row__created_at"))
        .filter(waiting | Q(row__isnull=True), ~Exists(running), pc=pc, status__in=UP)
        .only("serial", "connection_id")
        .in_order()
    )


def ack_task_device(row_id: UUID, agent: Any, token: str, now: datetime) -> None:
    """Noted once per attempt."""
    row = _current_row(row_id, agent, token)
    if row.acked_at is None:
        _running(row).filter(acked_at=None).update(acked_at=now)


def renew_lease(row_id: UUID, agent: Any, token: str, now: datetime) -> None:
    row = _current_row(row_id, agent, token)
    if row.task.status == Task.Status.CANCELLED:
        raise Conflict("The task is cancelled.", code="task_cancelled")
    if row.deadline_at is None or now > row.deadline_at:
        raise Conflict("The deadline has passed.", code="deadline_passed")
    if not _running(row).update(lease_expires_at=min(now + LEASE, row.deadline_at)):
        raise TokenNotCurrent


def _current_row(row_id: UUID, agent: Any, token: str) -> TaskDevice:
    rows = TaskDevice.objects.filter(device__pc__agent=agent).select_related("task", "claimed_by")
    row = rows.filter(pk=row_id).first()
    if row is None:
        raise Missing("There is no such row.")
    if not _fits(row, agent, token) or row.status != Status.RUNNING:
        raise TokenNotCurrent
    return row


def _fits(row: TaskDevice, agent: Any, token: str) -> bool:
    if row.claimed_by is None or row.claimed_by.agent_id != agent.pk:
        return False
    return attempt_of(row.pk, token) == row.attempt


def _running(row: TaskDevice) -> QuerySet[TaskDevice]:
    """Compare-and-set: this very attempt, if it still runs."""
    return TaskDevice.objects.running().filter(pk=row.pk, attempt=row.attempt)


def complete_task_device(row_id: UUID, agent: Any, token: str, result: Any, now: datetime) -> None:
    attempt = attempt_of(row_id, token)
    complete_run = TaskDevice.objects.complete_run
    if attempt and complete_run(row_id, attempt, agent.pk, result, now, last=False):
        return
    with transaction.atomic():
        if attempt and (task_id := complete_run(row_id, attempt, agent.pk, result, now, last=True)):
            settle(task_id, now)
            return
        row, task = _row_to_end(row_id, agent, token, verb="complete")
        if row is None:
            return
        if task.status not in Task.ENDED:
            raise TokenNotCurrent
        cancel_runs([row.pk], now, ended_by="complete", result=result, error=None)


@transaction.atomic
def fail_task_device(
    row_id: UUID, agent: Any, token: str, error: str, now: datetime, *, retryable: bool = True
) -> None:
    row, task = _row_to_end(row_id, agent, token, verb="fail")
    if row is None:
        return
    end_runs([row], {task.pk: task}, now, kind=Kind.ERROR, error=error, retryable=retryable, ended_by="fail")
    settle(task.pk, now)


def _row_to_end(row_id: UUID, agent: Any, token: str, verb: str) -> tuple[TaskDevice | None, Task]:
    """The row under its task's lock; None when this very result was taken already."""
    task = Task.objects.filter(rows=row_id, rows__device__pc__agent=agent).locked().first()
    if task is None:
        raise Missing("There is no such row.")
    row = TaskDevice.objects.select_related("claimed_by").get(pk=row_id)
    if not _fits(row, agent, token):
        raise TokenNotCurrent
    if row.status == Status.RUNNING:
        return row, task
    if row.ended_by == verb:
        return None, task
    raise TokenNotCurrent


def time_out_attempts(ids: list[UUID], now: datetime, run_id: UUID | None = None) -> Counter[str]:
    error = f"timeout: no result within {RUN_LIMIT.total_seconds() / 60:.0f} minutes"
    return _end_overdue(ids, TaskDevice.objects.timed_out, "time_out_attempts", Kind.TIMEOUT, error, now, run_id)


def expire_leases(ids: list[UUID], now: datetime, run_id: UUID | None = None) -> Counter[str]:
    error = "lease expired: its agent no longer renewed it"
    return _end_overdue(ids, TaskDevice.objects.lapsed, "expire_leases", Kind.LEASE_EXPIRED, error, now, run_id)


@transaction.atomic
def _end_overdue(
    ids: list[UUID],
    overdue: Callable[[datetime], QuerySet[TaskDevice]],
    rule: str,
    kind: str,
    error: str,
    now: datetime,
    run_id: UUID | None,
) -> Counter[str]:
    """Those of the rows that are still overdue once their tasks are locked: a result that came first stands."""
    tasks = lock_tasks_of(ids)
    rows = list(overdue(now).filter(pk__in=ids).order_by("pk").select_for_update(no_key=True))
    end_runs(rows, tasks, now, kind=kind, error=error)
    _decide_ends(rule, rows, run_id)
    for task_id in tasks:
        settle(task_id, now)
    return Counter({kind: len(rows)}) if rows else Counter()


def lock_tasks_of(ids: Iterable[UUID]) -> dict[UUID, Task]:
    wanted = TaskDevice.objects.filter(pk__in=list(ids)).values("task")
    return {task.pk: task for task in Task.objects.filter(pk__in=wanted).locked()}


def _decide_ends(rule: str, rows: list[TaskDevice], run_id: UUID | None) -> None:
    after = dict(TaskDevice.objects.filter(pk__in=[row.pk for row in rows]).values_list("pk", "status"))
    record(
        decide(
            rule,
            row,
            before={"status": row.status},
            after={"status": after[row.pk]},
            inputs={
                "attempt": row.attempt,
                "lease_expires_at": row.lease_expires_at and row.lease_expires_at.isoformat(),
                "deadline_at": row.deadline_at and row.deadline_at.isoformat(),
            },
            run_id=run_id,
        )
        for row in rows
    )


@transaction.atomic
def give_up_rows(
    ids: list[UUID],
    hopeless: Callable[[datetime], QuerySet[TaskDevice]],
    kind: str,
    now: datetime,
    run_id: UUID | None = None,
) -> Counter[str]:
    """Cancel pending rows nobody will claim, so that the queue moves and others can fill device_count."""
    tasks = lock_tasks_of(ids)
    rows = list(hopeless(now).filter(pk__in=ids).order_by("pk").select_for_update(no_key=True, of=("self",)))
    cancel_rows(TaskDevice.objects.pending().filter(pk__in=[row.pk for row in rows]), now, kind)
    _decide_ends("give_up_rows", rows, run_id)
    for task_id in tasks:
        settle(task_id, now)
    return Counter({kind: len(rows)}) if rows else Counter()
