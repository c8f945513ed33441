from typing import Any

from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import MD5
from django.utils.translation import gettext_lazy as _

from campaigns.models.enrollments import Enrollment
from campaigns.models.keys import created, key

EMPTY: Any = Value({}, models.JSONField())


class Reply(models.Model):
    """What came back: a person, a machine that says the person is away, a bounce, or a wish to be left alone."""

    class Kind(models.TextChoices):
        HUMAN = "human", _("human")
        OOO = "ooo", _("out of office")
        BOUNCE = "bounce", _("bounce")
        UNSUBSCRIBE = "unsubscribe", _("unsubscribe")

    id = key()
    enrollment = models.ForeignKey(
        Enrollment, models.CASCADE, related_name="replies", verbose_name=_("enrollment"), db_index=False
    )
    received_at = models.DateTimeField(_("received"))
    kind = models.CharField(_("kind"), max_length=11, choices=Kind.choices)
    subject = models.CharField(_("subject"), max_length=998, blank=True, default="", db_default="")
    text = models.TextField(_("text"), blank=True, default="", db_default="")
    evidence = models.JSONField(_("evidence"), default=dict, blank=True, db_default=EMPTY)
    ooo_until = models.DateTimeField(_("away until"), null=True, blank=True)
    external_id = models.CharField(_("external id"), max_length=255, null=True, blank=True)
    created_at = created()

    class Meta:
        db_table = "replies"
        verbose_name = _("reply")
        verbose_name_plural = _("replies")
        constraints = [
            models.UniqueConstraint(
                fields=["enrollment", "external_id"],
                condition=Q(external_id__isnull=False),
                name="replies_external_id_once",
            ),
            models.UniqueConstraint(
                F("enrollment"),
                F("received_at"),
                MD5("text"),
                condition=Q(external_id__isnull=True),
                name="replies_once",
            ),
        ]
        indexes = [
            models.Index(fields=["enrollment", "kind", "received_at"], name="replies_of_enrollment"),
            # The harvest guard asks for the last human replies of all sequences at once.
            models.Index(fields=["received_at"], name="replies_human", condition=Q(kind="human")),
            models.Index(fields=["external_id"], name="replies_external", condition=Q(external_id__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.received_at:%Y-%m-%d %H:%M}"
