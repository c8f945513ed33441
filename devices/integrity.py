"""What must never be true of the queue, and what the monitoring asks about it."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from django.conf import settings
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Sum
from django.db.models.functions import Coalesce, Least
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from prometheus_client.core import GaugeMetricFamily

from config import sweeping
from config.integrity import Invariant
from devices import services
from devices.models import MAX_SLOTS, PC, Device, PCSummary, Task, TaskDevice


def two_running_tasks(now: datetime) -> QuerySet[Task]:
    running = Task.objects.filter(status=Task.Status.RUNNING)
    return running.filter(Exists(running.filter(pk__lt=OuterRef("pk"))))


def running_without_lease(now: datetime) -> QuerySet[TaskDevice]:
    return TaskDevice.objects.running().filter(
        Q(lease_expires_at=None) | Q(deadline_at=None) | Q(claimed_by=None) | Q(lease_expires_at__gt=F("deadline_at"))
    )


def attempt_above_max(now: datetime) -> QuerySet[TaskDevice]:
    return TaskDevice.objects.filter(attempt__gt=F("max_attempts"))


def final_failure_without_device_error(now: datetime) -> QuerySet[TaskDevice]:
    return TaskDevice.objects.unanswered()


def slots_above_target(now: datetime) -> QuerySet[PCSummary]:
    """Measured at what the PC may run at most: devices that left since do not make their runs too many."""
    return PCSummary.objects.filter(running_count__gt=Least(F("pc__max_slots"), MAX_SLOTS))


def task_that_cannot_end(now: datetime) -> QuerySet[Task]:
    """Running though all had their turn, or a day longer than anything in it may take; or waiting behind nothing."""
    just_now = now - settings.STUCK_AFTER
    late = just_now - settings.TASK_STALLED_AFTER
    running = Task.objects.filter(status=Task.Status.RUNNING)
    rows = TaskDevice.objects.filter(task=OuterRef("pk"))
    idle = Q(~Exists(rows.filter(changed_at__gte=late)), started_at__lt=late)
    stuck = Q(Exists(rows.running().filter(deadline_at__lt=just_now)))
    unsettled = Q(Exists(rows.open())) | Q(Exists(rows.filter(completed_at__gte=just_now)))
    over = ~unsettled & Q(pk__in=running.counted().filter(taken__gte=F("device_count")).values("pk"))
    if running.exists():
        return running.filter(idle | stuck | over)
    return Task.objects.filter(status=Task.Status.PENDING, created_at__lt=just_now)


def busy_without_run(now: datetime) -> QuerySet[Device]:
    return Device.objects.mistaken()


def run_the_sweeps(now: datetime) -> Counter[str]:
    """What the next minute's tick would do."""
    done: Counter[str] = Counter()
    for name in ("time_out_attempts", "expire_leases", "mark_silent_pcs", "promote_next_task"):
        done.update((sweeping.run(f"devices.{name}", now=now, wait=True) or {}).get("counts", {}))
    return done


INVARIANTS = [
    Invariant("devices.two_running_tasks", "error", _("More than one task is running."), two_running_tasks),
    Invariant(
        "devices.running_without_lease",
        "error",
        _("A run without a lease, a deadline or an owner: nothing would end it."),
        running_without_lease,
    ),
    Invariant("devices.attempt_above_max", "error", _("A run was started too often."), attempt_above_max),
    Invariant(
        "devices.final_failure_without_device_error",
        "error",
        _("A run failed for good, and its device was put back to work without anybody recovering it."),
        final_failure_without_device_error,
        healer=lambda now: Counter(error=services.break_down_devices(now)),
        heals=_("puts the devices in error until somebody recovers them"),
    ),
    Invariant(
        "devices.slots_above_target",
        "warning",
        _("A PC runs more than its slots allow. After lowering its slots this passes by itself."),
        slots_above_target,
    ),
    Invariant(
        "devices.task_that_cannot_end",
        "warning",
        _("A task neither runs nor ends, though its deadlines have passed: the sweeps are late."),
        task_that_cannot_end,
        healer=run_the_sweeps,
        heals=_("runs the sweeps of the queue now"),
    ),
    Invariant(
        "devices.busy_without_run",
        "error",
        _("A device says busy without a run, or idle with one."),
        busy_without_run,
        healer=lambda now: Counter(corrected=services.correct_busy_devices(now)),
        heals=_("makes busy what runs and online what does not"),
    ),
]


def metrics() -> Iterator[GaugeMetricFamily]:
    """The whole farm at a glance; PCs one by one are in the view pc_device_summary."""
    totals = PCSummary.objects.aggregate(
        target=Coalesce(Sum("target"), 0),
        running=Coalesce(Sum("running_count"), 0),
        free=Coalesce(Sum("free_slots"), 0),
    )
    slots = GaugeMetricFamily("signalbox_device_slots", "Slots of all PCs", labels=["kind"])
    for kind, count in totals.items():
        slots.add_metric([kind], count)
    yield slots
    stale = GaugeMetricFamily("signalbox_stale_pcs", "Online PCs not heard of for 90 seconds")
    stale.add_metric([], PC.objects.filter(status=PC.Status.ONLINE).stale(timezone.now()).count())
    yield stale
