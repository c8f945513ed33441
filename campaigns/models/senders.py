from datetime import time

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q, Value
from django.utils.translation import gettext_lazy as _
from django_fsm import transition

from campaigns.models.keys import created, key
from config.statemachine import Rests, StateField, WaitsFor, state_triggers
from messaging.models import Application

CHANNELS = [("email", _("e-mail")), ("sms", _("SMS")), ("kakao_talk", _("KakaoTalk"))]
EVERY_DAY = [1, 2, 3, 4, 5, 6, 7]


class SenderQuerySet(models.QuerySet["Sender"]):
    HEALTHY = Q(status="active", deleted_at__isnull=True)

    def healthy(self) -> "SenderQuerySet":
        return self.filter(self.HEALTHY)


class Sender(models.Model):
    """A mailbox or number that sends, and how much, when and how often it may."""

    class Status(models.TextChoices):
        ACTIVE = "active", _("active")
        ERROR = "error", _("error")
        SUSPENDED = "suspended", _("suspended")
        INACTIVE = "inactive", _("inactive")

    class WindowZone(models.TextChoices):
        LEAD = "lead", _("the lead's time zone")
        SENDER = "sender", _("the sender's time zone")

    id = key()
    application = models.ForeignKey(Application, models.CASCADE, related_name="senders", verbose_name=_("application"))
    channel = models.CharField(_("channel"), max_length=10, choices=CHANNELS)
    address = models.CharField(_("address"), max_length=254)
    display_name = models.CharField(_("display name"), max_length=100, blank=True, default="", db_default="")
    status = StateField(_("status"), choices=Status.choices, default=Status.ACTIVE, db_default="active")
    last_error = models.TextField(_("last error"), blank=True, default="", db_default="")
    daily_limit = models.IntegerField(_("daily limit"), null=True, blank=True)
    hourly_limit = models.IntegerField(_("hourly limit"), null=True, blank=True)
    min_gap_seconds = models.IntegerField(_("gap between messages (s)"), default=0, db_default=0)
    gap_jitter_seconds = models.IntegerField(_("random part of the gap (s)"), default=0, db_default=0)
    window_days = ArrayField(
        models.SmallIntegerField(),
        verbose_name=_("days of the window"),
        db_default=Value(EVERY_DAY, ArrayField(models.SmallIntegerField())),
    )
    window_from: "models.TimeField[time | None, time | None]" = models.TimeField(
        _("window opens"), null=True, blank=True
    )
    window_to: "models.TimeField[time | None, time | None]" = models.TimeField(
        _("window closes"), null=True, blank=True
    )
    window_zone = models.CharField(
        _("window counts in"), max_length=6, choices=WindowZone.choices, default=WindowZone.LEAD, db_default="lead"
    )
    time_zone = models.CharField(_("time zone"), max_length=64, default="UTC", db_default="UTC")
    ramp_start = models.IntegerField(_("ramp-up: first day's limit"), null=True, blank=True)
    ramp_step = models.IntegerField(_("ramp-up: more per day"), null=True, blank=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True, editable=False)
    created_at = created()

    objects = SenderQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.ACTIVE: Rests(_("It sends the steps that fall due.")),
        Status.ERROR: WaitsFor(_("an operator who mends it; its due steps move to another sender of the pool")),
        Status.SUSPENDED: WaitsFor(_("whoever suspended it; its due steps move to another sender of the pool")),
        Status.INACTIVE: WaitsFor(_("whoever switched it off; its due steps move to another sender of the pool")),
    }

    class Meta:
        db_table = "senders"
        verbose_name = _("sender")
        verbose_name_plural = _("senders")
        triggers = state_triggers()

    def __str__(self) -> str:
        return f"{self.display_name} <{self.address}>" if self.display_name else self.address

    @property
    def healthy(self) -> bool:
        return self.status == self.Status.ACTIVE and self.deleted_at is None

    @transition(field=status, source=[Status.ERROR, Status.SUSPENDED, Status.INACTIVE], target=Status.ACTIVE)
    def activate(self) -> None:
        self.last_error = ""

    @transition(field=status, source=Status.ACTIVE, target=Status.ERROR)
    def report_error(self, error: str) -> None:
        self.last_error = error

    @transition(field=status, source=[Status.ACTIVE, Status.ERROR], target=Status.SUSPENDED)
    def suspend(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.ERROR, Status.SUSPENDED], target=Status.INACTIVE)
    def deactivate(self) -> None: ...
