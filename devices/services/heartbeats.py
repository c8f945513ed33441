"""What a PC says of itself and its devices."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from devices.models import PC, Device, Task, TaskDevice
from devices.services.attempts import lock_tasks_of
from devices.services.ends import end_runs
from devices.services.queue import settle

Status = Device.Status
MISSES_ALLOWED = 1
TELEMETRY = ("connection_id", "model", "battery", "labels")


@dataclass(frozen=True)
class DeviceReport:
    """A device in a PC's list. `telemetry` holds what was said; the rest stays as it was."""

    serial: str
    offline: bool
    telemetry: dict[str, Any]


@transaction.atomic
def record_heartbeat(
    pc: PC,
    now: datetime,
    agent_version: str | None = None,
    system: dict[str, Any] | None = None,
    devices: list[DeviceReport] | None = None,
) -> None:
    """A sign of life. A complete list of devices tells who is there and who is not; None tells nothing."""
    PC.objects.select_for_update(no_key=True).get(pk=pc.pk)
    if devices is not None:
        _record_list(pc, {report.serial: report for report in devices}, now)
    said = {"agent_version": agent_version, "system": system}
    PC.objects.filter(pk=pc.pk).update(
        status=PC.Status.ONLINE,
        last_heartbeat_at=now,
        **{name: value for name, value in said.items() if value is not None},
    )


def _record_list(pc: PC, reports: dict[str, DeviceReport], now: datetime) -> None:
    _write_new(pc, reports, now)
    runs, tasks = _lock_runs_of_the_gone(pc, reports)
    known = _lock_known(pc, reports)
    end_runs(runs, tasks, now, kind=TaskDevice.FailureKind.DEVICE_OFFLINE, error="device offline: its PC says so")
    _write_listed(pc, reports, known, now)
    _write_missing([d for d in known.values() if d.pc_id == pc.pk and d.serial not in reports], now)
    for task_id in tasks:
        settle(task_id, now)


def _write_new(pc: PC, reports: dict[str, DeviceReport], now: datetime) -> None:
    """First of all, and in one order: another PC may list the same new devices in this instant."""
    known = set(Device.objects.filter(serial__in=list(reports)).values_list("serial", flat=True))
    new = [Device(serial=serial, pc=pc, offline_at=now) for serial in sorted(reports.keys() - known)]
    Device.objects.bulk_create(new, ignore_conflicts=True)


def _lock_runs_of_the_gone(pc: PC, reports: dict[str, DeviceReport]) -> tuple[list[TaskDevice], dict[UUID, Task]]:
    """Before any device is locked, because tasks and rows come before devices."""
    away = Q(device__serial__in=[report.serial for report in reports.values() if report.offline])
    missed = Q(device__missed_lists__gte=MISSES_ALLOWED) & ~Q(device__serial__in=list(reports))
    usable = [Status.ONLINE, Status.BUSY, Status.OFFLINE]
    runs = TaskDevice.objects.running().filter(away | missed, device__pc=pc, device__status__in=usable)
    ids = list(runs.values_list("pk", flat=True))
    if not ids:
        return [], {}
    tasks = lock_tasks_of(ids)
    return list(TaskDevice.objects.running().filter(pk__in=ids).order_by("pk").select_for_update(no_key=True)), tasks


def _lock_known(pc: PC, reports: dict[str, DeviceReport]) -> dict[str, Any]:
    """The PC's devices and those it claims to have now, by serial. One at work elsewhere stays there."""
    wanted = Device.objects.filter(Q(pc=pc) | Q(serial__in=list(reports)))
    locked = list(wanted.in_order().values_list("pk", flat=True))
    # Read after the locks are held: a run that ended while we waited must not leave its device busy for good.
    running = TaskDevice.objects.running().filter(device=OuterRef("pk"))
    found = Device.objects.filter(pk__in=locked).annotate(at_work=Exists(running))
    return {device.serial: device for device in found}


def _write_listed(pc: PC, reports: dict[str, DeviceReport], known: dict[str, Any], now: datetime) -> None:
    rows: list[Device] = []
    online: list[str] = []
    busy: list[str] = []
    offline: list[str] = []
    for serial, device in known.items():
        report = reports.get(serial)
        if report is None or (device.pc_id != pc.pk and device.at_work):
            continue
        rows.append(_told(pc, report, device, now))
        (offline if report.offline else busy if device.at_work else online).append(serial)
    Device.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["serial"],
        update_fields=["pc", *TELEMETRY, "listed", "missed_lists"],
    )
    listed = Device.objects.filter(pc=pc)
    usable = [Status.ONLINE, Status.BUSY, Status.OFFLINE]
    for serials, target in ((online, Status.ONLINE), (busy, Status.BUSY)):
        moved = listed.filter(serial__in=serials, status__in=usable).exclude(status=target)
        moved.update(status=target, offline_at=None)
    _go_offline(listed.filter(serial__in=offline), now)


def _told(pc: PC, report: DeviceReport, device: Any, now: datetime) -> Device:
    """What to write to the device of this serial; its state is set with the others'."""
    before = {name: getattr(device, name) for name in TELEMETRY}
    return Device(
        serial=report.serial,
        pc=pc,
        listed=not report.offline,
        missed_lists=0,
        offline_at=now,
        **{**before, **report.telemetry},
    )


def _write_missing(missing: list[Any], now: datetime) -> None:
    keys = [device.pk for device in missing]
    again = [device.pk for device in missing if device.missed_lists >= MISSES_ALLOWED]
    if keys:
        # The count stops at two: what matters is only that there was one before.
        Device.objects.filter(pk__in=set(keys) - set(again)).update(missed_lists=MISSES_ALLOWED, listed=False)
        _go_offline(Device.objects.filter(pk__in=again), now)


def _go_offline(devices: Any, now: datetime) -> None:
    devices.filter(status__in=[Status.ONLINE, Status.BUSY]).update(status=Status.OFFLINE, offline_at=now)
