from datetime import datetime

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from messaging.triggers import FORGET_FAILURES


class ProviderCircuitQuerySet(models.QuerySet["ProviderCircuit"]):
    def probeable(self, now: datetime) -> "ProviderCircuitQuerySet":
        return self.filter(probe_at__lte=now)


class ProviderCircuit(models.Model):
    """A provider that is not called now. A row is an open breaker; closing it deletes the row."""

    provider = models.CharField(_("provider"), max_length=50, primary_key=True)
    reason = models.CharField(_("reason"), max_length=20, db_default="config")
    code = models.CharField(_("code"), max_length=100, blank=True, default="", db_default="")
    detail = models.TextField(_("detail"), blank=True, default="", db_default="")
    opened_at = models.DateTimeField(_("opened"), db_default=Now())
    probe_at = models.DateTimeField(_("next probe"), db_default=Now())

    objects = ProviderCircuitQuerySet.as_manager()

    class Meta:
        db_table = "provider_circuits"
        verbose_name = _("open breaker")
        verbose_name_plural = _("open breakers")
        triggers = [FORGET_FAILURES]

    def __str__(self) -> str:
        return self.provider


class ProviderFailure(models.Model):
    """A message whose last call its provider failed, since that provider last worked."""

    id = models.BigAutoField(primary_key=True)
    provider = models.CharField(_("provider"), max_length=50)
    message_id = models.UUIDField(_("message"))
    occurred_at = models.DateTimeField(_("at"))

    class Meta:
        db_table = "provider_failures"
        verbose_name = _("provider failure")
        verbose_name_plural = _("provider failures")
        constraints = [models.UniqueConstraint(fields=["provider", "message_id"], name="provider_failures_once")]

    def __str__(self) -> str:
        return f"{self.provider} {self.message_id}"
