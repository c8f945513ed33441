from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from messaging.models.applications import Application
from messaging.models.messages import Message


class TrackedLink(models.Model):
    """Where a click leads. The id follows from application and URL, so equal links are one row."""

    id = models.UUIDField(primary_key=True, editable=False)
    application = models.ForeignKey(Application, models.CASCADE, related_name="+", verbose_name=_("application"))
    url = models.TextField(_("address"))
    created_at = models.DateTimeField(_("created"), db_default=Now())

    class Meta:
        db_table = "tracked_links"
        verbose_name = _("tracked link")
        verbose_name_plural = _("tracked links")

    def __str__(self) -> str:
        return self.url[:100]


class MessageHit(models.Model):
    """Somebody, or something, fetched the pixel or followed a link. No address and no IP is kept."""

    class Kind(models.TextChoices):
        OPEN = "open", _("open")
        CLICK = "click", _("click")

    class Class(models.TextChoices):
        HUMAN = "human", _("human")
        MACHINE = "machine", _("machine")

    id = models.BigAutoField(primary_key=True)
    message = models.ForeignKey(Message, models.CASCADE, related_name="hits", verbose_name=_("message"))
    kind = models.CharField(_("kind"), max_length=5, choices=Kind.choices)
    by = models.CharField(_("class"), max_length=7, choices=Class.choices, db_column="class")
    reasons = models.JSONField(_("reasons"), default=list)
    link = models.ForeignKey(
        TrackedLink, models.SET_NULL, null=True, blank=True, db_index=False, related_name="+", verbose_name=_("link")
    )
    user_agent = models.CharField(_("user agent"), max_length=300, blank=True, default="")
    occurred_at = models.DateTimeField(_("at"))

    class Meta:
        db_table = "message_hits"
        verbose_name = _("hit")
        verbose_name_plural = _("hits")

    def __str__(self) -> str:
        return f"{self.kind} {self.by}"
