from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from operator import and_
from zoneinfo import ZoneInfo, available_timezones

import structlog
from django.conf import settings
from django.contrib.postgres.functions import RandomUUID
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import StateField, Swept, state_triggers
from messaging.models import Application
from reminders.triggers import alarm_triggers, delivery_triggers

log = structlog.get_logger("alarm")
DEFAULT_ZONE = "Asia/Seoul"
ID_LENGTH = 255
TITLE_LENGTH, BODY_LENGTH = 10_000, 1_000_000
SNAPSHOT_LENGTH = 2000
# Python knows no infinite times and none before Christ: one such row would stop every batch that reads it.
READABLE = datetime(1, 1, 2, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


@cache
def zone_names() -> frozenset[str]:
    """IANA's names; the system's own files lie in the same folder."""
    return frozenset(available_timezones()) - {"Factory", "localtime"}


def validate_zone(name: str) -> None:
    if name not in zone_names():
        raise ValidationError(_("This is not an IANA time zone."), code="invalid_timezone")


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def zone_of(name: str | None) -> ZoneInfo:
    """A user's zone. A name nobody knows must not stop a reminder for ever."""
    if name is not None and name not in zone_names():
        # Not whose: a client may name its users by their addresses, and the name leads to the rows of user_info.
        log.warning("unknown_timezone", timezone=name[:64])
        name = None
    return _zone(name or DEFAULT_ZONE)


def readable(table: str, *names: str) -> models.CheckConstraint:
    # A missing time is neither true nor false, which a check lets pass.
    condition = reduce(and_, (Q(**{f"{name}__range": READABLE}) for name in names))
    return models.CheckConstraint(condition=condition, name=f"{table}_times_readable")


class Page(models.Model):
    """What the client's user wants to be reminded of, under the client's own id."""

    id = models.CharField(_("page"), max_length=ID_LENGTH, primary_key=True)
    application = models.ForeignKey(Application, models.CASCADE, related_name="+", verbose_name=_("application"))
    user_id = models.CharField(_("user"), max_length=ID_LENGTH)
    title = models.TextField(_("title"), db_default="", blank=True, max_length=TITLE_LENGTH)
    body = models.TextField(_("text"), db_default="", blank=True, max_length=BODY_LENGTH)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), db_default=Now())
    updated_at = models.DateTimeField(_("changed"), db_default=Now())

    class Meta:
        db_table = "pages"
        verbose_name = _("page")
        verbose_name_plural = _("pages")
        constraints = [readable("pages", "deleted_at", "created_at", "updated_at")]

    def __str__(self) -> str:
        return self.id


class UserInfo(models.Model):
    """An end user's zone. Its row lock also makes the scheduler choose times for one user one after the other."""

    application = models.ForeignKey(
        Application, models.CASCADE, related_name="+", db_index=False, verbose_name=_("application")
    )
    user_id = models.CharField(_("user"), max_length=ID_LENGTH)
    timezone = models.CharField(_("time zone"), max_length=64, default=DEFAULT_ZONE, db_default=DEFAULT_ZONE)

    class Meta:
        db_table = "user_info"
        verbose_name = _("user's time zone")
        verbose_name_plural = _("users' time zones")
        constraints = [models.UniqueConstraint(fields=["application", "user_id"], name="user_info_once")]

    def __str__(self) -> str:
        return f"{self.user_id} ({self.timezone})"

    def clean(self) -> None:
        # Not a validator of the field: a migration would have to import this module to name it.
        try:
            validate_zone(self.timezone)
        except ValidationError as error:
            raise ValidationError({"timezone": error}) from None


