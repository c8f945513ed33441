"""PCs and devices: who is there, who is out of use."""

import re
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, QuerySet, Subquery, TextField, Value
from django.db.models.functions import Coalesce, NullIf

from config.decisions import decide, decide_bulk, record
from config.errors import Conflict, Invalid
from devices.models import PC, PC_NUMBER, Device, DeviceHistory, TaskDevice
from devices.services.ends import cancel_rows
from devices.services.queue import lock_active_task, settle

Status = Device.Status


def assign_agent(user: Any, pc_number: str) -> PC:
    """Make the client the agent of the PC, which is created when missing."""
    if not re.match(PC_NUMBER, pc_number):
        raise Invalid(f"{pc_number!r} is not a PC number such as PC-01", attr="pc")
    pc, _created = PC.objects.update_or_create(pc_number=pc_number, defaults={"agent": user})
    return pc


def create_pc(pc_number: str, max_slots: int) -> PC:
    try:
        with transaction.atomic():
            return PC.objects.create(pc_number=pc_number, max_slots=max_slots)
    except IntegrityError:
        raise Conflict(f"{pc_number} exists already.", code="unique", attr="pc_number") from None


def set_max_slots(pc: PC, max_slots: int) -> None:
    """Runs above the new number go on; the PC gets no more until they have ended."""
    PC.objects.filter(pk=pc.pk).update(max_slots=max_slots)


@transaction.atomic
def mark_pcs_offline(ids: list[UUID], now: datetime, run_id: UUID | None = None) -> int:
    """Those of the PCs that are still silent, with their devices; a heartbeat that comes first wins.

    Their runs go on: they may be done before the lease lapses.
    """
    silent = list(PC.objects.silent(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",)))
    PC.objects.filter(pk__in=[pc.pk for pc in silent]).update(status=PC.Status.OFFLINE)
    take_offline(Device.objects.filter(pc__in=silent), now, run_id)
    record(
        decide(
            "mark_silent_pcs",
            pc,
            before={"status": PC.Status.ONLINE},
            after={"status": PC.Status.OFFLINE},
            inputs={"last_heartbeat_at": pc.last_heartbeat_at.isoformat() if pc.last_heartbeat_at else None},
            run_id=run_id,
        )
        for pc in silent
    )
    return len(silent)


@transaction.atomic
def take_offline(devices: QuerySet[Device], now: datetime, run_id: UUID | None = None) -> int:
    """Online and busy ones; error and quarantined are stronger."""
    found = list(devices.filter(status__in=[Status.ONLINE, Status.BUSY]).select_related("pc").in_order())  # type: ignore[attr-defined]
    Device.objects.filter(pk__in=[device.pk for device in found]).update(status=Status.OFFLINE, offline_at=now)
    by_pc: dict[PC, list[UUID]] = {}
    for device in found:
        by_pc.setdefault(device.pc, []).append(device.pk)
    record(
        decide_bulk("mark_silent_pcs", pc, keys, before={}, after={"devices": Status.OFFLINE}, inputs={}, run_id=run_id)
        for pc, keys in by_pc.items()
    )
    return len(found)


@transaction.atomic
def quarantine_devices(ids: list[UUID], actor: Any, reason: str, now: datetime) -> list[UUID]:
    """Out of use until recovered; a waiting row is cancelled at once, a running one may still finish."""
    task = lock_active_task()
    devices = list(Device.objects.filter(pk__in=ids).exclude(status=Status.QUARANTINED).in_order())
    keys = [device.pk for device in devices]
    Device.objects.filter(pk__in=keys).update(status=Status.QUARANTINED)
    cancel_rows(TaskDevice.objects.pending().filter(device__in=keys), now, TaskDevice.FailureKind.CANCELLED)
    _remember(devices, DeviceHistory.Act.QUARANTINE, actor, reason, now, lambda _device: Status.QUARANTINED)
    if task is not None:
        settle(task.pk, now)
    return keys


@transaction.atomic
def recover_devices(ids: list[UUID], actor: Any, reason: str, now: datetime) -> list[UUID]:
    """Back to what its PC says of it. The count of errors stays.

    The PC is not locked: should it fall silent this instant, the sweep takes the device offline, and until then
    nobody counts a device of an offline PC as eligible.
    """
    out_of_use = Device.objects.filter(pk__in=ids, status__in=[Status.ERROR, Status.QUARANTINED])
    running = TaskDevice.objects.running().filter(device=OuterRef("pk"))
    devices = list(out_of_use.select_related("pc").annotate(at_work=Exists(running)).in_order())
    for target in (Status.ONLINE, Status.BUSY, Status.OFFLINE):
        keys = [device.pk for device in devices if _recovered(device) == target]
        offline_at = now if target == Status.OFFLINE else None
        Device.objects.filter(pk__in=keys).update(
            status=target, error_reason=None, errored_at=None, offline_at=offline_at
        )
    _remember(devices, DeviceHistory.Act.RECOVER, actor, reason, now, _recovered)
    return [device.pk for device in devices]


@transaction.atomic
def break_down_devices(now: datetime) -> int:
    """Put in error again what came back from a final failure without being recovered. It was counted then."""
    failed = TaskDevice.objects.filter(device=OuterRef("pk"), final=True, retryable=True).order_by("-completed_at")
    why = Coalesce(NullIf("error", Value("")), "failure_kind", output_field=TextField())
    devices = list(Device.objects.filter(pk__in=TaskDevice.objects.unanswered().values("device")).in_order())
    keys = [device.pk for device in devices]
    Device.objects.filter(pk__in=keys).update(
        status=Status.ERROR, errored_at=now, offline_at=None, error_reason=Subquery(failed.values(why=why)[:1])
    )
    _decide_states("break_down_devices", devices, lambda _device: Status.ERROR)
    return len(devices)


@transaction.atomic
def correct_busy_devices(now: datetime) -> int:
    """Busy is who has a running row. Looked at again under the lock: a run may have begun or ended meanwhile."""
    locked = Device.objects.filter(pk__in=Device.objects.mistaken().values("pk")).in_order()
    devices = list(Device.objects.mistaken().filter(pk__in=[device.pk for device in locked]))
    opposite = {Status.BUSY: Status.ONLINE, Status.ONLINE: Status.BUSY}
    for before, after in opposite.items():
        Device.objects.filter(pk__in=[d.pk for d in devices if d.status == before]).update(status=after)
    _decide_states("correct_busy_devices", devices, lambda device: opposite[Status(device.status)])
    return len(devices)


def _decide_states(rule: str, devices: list[Device], after: Any) -> None:
    record(
        decide(rule, device, before={"status": device.status}, after={"status": after(device)}) for device in devices
    )


def _recovered(device: Any) -> Status:
    if device.pc.status != PC.Status.ONLINE or not device.listed:
        return Status.OFFLINE
    return Status.BUSY if device.at_work else Status.ONLINE


def _remember(devices: list[Device], act: str, actor: Any, reason: str, now: datetime, after: Any) -> None:
    DeviceHistory.objects.bulk_create(
        DeviceHistory(
            device=device,
            act=act,
            actor=actor.get_username(),
            reason=reason,
            before=device.status,
            after=after(device),
            created_at=now,
        )
        for device in devices
    )
