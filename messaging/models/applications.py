from django.contrib.auth.models import User
from django.contrib.postgres.functions import RandomUUID
from django.core.validators import MinValueValidator, validate_slug
from django.db import models
from django.db.models import Q, Value
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from messaging.triggers import FORGET_USAGE


class Application(models.Model):
    """The tenant: what a client sees is the rows of the applications it is a member of."""

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    slug = models.CharField(_("slug"), max_length=64, unique=True, validators=[validate_slug])
    name = models.CharField(_("name"), max_length=100, blank=True, default="", db_default="")
    settings = models.JSONField(_("settings"), default=dict, db_default=Value({}, models.JSONField()), blank=True)
    daily_quota = models.IntegerField(_("daily quota"), null=True, blank=True, validators=[MinValueValidator(0)])
    monthly_quota = models.IntegerField(_("monthly quota"), null=True, blank=True, validators=[MinValueValidator(0)])
    active = models.BooleanField(_("active"), default=True, db_default=True)
    members = models.ManyToManyField(User, related_name="applications", verbose_name=_("members"), blank=True)
    created_at = models.DateTimeField(_("created"), auto_now_add=True, db_default=Now())

    class Meta:
        db_table = "applications"
        verbose_name = _("application")
        verbose_name_plural = _("applications")
        triggers = [FORGET_USAGE]
        constraints = [
            models.CheckConstraint(name="applications_settings_object", condition=Q(settings__contains={})),
            models.CheckConstraint(
                name="applications_daily_quota", condition=Q(daily_quota__isnull=True) | Q(daily_quota__gte=0)
            ),
            models.CheckConstraint(
                name="applications_monthly_quota", condition=Q(monthly_quota__isnull=True) | Q(monthly_quota__gte=0)
            ),
        ]

    def __str__(self) -> str:
        return self.name or self.slug


class QuotaUsage(models.Model):
    """Messages charged to an application on one UTC day, kept only while it has a quota.

    Without one nobody counts, so senders of the same application never wait for each other; the first charge of a day
    starts from the messages that are there.
    """

    application = models.ForeignKey(Application, models.CASCADE, related_name="usage")
    day = models.DateField(_("day"))
    used = models.IntegerField(_("used"), default=0)

    class Meta:
        db_table = "quota_usage"
        verbose_name = _("quota usage")
        verbose_name_plural = _("quota usage")
        constraints = [models.UniqueConstraint(fields=["application", "day"], name="quota_usage_once")]

    def __str__(self) -> str:
        return f"{self.application_id} {self.day}: {self.used}"
