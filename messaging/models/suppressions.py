from django.contrib.postgres.functions import RandomUUID
from django.db import models
from django.db.models import Q, Value
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from messaging.models import addresses
from messaging.models.applications import Application
from messaging.models.subscriptions import Channel


class SuppressionQuerySet(models.QuerySet["Suppression"]):
    def active(self) -> "SuppressionQuerySet":
        return self.filter(lifted_at__isnull=True)

    def of(self, channel: str, address: str) -> "SuppressionQuerySet":
        return self.filter(channel_type=channel, address_hash=addresses.address_hash(channel, address))


class Suppression(models.Model):
    """An address of one application that must not be written to, until somebody lifts it."""

    HARD_BOUNCE, COMPLAINT, UNSUBSCRIBED = "hard_bounce", "complaint", "unsubscribed"

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="suppressions", verbose_name=_("application")
    )
    channel_type = models.CharField(_("channel"), max_length=10, choices=Channel.choices)
    address_encrypted = models.TextField(_("encrypted address"), editable=False)
    address_hash = models.CharField(_("address hash"), max_length=64, editable=False)
    address_hint = models.CharField(_("address"), max_length=64, editable=False)
    reason = models.CharField(_("reason"), max_length=100)
    evidence = models.JSONField(_("evidence"), default=dict, db_default=Value({}, models.JSONField()), blank=True)
    created_at = models.DateTimeField(_("created"), db_default=Now())
    lifted_at = models.DateTimeField(_("lifted"), null=True, blank=True)
    lifted_by = models.CharField(_("lifted by"), max_length=150, blank=True, default="", db_default="")
    lift_note = models.TextField(_("note"), blank=True, default="", db_default="")

    objects = SuppressionQuerySet.as_manager()

    class Meta:
        db_table = "suppressions"
        verbose_name = _("suppression")
        verbose_name_plural = _("suppressions")
        constraints = [
            models.UniqueConstraint(
                fields=["application", "channel_type", "address_hash"],
                condition=Q(lifted_at__isnull=True),
                name="suppressions_active_once",
            ),
            models.CheckConstraint(name="suppressions_channel_type", condition=Q(channel_type__in=Channel.values)),
        ]
        permissions = [("lift_suppression", "Can lift suppressions")]

    def __str__(self) -> str:
        return f"{self.channel_type} {self.address_hint}"