class AlarmQuerySet(models.QuerySet["Alarm"]):
    def due(self, now: datetime) -> "AlarmQuerySet":
        """A check ties a missing time to the first send."""
        return self.filter(Q(next_alarm_time__lte=now) | Q(next_alarm_time=None))

    def free(self, now: datetime) -> "AlarmQuerySet":
        """Nobody works on it, or whoever did is taken for dead."""
        return self.filter(Q(processed_at=None) | Q(processed_at__lt=now - settings.ALARM_CLAIM_KEPT))

    def takeable(self, now: datetime) -> "AlarmQuerySet":
        """What a batch would claim: due, free, and not waiting after a refusal."""
        return self.due(now).free(now).filter(Q(retry_at=None) | Q(retry_at__lte=now))

    def processing(self, now: datetime) -> "AlarmQuerySet":
        return self.filter(processed_at__gte=now - settings.ALARM_CLAIM_KEPT)

    def zombies(self, now: datetime) -> "AlarmQuerySet":
        return self.filter(processed_at__lt=now - settings.ALARM_CLAIM_KEPT)

    def overdue(self, now: datetime, by: timedelta) -> "AlarmQuerySet":
        """Takeable for so long that several ticks must have missed it."""
        late = Q(next_alarm_time__lt=now - by) | Q(next_alarm_time=None, created_at__lt=now - by)
        waited = Q(retry_at=None) | Q(retry_at__lt=now - by)
        unclaimed = Q(processed_at=None) | Q(processed_at__lt=now - settings.ALARM_CLAIM_KEPT - by)
        return self.takeable(now).filter(late, waited, unclaimed)

    def same_time(self) -> "AlarmQuerySet":
        """Shares its time with another alarm of its user."""
        twin = Alarm.objects.filter(
            application_id=models.OuterRef("application_id"),
            user_id=models.OuterRef("user_id"),
            next_alarm_time=models.OuterRef("next_alarm_time"),
        ).exclude(pk=models.OuterRef("pk"))
        return self.filter(models.Exists(twin))


