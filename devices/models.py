from datetime import datetime

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django_fsm import FSMField, transition
from uuid_utils.compat import uuid7

from config.statemachine import Swept, WaitsFor, state_triggers

PC_NUMBER = r"^PC-[0-9]{2,6}\Z"
MAX_SLOTS = 20


class PCQuerySet(models.QuerySet["PC"]):
    def silent(self, now: datetime) -> "PCQuerySet":
        """Online, but not heard of for longer than a living agent would stay silent."""
        return self.filter(status=PC.Status.ONLINE, last_heartbeat_at__lt=now - settings.PC_OFFLINE_AFTER)


class PC(models.Model):
    """A machine full of devices. Born offline: only a heartbeat is a sign of life."""

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
    status = FSMField(_("status"), choices=Status.choices, default=Status.OFFLINE, protected=True)
    last_heartbeat_at = models.DateTimeField(_("last heartbeat"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), auto_now_add=True)

    objects = PCQuerySet.as_manager()
    liveness = {
        Status.ONLINE: Swept("devices.mark_silent_pcs", _("180 s without a heartbeat"), since="last_heartbeat_at"),
        Status.OFFLINE: WaitsFor(_("its agent's next heartbeat")),
    }

    class Meta:
        db_table = "pcs"
        verbose_name = _("PC")
        verbose_name_plural = _("PCs")
        triggers = state_triggers()
        constraints = [
            models.CheckConstraint(condition=Q(max_slots__range=(1, MAX_SLOTS)), name="pcs_max_slots"),
            models.CheckConstraint(
                condition=~Q(status="online") | Q(last_heartbeat_at__isnull=False), name="pcs_online_was_heard"
            ),
        ]

    def __str__(self) -> str:
        return self.pc_number

    @transition(field=status, source=Status.OFFLINE, target=Status.ONLINE)
    def come_online(self) -> None: ...

    @transition(field=status, source=Status.ONLINE, target=Status.OFFLINE)
    def go_offline(self) -> None: ...
