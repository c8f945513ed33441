"""Tasks, the execution of each on a device, and their history."""

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connection, models
from django.db.models import Count, Exists, F, OuterRef, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import StateField, Swept, state_triggers
from config.triggers import append_only, undeletable
from devices.models.fleet import PC, Device, DeviceHistory
from devices.triggers import row_history, task_times

# Fixed by the database: deadline_at = started_at + RUN_LIMIT, and no lease reaches beyond it.
RUN_LIMIT = timedelta(minutes=20)
MOST_DEVICES = 1_000_000  # that one task may ask for
LEASE = timedelta(minutes=5)


START_RUNS = """
INSERT INTO task_devices AS row (id, task_id, device_id, status, attempt, claimed_by_id, started_at, deadline_at,
       lease_expires_at, changed_at, created_at)
SELECT id, %(task)s, device_id, 'running', 1, %(pc)s, %(now)s, %(deadline)s, %(lease)s, %(now)s, %(now)s
  FROM unnest(%(ids)s::uuid[], %(devices)s::uuid[]) AS chosen (id, device_id)
ON CONFLICT (task_id, device_id) DO UPDATE
   SET status = EXCLUDED.status, attempt = row.attempt + 1, claimed_by_id = EXCLUDED.claimed_by_id,
       started_at = EXCLUDED.started_at, deadline_at = EXCLUDED.deadline_at,
       lease_expires_at = EXCLUDED.lease_expires_at, acked_at = NULL, ended_by = '', changed_at = EXCLUDED.changed_at
 WHERE row.status = 'pending'
RETURNING row.device_id, row.id, row.attempt, row.lease_expires_at, row.deadline_at
"""

COMPLETE_RUN = """
WITH task AS MATERIALIZED (
    SELECT tasks.id FROM tasks
      JOIN task_devices ON task_devices.task_id = tasks.id
      JOIN pcs ON pcs.id = task_devices.claimed_by_id
     WHERE task_devices.id = %(row)s AND pcs.agent_id = %(agent)s AND tasks.status = 'running'
       AND (%(last)s OR devices_taken - devices_done - devices_failed > 1)
       FOR NO KEY UPDATE OF tasks)
UPDATE task_devices
   SET status = 'success', result = %(result)s::jsonb, completed_at = %(now)s, lease_expires_at = NULL, error = NULL,
       failure_kind = NULL, timed_out = false, ended_by = 'complete', changed_at = %(now)s
  FROM task
 WHERE task_devices.id = %(row)s AND task_devices.attempt = %(attempt)s AND task_devices.status = 'running'
RETURNING task.id
"""


class TaskQuerySet(models.QuerySet["Task"]):
    def oldest_first(self) -> "TaskQuerySet":
        return self.order_by("created_at", "pk")

    def quiet(self) -> "TaskQuerySet":
        """Running with no row open."""
        return self.filter(status=Task.Status.RUNNING, devices_taken=F("devices_done") + F("devices_failed"))

    def counted(self) -> Any:
        """With what its rows say: how many were `taken`, `done` and `failed`."""
        status = TaskDevice.Status
        return self.annotate(
            taken=Count("rows", filter=~Q(rows__status=status.CANCELLED)),
            done=Count("rows", filter=Q(rows__status=status.SUCCESS)),
            failed=Count("rows", filter=Q(rows__status=status.FAILED)),
        )

    def locked(self) -> "TaskQuerySet":
        """In the order everybody takes them: a PC, then tasks by id, then their rows, then devices by id."""
        return self.order_by("pk").select_for_update(no_key=True, of=("self",))


