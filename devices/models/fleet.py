"""PCs and the devices they hold."""

from datetime import datetime
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import StateField, Swept, WaitsFor, state_triggers
from config.triggers import append_only
from devices.triggers import device_times, pc_times

if TYPE_CHECKING:
    from devices.models.work import Task

PC_NUMBER = r"^PC-[0-9]{2,6}\Z"
MAX_SLOTS = 20


class PCQuerySet(models.QuerySet["PC"]):
    def silent(self, now: datetime) -> "PCQuerySet":
        """Online, but not heard of for longer than a living agent would stay silent."""
        return self.filter(status=PC.Status.ONLINE, last_heartbeat_at__lt=now - settings.PC_OFFLINE_AFTER)

    def stale(self, now: datetime) -> "PCQuerySet":
        return self.alias(heard_at=Coalesce("last_heartbeat_at", "created_at")).filter(
            heard_at__lt=now - settings.PC_STALE_AFTER
        )

    def away(self, now: datetime) -> "PCQuerySet":
        """Silent for so long that the queue must not wait for them."""
        return self.filter(last_heartbeat_at__lt=now - settings.PC_AWAY_AFTER)


class PC(models.Model):
    """A machine full of devices. Ours are born offline: only a heartbeat is a sign of life."""

    class Status(models.TextChoices):
        ONLINE = "online", _("online")
        OFFLINE = "offline", _("offline")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    pc_number = models.CharField(_("PC"), max_length=9, unique=True, validators=[RegexValidator(PC_NUMBER)])
    agent = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="pcs", verbose_name=_("agent")
    )
    max_slots = models.SmallIntegerField(
        _("slots"), default=MAX_SLOTS, validators=[MinValueValidator(1), MaxValueValidator(MAX_SLOTS)]
    )
    agent_version = models.CharField(_("agent version"), max_length=100, blank=True, default="")
    system = models.JSONField(_("system"), default=dict, blank=True)
    status = StateField(_("status"), choices=Status.choices, default=Status.OFFLINE)
    last_heartbeat_at = models.DateTimeField(_("last heartbeat"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    objects = PCQuerySet.as_manager()
    # A person's SQL may bring in what is there already.
    born = tuple(Status.values)
    liveness = {
        Status.ONLINE: Swept("devices.mark_silent_pcs", _("180 s without a heartbeat"), since="last_heartbeat_at"),
        Status.OFFLINE: WaitsFor(_("its agent's next heartbeat")),
    }

    class Meta:
        db_table = "pcs"
        verbose_name = _("PC")
        verbose_name_plural = _("PCs")
        triggers = [*state_triggers(), *pc_times()]
        constraints = [
            models.CheckConstraint(condition=Q(pc_number__regex=r"^PC-[0-9]{2,6}$"), name="pcs_pc_number"),
            models.CheckConstraint(condition=Q(max_slots__range=(1, MAX_SLOTS)), name="pcs_max_slots"),
            models.CheckConstraint(
                condition=~Q(status="online") | Q(last_heartbeat_at__isnull=False), name="pcs_online_was_heard"
            ),
        ]

    def __str__(self) -> str:
        return self.pc_number

    def is_stale(self, now: datetime) -> bool:
        return now - (self.last_heartbeat_at or self.created_at) > settings.PC_STALE_AFTER

    @transition(field=status, source=Status.OFFLINE, target=Status.ONLINE)
    def come_online(self) -> None: ...

    @transition(field=status, source=Status.ONLINE, target=Status.OFFLINE)
    def go_offline(self) -> None: ...


class PCSummary(models.Model):
    """The view pc_device_summary: a PC's devices and slots, counted where they are true."""

    pc = models.OneToOneField(PC, models.DO_NOTHING, primary_key=True, related_name="summary")
    pc_number = models.TextField()
    status = models.TextField()
    last_heartbeat = models.DateTimeField(null=True)
    device_count = models.IntegerField()
    eligible_device_count = models.IntegerField()
    running_count = models.IntegerField()
    target = models.IntegerField()
    free_slots = models.IntegerField()
    error_count = models.IntegerField()
    offline_count = models.IntegerField()

    class Meta:
        managed = False
        db_table = "pc_device_summary"
        default_permissions = ()

    def __str__(self) -> str:
        return self.pc_number


class DeviceQuerySet(models.QuerySet["Device"]):
    def eligible(self) -> "DeviceQuerySet":
        """Counts for slots: usable, on a living PC. Busy ones count, or refilling would stop."""
        return self.filter(status__in=[Device.Status.ONLINE, Device.Status.BUSY], pc__status=PC.Status.ONLINE)

    def suiting(self, task: "Task") -> "DeviceQuerySet":
        """Has every label the task asks for and, for a retry, is one of those that failed."""
        from devices.models.work import TaskDevice

        suiting = self.filter(labels__contains=task.selector) if task.selector else self
        if task.retry_of_id is None:
            return suiting
        failed = TaskDevice.objects.filter(task_id=task.retry_of_id, device=OuterRef("pk"), status="failed")
        return suiting.filter(Exists(failed))

    def without_row_of(self, task: "Task") -> "DeviceQuerySet":
        from devices.models.work import TaskDevice

        return self.filter(~Exists(TaskDevice.objects.filter(task=task, device=OuterRef("pk"))))

    def gone(self, now: datetime) -> "DeviceQuerySet":
        """Offline for so long that the queue must not wait for them."""
        return self.filter(status=Device.Status.OFFLINE, offline_at__lt=now - settings.PC_AWAY_AFTER)

    def stray(self) -> "DeviceQuerySet":
        """Up, on a PC that is not: it was recovered in the instant its PC fell silent."""
        return self.filter(status__in=[Device.Status.ONLINE, Device.Status.BUSY], pc__status=PC.Status.OFFLINE)

    def mistaken(self) -> "DeviceQuerySet":
        """Says busy without a run, or online with one."""
        from devices.models.work import TaskDevice

        running = TaskDevice.objects.running().filter(device=OuterRef("pk"))
        idle, at_work = ~Exists(running), Exists(running)
        return self.filter(Q(idle, status=Device.Status.BUSY) | Q(at_work, status=Device.Status.ONLINE))

    def in_order(self) -> "DeviceQuerySet":
        """Whoever locks several devices locks them in this order, so nobody waits in a circle."""
        return self.order_by("pk").select_for_update(no_key=True, of=("self",))


class Device(models.Model):
    """A piece of hardware, known by its serial wherever it is plugged in."""

    class Status(models.TextChoices):
        ONLINE = "online", _("online")
        BUSY = "busy", _("busy")
        OFFLINE = "offline", _("offline")
        ERROR = "error", _("error")
        QUARANTINED = "quarantined", _("quarantined")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    serial = models.CharField(_("serial"), max_length=100, unique=True)
    connection_id = models.CharField(_("connection"), max_length=200, null=True, blank=True)
    pc = models.ForeignKey(PC, models.PROTECT, related_name="devices", verbose_name=_("PC"))
    model = models.CharField(_("model"), max_length=200, blank=True, default="")
    battery = models.SmallIntegerField(_("battery"), null=True, blank=True)
    labels = models.JSONField(_("labels"), default=dict, blank=True)
    status = StateField(_("status"), choices=Status.choices, default=Status.OFFLINE)
    # In its PC's last complete list, and not reported offline there.
    listed = models.BooleanField(_("listed"), default=False)
    missed_lists = models.SmallIntegerField(_("lists missed"), default=0)
    offline_at = models.DateTimeField(_("offline since"), null=True, blank=True)
    error_reason = models.TextField(_("reason"), null=True, blank=True)
    errored_at = models.DateTimeField(_("in error since"), null=True, blank=True)
    total_errors = models.IntegerField(_("errors"), default=0)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    objects = DeviceQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.ONLINE: Swept("devices.mark_silent_pcs", _("180 s after its PC's last heartbeat"), since="created_at"),
        Status.BUSY: Swept("devices.time_out_attempts", _("20 minutes after the run's start"), since="created_at"),
        Status.OFFLINE: WaitsFor(_("its PC to list it again")),
        Status.ERROR: WaitsFor(_("an operator who recovers it")),
        Status.QUARANTINED: WaitsFor(_("an operator who recovers it")),
    }

    class Meta:
        db_table = "devices"
        verbose_name = _("device")
        verbose_name_plural = _("devices")
        triggers = [*state_triggers(), *device_times()]
        permissions = [("act_as_agent", "Can report, claim and finish for its own PC")]
        constraints = [
            models.CheckConstraint(
                condition=Q(battery__isnull=True) | Q(battery__range=(0, 100)), name="devices_battery"
            ),
            models.CheckConstraint(
                condition=~Q(status="offline") | Q(offline_at__isnull=False), name="devices_offline_since"
            ),
            models.CheckConstraint(
                condition=~Q(status="error") | Q(errored_at__isnull=False), name="devices_error_since"
            ),
            models.CheckConstraint(condition=Q(total_errors__gte=0), name="devices_total_errors"),
        ]

    def __str__(self) -> str:
        return self.serial

    @transition(field=status, source=[Status.OFFLINE, Status.BUSY], target=Status.ONLINE)
    def come_online(self) -> None: ...

    @transition(field=status, source=[Status.ONLINE, Status.OFFLINE], target=Status.BUSY)
    def start_work(self) -> None: ...

    @transition(field=status, source=[Status.ONLINE, Status.BUSY], target=Status.OFFLINE)
    def go_offline(self) -> None: ...

    @transition(
        field=status,
        source=[Status.ONLINE, Status.BUSY, Status.OFFLINE, Status.QUARANTINED],
        target=Status.ERROR,
    )
    def break_down(self) -> None: ...

    @transition(
        field=status,
        source=[Status.ONLINE, Status.BUSY, Status.OFFLINE, Status.ERROR],
        target=Status.QUARANTINED,
    )
    def quarantine(self) -> None: ...

    @transition(field=status, source=[Status.ERROR, Status.QUARANTINED], target=Status.ONLINE)
    def recover(self) -> None: ...

    @transition(field=status, source=[Status.ERROR, Status.QUARANTINED], target=Status.OFFLINE)
    def recover_offline(self) -> None: ...

    @transition(field=status, source=[Status.ERROR, Status.QUARANTINED], target=Status.BUSY)
    def recover_busy(self) -> None: ...


class DeviceHistory(models.Model):
    """What people did to a device: who, when, why."""

    class Act(models.TextChoices):
        RECOVER = "recover", _("recovered")
        QUARANTINE = "quarantine", _("quarantined")

    id = models.BigAutoField(primary_key=True)
    device = models.ForeignKey(Device, models.PROTECT, related_name="history")
    act = models.CharField(_("act"), max_length=20, choices=Act.choices)
    actor = models.CharField(_("who"), max_length=150)
    reason = models.CharField(_("reason"), max_length=500, blank=True, default="")
    before = models.CharField(_("before"), max_length=20)
    after = models.CharField(_("after"), max_length=20)
    created_at = models.DateTimeField(_("at"))

    class Meta:
        db_table = "device_history"
        verbose_name = _("device history")
        verbose_name_plural = _("device history")
        default_permissions = ()
        ordering = ["id"]
        triggers = append_only("device_history")

    def __str__(self) -> str:
        return f"{self.act} {self.device_id}"
