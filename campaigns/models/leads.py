from typing import Any

from django.db import models
from django.db.models import Q, Value
from django.db.models.functions import Lower
from django.utils.translation import gettext_lazy as _

from campaigns.models.keys import created, key
from messaging.models import Application, Subscription

# Which subscription of a lead a channel uses, of which type, and the lead's field that holds the address.
SUBSCRIPTION_OF = {
    "email": ("email_subscription", "Email", "email"),
    "sms": ("sms_subscription", "SMS", "phone"),
    "kakao_talk": ("kakao_subscription", "KakaoTalk", "phone"),
}
EMPTY: Any = Value({}, models.JSONField())


def subscription() -> Any:
    return models.ForeignKey(
        Subscription, models.SET_NULL, null=True, blank=True, editable=False, related_name="+", db_index=False
    )


class Lead(models.Model):
    """A person to reach. Its addresses are subscriptions of messaging."""

    id = key()
    application = models.ForeignKey(Application, models.CASCADE, related_name="leads", verbose_name=_("application"))
    name = models.CharField(_("name"), max_length=200, blank=True, default="", db_default="")
    email = models.EmailField(_("e-mail"), null=True, blank=True)
    phone = models.CharField(_("phone"), max_length=16, null=True, blank=True)
    company_domain = models.CharField(_("company domain"), max_length=253, blank=True, default="", db_default="")
    time_zone = models.CharField(_("time zone"), max_length=64, default="UTC", db_default="UTC")
    locale = models.CharField(_("locale"), max_length=20, blank=True, default="", db_default="")
    attributes = models.JSONField(_("attributes"), default=dict, blank=True, db_default=EMPTY)
    email_subscription = subscription()
    sms_subscription = subscription()
    kakao_subscription = subscription()
    created_at = created()

    class Meta:
        db_table = "leads"
        verbose_name = _("lead")
        verbose_name_plural = _("leads")
        constraints = [
            models.UniqueConstraint(
                models.F("application"), Lower("email"), name="leads_email_once", condition=Q(email__isnull=False)
            )
        ]
        indexes = [models.Index(fields=["phone"], name="leads_phone", condition=Q(phone__isnull=False))]

    def __str__(self) -> str:
        return self.name or self.email or self.phone or str(self.pk)

    def address(self, channel: str) -> str | None:
        """None also for a channel we do not have: a step written by hand may name any."""
        return getattr(self, SUBSCRIPTION_OF[channel][2]) if channel in SUBSCRIPTION_OF else None

    def subscription_id(self, channel: str) -> Any:
        return getattr(self, f"{SUBSCRIPTION_OF[channel][0]}_id") if channel in SUBSCRIPTION_OF else None
