from datetime import datetime
from uuid import uuid4

from django.contrib.postgres.functions import RandomUUID
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from messaging.models import addresses
from messaging.models.applications import Application
from messaging.models.messages import EMPTY, Message


class WebhookInboxQuerySet(models.QuerySet["WebhookInbox"]):
    def parked(self) -> "WebhookInboxQuerySet":
        """About a message we do not know, or whose own result we have not recorded yet."""
        return self.filter(state=WebhookInbox.State.PARKED)


class WebhookInbox(models.Model):
    """An event a provider told us, once. What it says is kept masked: no address, no token."""

    class State(models.TextChoices):
        PARKED = "parked", _("parked")
        APPLIED = "applied", _("applied")
        IGNORED = "ignored", _("changed nothing")
        ABANDONED = "abandoned", _("never matched a message")

    id = models.BigAutoField(primary_key=True)
    provider = models.CharField(_("provider"), max_length=50)
    event_id = models.CharField(_("event"), max_length=255)
    event_type = models.CharField(_("type"), max_length=30, blank=True, default="", db_default="")
    message = models.ForeignKey(
        Message,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="provider_events",
        verbose_name=_("message"),
    )
    message_ref = models.CharField(_("our id"), max_length=64, blank=True, default="", db_default="")
    provider_message_id = models.CharField(_("provider's id"), max_length=255, blank=True, default="", db_default="")
    payload = models.JSONField(_("event as told"), default=dict, db_default=EMPTY)
    state = models.CharField(_("state"), max_length=9, choices=State.choices, default=State.PARKED, db_default="parked")
    note = models.CharField(_("what became of it"), max_length=255, blank=True, default="", db_default="")
    occurred_at = models.DateTimeField(_("occurred"), null=True, blank=True)
    received_at = models.DateTimeField(_("arrived"), db_default=Now())
    applied_at = models.DateTimeField(_("applied"), null=True, blank=True)

    objects = WebhookInboxQuerySet.as_manager()

    class Meta:
        db_table = "webhook_inbox"
        verbose_name = _("provider event")
        verbose_name_plural = _("provider events")
        constraints = [models.UniqueConstraint(fields=["provider", "event_id"], name="webhook_inbox_once")]
        indexes = [models.Index(fields=["id"], name="webhook_inbox_parked", condition=Q(state="parked"))]

    def __str__(self) -> str:
        return f"{self.provider} {self.event_id}"


class WebhookEndpoint(models.Model):
    """Where an application wants to be told of its messages' status changes."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="webhook_endpoints", verbose_name=_("application")
    )
    url = models.CharField(_("address"), max_length=2000)
    secret_encrypted = models.TextField(_("encrypted secret"), editable=False)
    active = models.BooleanField(_("active"), default=True)
    disabled_reason = models.CharField(_("why it is off"), max_length=100, blank=True, default="")
    # It did not answer: nobody else waits for it, and one call asks whether it is back.
    resting_until = models.DateTimeField(_("resting until"), null=True, blank=True, editable=False)
    created_at = models.DateTimeField(_("created"), db_default=Now())

    class Meta:
        db_table = "webhook_endpoints"
        verbose_name = _("webhook endpoint")
        verbose_name_plural = _("webhook endpoints")

    def __str__(self) -> str:
        return self.url[:100]

    @property
    def secret(self) -> str:
        return addresses.decrypt(self.secret_encrypted)


class WebhookDeliveryQuerySet(models.QuerySet["WebhookDelivery"]):
    def due(self, now: datetime) -> "WebhookDeliveryQuerySet":
        return self.filter(
            Q(leased_until__isnull=True) | Q(leased_until__lte=now),
            delivered_at__isnull=True,
            given_up_at__isnull=True,
            next_attempt_at__lte=now,
        )


class WebhookDelivery(models.Model):
    """One status change to be told to one endpoint; written by a trigger. Its id is the same at every try."""

    id = models.BigAutoField(primary_key=True)
    webhook_id = models.UUIDField(_("webhook id"), default=uuid4, db_default=RandomUUID(), editable=False)
    endpoint = models.ForeignKey(WebhookEndpoint, models.CASCADE, related_name="deliveries", verbose_name=_("endpoint"))
    message_id = models.UUIDField(_("message"))
    event_type = models.CharField(_("type"), max_length=30)
    payload = models.JSONField(_("body"))
    created_at = models.DateTimeField(_("created"), db_default=Now())
    attempt_count = models.SmallIntegerField(_("attempts"), default=0, db_default=0)
    next_attempt_at = models.DateTimeField(_("next attempt"), db_default=Now())
    lease_id = models.UUIDField(null=True, blank=True, editable=False)
    leased_until = models.DateTimeField(_("leased until"), null=True, blank=True, editable=False)
    delivered_at = models.DateTimeField(_("delivered"), null=True, blank=True)
    given_up_at = models.DateTimeField(_("given up"), null=True, blank=True)

    objects = WebhookDeliveryQuerySet.as_manager()

    class Meta:
        db_table = "webhook_deliveries"
        verbose_name = _("webhook delivery")
        verbose_name_plural = _("webhook deliveries")
        permissions = [("resend_webhookdelivery", "Can send webhooks again")]
        constraints = [models.UniqueConstraint(fields=["webhook_id"], name="webhook_deliveries_id_once")]
        indexes = [
            models.Index(
                fields=["endpoint", "next_attempt_at", "id"],
                name="webhook_deliveries_due",
                condition=Q(delivered_at__isnull=True, given_up_at__isnull=True),
            ),
            models.Index(fields=["message_id"], name="webhook_deliveries_of_message"),
            models.Index(
                fields=["given_up_at"], name="webhook_deliveries_given_up", condition=Q(given_up_at__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event_type} {self.message_id}"


class WebhookAttempt(models.Model):
    """One try to deliver: what was answered, or why nothing was."""

    id = models.BigAutoField(primary_key=True)
    delivery = models.ForeignKey(WebhookDelivery, models.CASCADE, related_name="attempts", verbose_name=_("delivery"))
    attempt_no = models.SmallIntegerField(_("no."))
    started_at = models.DateTimeField(_("started"))
    ended_at = models.DateTimeField(_("ended"))
    status_code = models.SmallIntegerField(_("HTTP status"), null=True, blank=True)
    error = models.CharField(_("error"), max_length=300, blank=True, default="")
    answer = models.TextField(_("answer"), blank=True, default="")
    latency_ms = models.IntegerField(_("latency (ms)"))

    class Meta:
        db_table = "webhook_attempts"
        verbose_name = _("webhook attempt")
        verbose_name_plural = _("webhook attempts")
        constraints = [models.UniqueConstraint(fields=["delivery", "attempt_no"], name="webhook_attempts_once")]

    def __str__(self) -> str:
        return f"#{self.attempt_no} {self.status_code or self.error}"
