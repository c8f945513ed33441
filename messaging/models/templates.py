from django.contrib.postgres.functions import RandomUUID
from django.db import models
from django.db.models import Q, Value
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from config.triggers import append_only
from messaging.models.applications import Application
from messaging.models.subscriptions import Channel
from messaging.triggers import TEMPLATE_EDITED, TEMPLATE_VERSIONS


class MessageTemplateQuerySet(models.QuerySet["MessageTemplate"]):
    def existing(self) -> "MessageTemplateQuerySet":
        return self.filter(deleted_at__isnull=True)


class MessageTemplate(models.Model):
    """Texts with {{name}} places. Each edit is a new version; the trigger keeps the old ones."""

    class Approval(models.TextChoices):
        REQUESTED = "requested", _("requested")
        APPROVED = "approved", _("approved")
        REJECTED = "rejected", _("rejected")

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="templates", verbose_name=_("application")
    )
    name = models.CharField(_("name"), max_length=100)
    channel = models.CharField(_("channel"), max_length=10, choices=Channel.choices)
    title_template = models.TextField(_("title"), blank=True, default="", db_default="")
    body_template = models.TextField(_("body"), blank=True, default="", db_default="")
    data_template = models.JSONField(_("data"), default=dict, db_default=Value({}, models.JSONField()), blank=True)
    provider_code = models.CharField(_("provider's code"), max_length=20, blank=True, default="", db_default="")
    approval = models.CharField(
        _("approval"), max_length=10, choices=Approval.choices, default=Approval.REQUESTED, db_default="requested"
    )
    active = models.BooleanField(_("active"), default=True, db_default=True)
    version = models.IntegerField(_("version"), default=1, db_default=1, editable=False)
    created_at = models.DateTimeField(_("created"), db_default=Now())
    updated_at = models.DateTimeField(_("updated"), auto_now=True, db_default=Now())
    # Messages name their template for good, so its row stays when it is deleted.
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True, editable=False)

    objects = MessageTemplateQuerySet.as_manager()

    class Meta:
        db_table = "message_templates"
        verbose_name = _("template")
        verbose_name_plural = _("templates")
        triggers = [TEMPLATE_EDITED, TEMPLATE_VERSIONS]
        constraints = [
            models.UniqueConstraint(
                fields=["application", "name"], condition=Q(deleted_at__isnull=True), name="message_templates_name_once"
            ),
            models.CheckConstraint(name="message_templates_channel", condition=Q(channel__in=Channel.values)),
            models.CheckConstraint(
                name="message_templates_approval", condition=Q(approval__in=["requested", "approved", "rejected"])
            ),
            models.CheckConstraint(name="message_templates_data_object", condition=Q(data_template__contains={})),
        ]

    def __str__(self) -> str:
        return self.name


class MessageTemplateVersion(models.Model):
    """A template as it was; written by a trigger."""

    id = models.BigAutoField(primary_key=True)
    template = models.ForeignKey(
        MessageTemplate, models.DO_NOTHING, db_constraint=False, related_name="versions", verbose_name=_("template")
    )
    version = models.IntegerField(_("version"))
    name = models.CharField(_("name"), max_length=100)
    title_template = models.TextField(_("title"))
    body_template = models.TextField(_("body"))
    data_template = models.JSONField(_("data"))
    provider_code = models.CharField(_("provider's code"), max_length=20)
    created_at = models.DateTimeField(_("created"), db_default=Now())

    class Meta:
        db_table = "message_template_versions"
        verbose_name = _("template version")
        verbose_name_plural = _("template versions")
        triggers = append_only("message_template_versions")
        constraints = [models.UniqueConstraint(fields=["template", "version"], name="message_template_versions_once")]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"