class Task(models.Model):
    """A job for a number of devices. At most one runs; the oldest waiting one is next."""

    class Status(models.TextChoices):
        PENDING = "pending", _("pending")
        RUNNING = "running", _("running")
        SUCCESS = "success", _("success")
        FAILED = "failed", _("failed")
        CANCELLED = "cancelled", _("cancelled")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.CharField(_("name"), max_length=200)
    payload = models.JSONField(_("payload"), default=dict, null=True, blank=True)
    device_count = models.IntegerField(_("devices wanted"))
    selector = models.JSONField(_("selector"), default=dict, blank=True)
    status = StateField(_("status"), choices=Status.choices, default=Status.PENDING)
    error = models.TextField(_("error"), null=True, blank=True)
    retry_of = models.ForeignKey(
        "self", models.PROTECT, null=True, blank=True, related_name="retries", verbose_name=_("retry of")
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    completed_at = models.DateTimeField(_("completed"), null=True, blank=True)
    # Kept by the trigger of task_devices. Cancelled rows count in none of them.
    devices_taken = models.IntegerField(_("devices taken"), default=0)
    devices_done = models.IntegerField(_("devices done"), default=0)
    devices_failed = models.IntegerField(_("devices failed"), default=0)

    objects = TaskQuerySet.as_manager()
    ENDED = (Status.SUCCESS, Status.FAILED, Status.CANCELLED)
    # A person's SQL may bring in what is there already: history, a run under way.
    born = tuple(Status.values)
    liveness = {
        Status.PENDING: Swept("devices.promote_next_task", _("as soon as no task is running")),
        Status.RUNNING: Swept(
            "devices.promote_next_task",
            _("when no row is open, at the latest 24 hours without one"),
            since="started_at",
        ),
    }

    class Meta:
        db_table = "tasks"
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        triggers = [*state_triggers(), *task_times()]
        constraints = [
            models.UniqueConstraint(fields=["status"], condition=Q(status="running"), name="tasks_one_running"),
            models.CheckConstraint(condition=Q(device_count__gte=1), name="tasks_device_count"),
            models.CheckConstraint(
                condition=Q(devices_taken__lte=F("device_count"))
                & Q(devices_taken__gte=F("devices_done") + F("devices_failed")),
                name="tasks_counts",
            ),
            models.CheckConstraint(
                condition=~Q(status="running") | Q(started_at__isnull=False), name="tasks_running_was_started"
            ),
            models.CheckConstraint(
                condition=Q(status__in=["pending", "running"], completed_at__isnull=True)
                | Q(status__in=["success", "failed", "cancelled"], completed_at__isnull=False),
                name="tasks_completed_at",
            ),
        ]
        indexes = [
            models.Index(fields=["created_at", "id"], condition=Q(status="pending"), name="tasks_waiting"),
            models.Index(fields=["status", "id"], name="tasks_by_status"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def open_rows(self) -> int:
        return self.devices_taken - self.devices_done - self.devices_failed

    @transition(field=status, source=Status.PENDING, target=Status.RUNNING)
    def start(self) -> None: ...

    @transition(field=status, source=Status.RUNNING, target=Status.SUCCESS)
    def succeed(self) -> None: ...

    @transition(field=status, source=Status.RUNNING, target=Status.FAILED)
    def fail(self) -> None: ...

    @transition(field=status, source=[Status.PENDING, Status.RUNNING], target=Status.CANCELLED)
    def cancel(self) -> None: ...


class TaskDeviceQuerySet(models.QuerySet["TaskDevice"]):
    def pending(self) -> "TaskDeviceQuerySet":
        return self.filter(status=TaskDevice.Status.PENDING)

    def running(self) -> "TaskDeviceQuerySet":
        return self.filter(status=TaskDevice.Status.RUNNING)

    def open(self) -> "TaskDeviceQuerySet":
        return self.filter(status__in=[TaskDevice.Status.PENDING, TaskDevice.Status.RUNNING])

    def retrying(self) -> "TaskDeviceQuerySet":
        return self.pending().filter(attempt__gte=1)

    def timed_out(self, now: datetime) -> "TaskDeviceQuerySet":
        return self.running().filter(deadline_at__lt=now)

    def lapsed(self, now: datetime) -> "TaskDeviceQuerySet":
        """The lease is over and the deadline is not: past the deadline it is always a timeout."""
        return self.running().filter(lease_expires_at__lt=now, deadline_at__gte=now)

    def pc_away(self, now: datetime) -> "TaskDeviceQuerySet":
        return self.pending().filter(device__pc__in=PC.objects.away(now))

    def device_gone(self, now: datetime) -> "TaskDeviceQuerySet":
        return self.pending().filter(device__in=Device.objects.gone(now))

    def start_runs(
        self, task: Task, pc: PC, chosen: list[tuple[UUID, UUID]], now: datetime
    ) -> dict[UUID, tuple[UUID, int, datetime, datetime]]:
        """The next attempt of each (row, device), a row that is not there being made.

        By device: the row, the attempt, until when its lease and its time last.

        One statement where the ORM takes two and writes each new row twice; all agents wait for whoever is in here.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                START_RUNS,
                {
                    "task": task.pk,
                    "pc": pc.pk,
                    "now": now,
                    "deadline": now + RUN_LIMIT,
                    "lease": now + LEASE,
                    "ids": [row_id for row_id, _device_id in chosen],
                    "devices": [device_id for _row_id, device_id in chosen],
                },
            )
            return {device_id: (row, attempt, lease, end) for device_id, row, attempt, lease, end in cursor.fetchall()}

    def complete_run(
        self, row_id: UUID, attempt: int, agent_id: Any, result: Any, now: datetime, *, last: bool
    ) -> UUID | None:
        """Lock the task and end this very attempt as a success, if it runs for this agent: the task's id, else None.

        Unless it may be the `last`, only while other rows of the task are open: nothing follows from it then, and it
        needs no transaction around it.

        One statement where the ORM takes three, on the path every job goes. The lock comes first in it, and what the
        row has become meanwhile is looked at again when it is updated.
        """
        with connection.cursor() as cursor:
            cursor.execute(
                COMPLETE_RUN,
                {
                    "row": row_id,
                    "attempt": attempt,
                    "agent": agent_id,
                    "result": None if result is None else json.dumps(result),
                    "now": now,
                    "last": last,
                },
            )
            found = cursor.fetchone()
        return found[0] if found else None

    def unanswered(self) -> "TaskDeviceQuerySet":
        """Failed for good, the device is up or offline, and nobody has recovered it since."""
        recovered = DeviceHistory.objects.filter(
            device=OuterRef("device"), act=DeviceHistory.Act.RECOVER, created_at__gte=OuterRef("completed_at")
        )
        usable = [Device.Status.ONLINE, Device.Status.BUSY, Device.Status.OFFLINE]
        failed = self.filter(status=TaskDevice.Status.FAILED, final=True, retryable=True)
        return failed.filter(~Exists(recovered), device__status__in=usable)

    def unservable(self, now: datetime) -> "TaskDeviceQuerySet":
        """Pending rows nobody may claim, for good as far as anyone can tell, or nobody has for a day."""
        out_of_use = Q(device__status__in=[Device.Status.ERROR, Device.Status.QUARANTINED])
        unsuited = ~Q(device__labels__contains=F("task__selector"))
        over = Q(task__status__in=Task.ENDED) | Q(attempt__gte=F("max_attempts"))
        unclaimed = Q(changed_at__lt=now - settings.TASK_STALLED_AFTER)
        return self.pending().filter(out_of_use | unsuited | over | unclaimed)


class TaskDevice(models.Model):
    """One device's execution of a task: the single source of truth. Every write is a service's compare-and-set."""

    class Status(models.TextChoices):
        PENDING = "pending", _("pending")
        RUNNING = "running", _("running")
        SUCCESS = "success", _("success")
        FAILED = "failed", _("failed")
        CANCELLED = "cancelled", _("cancelled")

    class FailureKind(models.TextChoices):
        ERROR = "error", _("error")
        TIMEOUT = "timeout", _("timeout")
        LEASE_EXPIRED = "lease_expired", _("lease expired")
        DEVICE_OFFLINE = "device_offline", _("device offline")
        PC_OFFLINE = "pc_offline", _("PC offline")
        CANCELLED = "cancelled", _("cancelled")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    task = models.ForeignKey(Task, models.PROTECT, related_name="rows", db_index=False, verbose_name=_("task"))
    device = models.ForeignKey(Device, models.PROTECT, related_name="rows", verbose_name=_("device"))
    status = StateField(_("status"), choices=Status.choices, default=Status.PENDING)
    attempt = models.SmallIntegerField(_("attempt"), default=0)
    max_attempts = models.SmallIntegerField(_("attempts allowed"), default=3)
    claimed_by = models.ForeignKey(
        PC, models.PROTECT, null=True, blank=True, related_name="+", db_index=False, verbose_name=_("claimed by")
    )
    lease_expires_at = models.DateTimeField(_("lease until"), null=True, blank=True)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    deadline_at = models.DateTimeField(_("deadline"), null=True, blank=True)
    acked_at = models.DateTimeField(_("acknowledged"), null=True, blank=True)
    completed_at = models.DateTimeField(_("completed"), null=True, blank=True)
    result = models.JSONField(_("result"), null=True, blank=True)
    error = models.TextField(_("error"), null=True, blank=True)
    timed_out = models.BooleanField(_("timed out"), default=False)
    failure_kind = models.CharField(
        _("kind of failure"), max_length=20, choices=FailureKind.choices, null=True, blank=True
    )
    retryable = models.BooleanField(_("retryable"), default=True)
    final = models.BooleanField(_("final"), default=False)
    # The agent's verb that ended the last attempt, empty when the server ended it: repeating it is harmless.
    ended_by = models.CharField(_("ended by"), max_length=10, blank=True, default="")
    # When the status last changed, by the clock of whoever changed it: the trigger dates the history with it.
    changed_at = models.DateTimeField(_("changed"))
    created_at = models.DateTimeField(_("created"))

    objects = TaskDeviceQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.PENDING: Swept(
            "devices.mark_silent_pcs", _("20 minutes after its PC or device went away"), since="changed_at"
        ),
        Status.RUNNING: Swept(
            "devices.time_out_attempts", _("20 minutes after the attempt's start"), since="started_at"
        ),
    }

    class Meta:
        db_table = "task_devices"
        verbose_name = _("device run")
        verbose_name_plural = _("device runs")
        triggers = [*state_triggers(), *row_history()]
        constraints = [
            models.UniqueConstraint(fields=["task", "device"], name="task_devices_once"),
            models.UniqueConstraint(fields=["device"], condition=Q(status="running"), name="task_devices_one_running"),
            models.CheckConstraint(
                condition=Q(attempt__gte=0) & Q(attempt__lte=F("max_attempts")), name="task_devices_attempt"
            ),
            models.CheckConstraint(
                condition=Q(started_at__isnull=True, deadline_at__isnull=True)
                | Q(deadline_at=F("started_at") + RUN_LIMIT),
                name="task_devices_deadline",
            ),
            models.CheckConstraint(condition=Q(lease_expires_at__lte=F("deadline_at")), name="task_devices_lease"),
            models.CheckConstraint(
                condition=Q(
                    status="running",
                    attempt__gte=1,
                    claimed_by__isnull=False,
                    lease_expires_at__isnull=False,
                    deadline_at__isnull=False,
                )
                | (~Q(status="running") & Q(lease_expires_at__isnull=True)),
                name="task_devices_running_is_leased",
            ),
            models.CheckConstraint(
                condition=Q(status__in=["pending", "running"], completed_at__isnull=True)
                | Q(status__in=["success", "failed", "cancelled"], completed_at__isnull=False),
                name="task_devices_completed_at",
            ),
            models.CheckConstraint(condition=Q(final=False) | Q(status="failed"), name="task_devices_final"),
            models.CheckConstraint(
                condition=Q(failure_kind__isnull=True)
                | Q(
                    failure_kind__in=["error", "timeout", "lease_expired", "device_offline", "pc_offline", "cancelled"]
                ),
                name="task_devices_failure_kind",
            ),
        ]
        indexes = [
            models.Index(fields=["claimed_by"], condition=Q(status="running"), name="task_devices_running"),
            models.Index(fields=["created_at", "id"], condition=Q(status="pending"), name="task_devices_pending"),
            models.Index(fields=["status", "id"], name="task_devices_by_status"),
        ]

    def __str__(self) -> str:
        return f"{self.task_id} / {self.device_id}"

    @transition(field=status, source=Status.PENDING, target=Status.RUNNING)
    def claim(self) -> None: ...

    @transition(field=status, source=Status.RUNNING, target=Status.SUCCESS)
    def complete(self) -> None: ...

    @transition(field=status, source=Status.RUNNING, target=Status.PENDING)
    def schedule_retry(self) -> None: ...

    @transition(field=status, source=Status.RUNNING, target=Status.FAILED)
    def fail(self) -> None: ...

    @transition(field=status, source=[Status.PENDING, Status.RUNNING], target=Status.CANCELLED)
    def cancel(self) -> None: ...


class AttemptQuerySet(models.QuerySet["Attempt"]):
    NEWEST = 50_000

    def busy_slots(self, now: datetime, parts: int, length: timedelta) -> list[tuple[datetime, float]]:
        """How many runs went on at a time, on average, in each of the last `parts` spans of `length`.

        Raw: the ORM cannot join a series of times. Runs start in the order of their ids, so only the newest 50,000 are
        read, whatever the table holds.
        """
        first = now - parts * length
        with connection.cursor() as cursor:
            values: Any = {"now": now, "first": first, "length": length, "newest": self.NEWEST}
            cursor.execute(
                """
                WITH newest AS MATERIALIZED (
                    SELECT started_at, COALESCE(ended_at, %(now)s) AS ended_at FROM task_device_attempts
                     WHERE id > (SELECT max(id) FROM task_device_attempts) - %(newest)s
                       AND COALESCE(ended_at, %(now)s) > %(first)s)
                SELECT span, COALESCE(sum(EXTRACT(epoch FROM LEAST(ended_at, span + %(length)s)
                                                              - GREATEST(started_at, span)))
                                      FILTER (WHERE started_at IS NOT NULL), 0)
                  FROM generate_series(%(first)s, %(now)s - %(length)s, %(length)s) AS span
                  LEFT JOIN newest ON started_at < span + %(length)s AND ended_at > span
                 GROUP BY span ORDER BY span
                """,
                values,
            )
            return [(at, float(seconds) / length.total_seconds()) for at, seconds in cursor.fetchall()]


class Attempt(models.Model):
    """One run of a row, written by the trigger of task_devices. History: state is read from the row."""

    id = models.BigAutoField(primary_key=True)
    task_device = models.ForeignKey(TaskDevice, models.PROTECT, related_name="attempts", db_index=False)
    attempt_no = models.SmallIntegerField(_("attempt"))
    # The PC's number as it was: history names, it does not point.
    claimed_by = models.CharField(_("claimed by"), max_length=9)
    started_at = models.DateTimeField(_("started"))
    ended_at = models.DateTimeField(_("ended"), null=True)
    outcome = models.CharField(_("outcome"), max_length=20, null=True)
    error = models.TextField(_("error"), null=True)

    objects = AttemptQuerySet.as_manager()

    class Meta:
        db_table = "task_device_attempts"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        default_permissions = ()
        triggers = undeletable("task_device_attempts")
        constraints = [
            models.UniqueConstraint(fields=["task_device", "attempt_no"], name="task_device_attempts_once"),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, outcome__isnull=True)
                | Q(ended_at__isnull=False, outcome__isnull=False),
                name="task_device_attempts_ended",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.task_device_id} #{self.attempt_no}"


EVENTS = [
    "CREATED", "SENT", "ACKED", "SUCCEEDED", "FAILED", "TIMEOUT", "RETRY_SCHEDULED", "FAILED_FINAL", "CANCELLED",
]  # fmt: skip


class Event(models.Model):
    """What happened to a row, in the order it happened, written by the trigger of task_devices."""

    class Kind(models.TextChoices):
        CREATED = "CREATED", _("created")
        SENT = "SENT", _("sent")
        ACKED = "ACKED", _("acknowledged")
        SUCCEEDED = "SUCCEEDED", _("succeeded")
        FAILED = "FAILED", _("failed")
        TIMEOUT = "TIMEOUT", _("timed out")
        RETRY_SCHEDULED = "RETRY_SCHEDULED", _("retry scheduled")
        FAILED_FINAL = "FAILED_FINAL", _("failed for good")
        CANCELLED = "CANCELLED", _("cancelled")

    id = models.BigAutoField(primary_key=True)
    task_device = models.ForeignKey(TaskDevice, models.PROTECT, related_name="events", db_index=False)
    event = models.CharField(_("event"), max_length=20, choices=Kind.choices)
    attempt_no = models.SmallIntegerField(_("attempt"))
    created_at = models.DateTimeField(_("at"))

    class Meta:
        db_table = "tasks_event"
        verbose_name = _("event")
        verbose_name_plural = _("events")
        default_permissions = ()
        constraints = [models.CheckConstraint(condition=Q(event__in=EVENTS), name="tasks_event_kind")]
        indexes = [models.Index(fields=["task_device", "id"], name="tasks_event_of_row")]
        triggers = append_only("tasks_event")

    def __str__(self) -> str:
        return f"{self.task_device_id} {self.event}"
