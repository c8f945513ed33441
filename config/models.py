"""The few tables that belong to no domain."""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import StateField, Swept, state_triggers
from config.triggers import append_only


class SweepRun(models.Model):
    """One run of a sweep. A row without ended_at whose sweep nobody holds is a run that died."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.TextField(_("sweep"))
    now = models.DateTimeField(_("as of"))
    started_at = models.DateTimeField(_("started"))
    ended_at = models.DateTimeField(_("ended"), null=True)
    counts = models.JSONField(_("outcomes"), default=dict)
    error = models.TextField(_("error"), blank=True, default="")
    cursor = models.JSONField(_("goes on after"), default=dict)
    slot = models.SmallIntegerField(_("slot"), default=0)
    host = models.TextField(_("host"), default="")
    pid = models.IntegerField(_("process"), default=0)

    class Meta:
        db_table = "sweep_runs"
        verbose_name = _("sweep run")
        verbose_name_plural = _("sweep runs")
        indexes = [models.Index(fields=["name", "-started_at"], name="sweep_runs_latest")]
        permissions = [
            ("run_sweeps", "Can run sweeps by hand"),
            ("view_metrics", "Can read /metrics"),
            ("view_integrity", "Can read the integrity report"),
            ("heal_integrity", "Can heal integrity findings"),
            ("see_all_tenants", "Sees the rows of all applications"),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.started_at:%Y-%m-%d %H:%M:%S}"


class IntegrityReading(models.Model):
    """How many rows broke an invariant at a time: what the trend on the integrity page is drawn from."""

    id = models.BigAutoField(primary_key=True)
    name = models.TextField()
    count = models.IntegerField()
    measured_at = models.DateTimeField()

    class Meta:
        db_table = "integrity_readings"
        indexes = [models.Index(fields=["name", "-measured_at"], name="integrity_readings_latest")]

    def __str__(self) -> str:
        return f"{self.name}: {self.count}"


class Nudge(models.Model):
    """Whether a tick of the sweep is asked for and not yet begun, so a thousand commits ask once."""

    name = models.TextField(primary_key=True)
    asked = models.BooleanField(default=False)

    class Meta:
        db_table = "sweep_nudges"

    def __str__(self) -> str:
        return self.name


class Canary(models.Model):
    """The worker cluster's sign of life: asked by the supervisor, answered by a worker."""

    host = models.TextField(primary_key=True)
    asked_at = models.DateTimeField()
    answered_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "worker_canaries"

    def __str__(self) -> str:
        return self.host


class Decision(models.Model):
    """An automatic change: which rule, on what evidence, what it changed. A bulk change is one row with a count."""

    id = models.BigAutoField(primary_key=True)
    run_id = models.UUIDField(_("run"), null=True)
    rule = models.TextField(_("rule"))
    object_type = models.TextField(_("object type"))
    object_id = models.TextField(_("object"))
    inputs = models.JSONField(_("evidence"), default=dict, db_default={})
    before = models.JSONField(_("before"), default=dict, db_default={})
    after = models.JSONField(_("after"), default=dict, db_default={})
    won = models.BooleanField(_("took effect"), default=True, db_default=True)
    affected = models.IntegerField(_("rows"), default=1, db_default=1)
    created_at = models.DateTimeField(_("at"), db_default=Now())

    class Meta:
        db_table = "decisions"
        verbose_name = _("decision")
        verbose_name_plural = _("decisions")
        indexes = [
            models.Index(fields=["object_type", "object_id", "-id"], name="decisions_of_object"),
            models.Index(fields=["run_id"], name="decisions_of_run"),
        ]
        triggers = append_only("decisions")

    def __str__(self) -> str:
        return f"{self.rule}: {self.object_type} {self.object_id}"


class BulkAction(models.Model):
    """An operator's action on more rows than a request should wait for: a sweep works it off, batch by batch."""

    class Status(models.TextChoices):
        RUNNING = "running", _("running")
        FINISHED = "finished", _("finished")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    title = models.TextField(_("action"))
    model = models.TextField(_("model"))
    action = models.TextField()
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, verbose_name=_("by"))
    reason = models.TextField(_("reason"), blank=True, default="")
    total = models.IntegerField(_("rows"))
    counts = models.JSONField(_("outcomes"), default=dict)
    status = StateField(_("status"), choices=Status.choices, default=Status.RUNNING)
    created_at = models.DateTimeField(_("started"), db_default=Now())
    ended_at = models.DateTimeField(_("ended"), null=True)

    liveness = {
        Status.RUNNING: Swept("config.run_bulk_actions", _("begun at once, gone on with within a minute after a crash"))
    }

    class Meta:
        db_table = "bulk_actions"
        verbose_name = _("bulk action")
        verbose_name_plural = _("bulk actions")
        triggers = state_triggers()
        indexes = [
            models.Index(fields=["created_at"], condition=models.Q(status="running"), name="bulk_actions_running")
        ]

    def __str__(self) -> str:
        return self.title

    @transition(field=status, source=Status.RUNNING, target=Status.FINISHED)
    def finish(self) -> None: ...


class BulkActionRow(models.Model):
    """A row the action was confirmed for. `outcome` is empty until its batch has committed."""

    id = models.BigAutoField(primary_key=True)
    bulk_action = models.ForeignKey(BulkAction, models.CASCADE, related_name="rows")
    key = models.TextField()
    outcome = models.TextField(default="")

    class Meta:
        db_table = "bulk_action_rows"
        indexes = [
            models.Index(fields=["bulk_action", "id"], condition=models.Q(outcome=""), name="bulk_action_rows_waiting")
        ]

    def __str__(self) -> str:
        return self.key


class IdempotencyKey(models.Model):
    """The first answer to a POST with an Idempotency-Key, to be given again."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    scope = models.TextField()
    key = models.TextField()
    fingerprint = models.TextField()
    status = models.SmallIntegerField(null=True)
    body: Any = models.JSONField(null=True)
    created_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "idempotency_keys"
        constraints = [models.UniqueConstraint(fields=["user", "scope", "key"], name="idempotency_keys_once")]

    def __str__(self) -> str:
        return f"{self.scope} {self.key}"


class ThrottleWindow(models.Model):
    """How many requests a client made since window_start, over all web processes."""

    client = models.TextField()
    window_start = models.DateTimeField()
    count = models.IntegerField(default=0)

    class Meta:
        db_table = "throttle_windows"
        constraints = [models.UniqueConstraint(fields=["client", "window_start"], name="throttle_windows_once")]

    def __str__(self) -> str:
        return f"{self.client} {self.window_start}"


@models.Field.register_lookup
class AnyOf(models.Lookup):  # type: ignore[type-arg]
    """`pk__any=keys`: one array, where `pk__in` writes a placeholder per key and the driver reads them all."""

    lookup_name = "any"
    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        left, params = self.process_lhs(compiler, connection)
        return f"{left} = ANY(%s)", (*params, list(self.rhs))
