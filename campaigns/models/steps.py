from django.db import models
from django.db.models import Deferrable
from django.utils.translation import gettext_lazy as _

from campaigns.models.keys import created, key
from campaigns.models.senders import CHANNELS
from campaigns.models.sequences import Sequence


class StepQuerySet(models.QuerySet["Step"]):
    def standing(self) -> "StepQuerySet":
        return self.filter(position__isnull=False).order_by("position")


class Step(models.Model):
    """One message of a sequence. A step with a history that is taken out keeps its row and loses its position."""

    class StalePolicy(models.TextChoices):
        SKIP = "skip", _("do not send")
        SEND_LATE = "send_late", _("send late")

    id = key()
    sequence = models.ForeignKey(
        Sequence, models.CASCADE, related_name="steps", verbose_name=_("sequence"), db_index=False
    )
    position = models.IntegerField(_("position"), null=True, blank=True)
    channel = models.CharField(_("channel"), max_length=10, choices=CHANNELS)
    delay_seconds = models.IntegerField(_("delay (s)"), default=0, db_default=0)
    subject = models.CharField(_("subject"), max_length=998, blank=True, default="", db_default="")
    body = models.TextField(_("body"), blank=True, default="", db_default="")
    stale_policy = models.CharField(
        _("when too late"), max_length=9, choices=StalePolicy.choices, default=StalePolicy.SKIP, db_default="skip"
    )
    created_at = created()

    objects = StepQuerySet.as_manager()

    class Meta:
        db_table = "sequence_steps"
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        constraints = [
            # Checked at commit, so that a whole sequence can be numbered anew in one statement.
            models.UniqueConstraint(
                fields=["sequence", "position"], name="sequence_steps_position_once", deferrable=Deferrable.DEFERRED
            )
        ]

    def __str__(self) -> str:
        return f"{self.position or '–'}. {self.subject or self.get_channel_display()}"