class Alarm(models.Model):
    """A reminder of one page that comes back at growing distances. `processed_at` is the claim of whoever sends it.

    `occurrence` numbers what is to be sent next and never restarts, unlike `sent_count`: it makes the idempotency key.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    # The cascade is the database's (migration 0002): Django must neither make the constraint nor look for children.
    page = models.ForeignKey(
        Page, models.DO_NOTHING, related_name="alarms", db_constraint=False, db_index=False, verbose_name=_("page")
    )
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="+", db_index=False, verbose_name=_("application")
    )
    user_id = models.CharField(_("user"), max_length=ID_LENGTH)
    title = models.CharField(_("title"), max_length=SNAPSHOT_LENGTH, db_default="", blank=True)
    body = models.CharField(_("text"), max_length=SNAPSHOT_LENGTH, db_default="", blank=True)
    next_alarm_time = models.DateTimeField(_("next time"), null=True, blank=True)
    sent_count = models.IntegerField(_("count"), default=1, db_default=1)
    last_notification_id = models.UUIDField(_("last message"), null=True, blank=True)
    processed_at = models.DateTimeField(_("claimed"), null=True, blank=True)
    occurrence = models.IntegerField(_("occurrence"), default=1, db_default=1)
    refusals = models.IntegerField(_("refusals"), default=0, db_default=0)
    retry_at = models.DateTimeField(_("tried again"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), db_default=Now())
    updated_at = models.DateTimeField(_("changed"), db_default=Now())

    objects = AlarmQuerySet.as_manager()

    class Meta:
        db_table = "alarm"
        verbose_name = _("alarm")
        verbose_name_plural = _("alarms")
        triggers = alarm_triggers()
        constraints = [
            models.UniqueConstraint(fields=["page"], name="alarm_page_once"),
            models.CheckConstraint(condition=Q(sent_count__gte=1), name="alarm_sent_count"),
            models.CheckConstraint(condition=Q(occurrence__gte=1), name="alarm_occurrence"),
            models.CheckConstraint(
                condition=Q(next_alarm_time__isnull=False) | Q(sent_count=1), name="alarm_timeless_is_first"
            ),
            readable("alarm", "next_alarm_time", "processed_at", "retry_at", "created_at", "updated_at"),
        ]
        # A claim is no HOT update for alarm_claimed; beside the message it makes that is lost in the noise, and the
        # counts of claims, asked for by every scrape, do not read a million alarms.
        indexes = [
            models.Index(fields=["processed_at"], condition=Q(processed_at__isnull=False), name="alarm_claimed"),
            models.Index(F("next_alarm_time").asc(nulls_first=True), "id", name="alarm_next"),
            models.Index(fields=["application", "user_id", "next_alarm_time"], name="alarm_of_user"),
            models.Index(fields=["application", "updated_at"], name="alarm_changed"),
        ]
        permissions = [
            ("run_batch", "Can send due alarms now"),
            ("view_schedule", "Can see what the scheduler has to do"),
            ("release_alarm", "Can release an alarm's claim and reset its count"),
        ]

    def __str__(self) -> str:
        return self.title or self.body[:60] or str(self.id)


class DeletedAlarm(models.Model):
    """A tombstone for clients that synchronise. Written by the trigger of `alarm`; outlives even the application."""

    id = models.UUIDField(primary_key=True)
    application = models.ForeignKey(
        Application,
        models.DO_NOTHING,
        related_name="+",
        db_constraint=False,
        db_index=False,
        verbose_name=_("application"),
    )
    user_id = models.CharField(_("user"), max_length=ID_LENGTH)
    deleted_at = models.DateTimeField(_("deleted"), db_default=Now())

    class Meta:
        db_table = "alarm_deleted"
        verbose_name = _("deleted alarm")
        verbose_name_plural = _("deleted alarms")
        constraints = [readable("alarm_deleted", "deleted_at")]
        indexes = [
            models.Index(fields=["application", "deleted_at"], name="alarm_deleted_since"),
            models.Index(fields=["application", "user_id", "deleted_at"], name="alarm_deleted_of_user"),
        ]

    def __str__(self) -> str:
        return str(self.id)


class AlarmDeliveryQuerySet(models.QuerySet["AlarmDelivery"]):
    def abandoned(self, now: datetime) -> "AlarmDeliveryQuerySet":
        """Claimed long ago, and the alarm that would come back to it is gone or has moved on."""
        owner = Alarm.objects.filter(pk=models.OuterRef("alarm_id"), occurrence=models.OuterRef("occurrence"))
        open_ = self.filter(state__in=[AlarmDelivery.State.CLAIMED, AlarmDelivery.State.UNKNOWN])
        return open_.filter(claimed_at__lt=now - settings.ALARM_CLAIM_KEPT).exclude(models.Exists(owner))


class AlarmDelivery(models.Model):
    """One occurrence of an alarm on its way to messaging. Survives its alarm."""

    class State(models.TextChoices):
        CLAIMED = "claimed", _("claimed")
        SENT = "sent", _("sent")
        FAILED = "failed", _("failed")
        UNKNOWN = "unknown", _("unknown")

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    alarm_id = models.UUIDField(_("alarm"))
    application_id = models.UUIDField(_("application"), null=True, blank=True)
    occurrence = models.IntegerField(_("occurrence"))
    idempotency_key = models.CharField(_("idempotency key"), max_length=100, unique=True)
    # Its default in the database stands in migration 0002: Django reads a db_default back, which `protected` forbids.
    state = StateField(_("state"), choices=State.choices, default=State.CLAIMED)
    message_id = models.UUIDField(_("message"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=100, db_default="", default="", blank=True)
    claimed_at = models.DateTimeField(_("claimed"), db_default=Now())
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    objects = AlarmDeliveryQuerySet.as_manager()
    liveness = {
        State.CLAIMED: Swept("reminders.send_due_alarms", _("6 hours after the claim"), since="claimed_at"),
        State.UNKNOWN: Swept("reminders.send_due_alarms", _("6 hours after the claim"), since="claimed_at"),
        State.FAILED: Swept(
            "reminders.send_due_alarms", _("tried again after 1 to 60 minutes unless superseded"), since="claimed_at"
        ),
    }

    class Meta:
        db_table = "alarm_delivery"
        verbose_name = _("delivery")
        verbose_name_plural = _("deliveries")
        triggers = [*state_triggers("state"), *delivery_triggers()]
        constraints = [readable("alarm_delivery", "claimed_at", "ended_at")]
        indexes = [
            models.Index(fields=["alarm_id", "occurrence"], name="alarm_delivery_of_alarm"),
            models.Index(fields=["state", "claimed_at"], condition=~Q(state="sent"), name="alarm_delivery_open"),
        ]

    def __str__(self) -> str:
        return self.idempotency_key

    @transition(field=state, source=State.CLAIMED, target=State.SENT)
    def send(self) -> None: ...

    @transition(field=state, source=State.CLAIMED, target=State.FAILED)
    def fail(self) -> None: ...

    @transition(field=state, source=State.CLAIMED, target=State.UNKNOWN)
    def lose(self) -> None: ...

    @transition(field=state, source=[State.FAILED, State.UNKNOWN], target=State.CLAIMED)
    def claim(self) -> None: ...
