from collections.abc import Callable, Mapping
from datetime import datetime
from uuid import UUID

from django.db.models import QuerySet

from config.sweeping import Sweep
from devices import services
from devices.models import PC, Device, TaskDevice

Kind = TaskDevice.FailureKind


def time_out_attempts(sweep: Sweep) -> None:
    overdue = TaskDevice.objects.timed_out(sweep.now)
    sweep.pages(overdue, lambda ids: services.time_out_attempts(ids, sweep.now, sweep.run_id))


def expire_leases(sweep: Sweep) -> None:
    overdue = TaskDevice.objects.lapsed(sweep.now)
    sweep.pages(overdue, lambda ids: services.expire_leases(ids, sweep.now, sweep.run_id))


def mark_silent_pcs(sweep: Sweep) -> None:
    """PCs with their devices, then the rows that wait for those in vain."""
    now, run_id = sweep.now, sweep.run_id
    sweep.pages(PC.objects.silent(now), lambda ids: {"offline": services.mark_pcs_offline(ids, now, run_id)})
    sweep.pages(
        Device.objects.stray(),
        lambda ids: {"stray": services.take_offline(Device.objects.stray().filter(pk__in=ids), now, run_id)},
        label="stray",
    )
    _give_up(sweep, TaskDevice.objects.pc_away, Kind.PC_OFFLINE)
    _give_up(sweep, TaskDevice.objects.device_gone, Kind.DEVICE_OFFLINE)


def promote_next_task(sweep: Sweep) -> None:
    """Rows nobody will claim first: they may be all that the running task waits for."""
    _give_up(sweep, TaskDevice.objects.unservable, Kind.CANCELLED)
    sweep.repeat(lambda: services.advance_queue(sweep.clock(), sweep.run_id))


def _give_up(sweep: Sweep, hopeless: Callable[[datetime], QuerySet[TaskDevice]], kind: str) -> None:
    def handle(ids: list[UUID]) -> Mapping[str, int]:
        return services.give_up_rows(ids, hopeless, kind, sweep.now, sweep.run_id)

    sweep.pages(hopeless(sweep.now), handle, label=kind)
