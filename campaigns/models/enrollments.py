from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import Exists, OuterRef, Q, Value
from django.utils.translation import gettext_lazy as _
from django_fsm import transition

from campaigns.models.keys import created, key
from campaigns.models.leads import Lead
from campaigns.models.senders import Sender
from campaigns.models.sequences import Sequence
from campaigns.models.steps import Step
from campaigns.triggers import LIVE, enrollments_changed, signal_triggers
from config.statemachine import Rests, StateField, Swept, WaitsFor, state_triggers

EMPTY: Any = Value({}, models.JSONField())


class EnrollmentQuerySet(models.QuerySet["Enrollment"]):
    def live(self) -> "EnrollmentQuerySet":
        return self.filter(status__in=LIVE)

    def resumable(self, now: datetime) -> "EnrollmentQuerySet":
        return self.filter(status="paused", resume_at__lte=now)

    def idle(self) -> "EnrollmentQuerySet":
        """Live, of a sequence the reconciler looks after, and nothing is left that could happen to it."""
        from campaigns.models.executions import Execution

        waiting = Execution.objects.filter(enrollment=OuterRef("pk"), status__in=Execution.WAITING)
        return self.live().filter(~Exists(waiting), sequence__status__in=Sequence.RECONCILABLE)


class Enrollment(models.Model):
    """A lead in a sequence."""

    class Status(models.TextChoices):
        ACTIVE = "active", _("active")
        PAUSED = "paused", _("paused")
        COMPLETED = "completed", _("completed")
        REPLIED = "replied", _("replied")
        BOUNCED = "bounced", _("bounced")
        UNSUBSCRIBED = "unsubscribed", _("unsubscribed")
        STOPPED = "stopped", _("stopped")
        FAILED = "failed", _("failed")

    id = key()
    sequence = models.ForeignKey(
        Sequence, models.CASCADE, related_name="enrollments", verbose_name=_("sequence"), db_index=False
    )
    lead = models.ForeignKey(Lead, models.CASCADE, related_name="enrollments", verbose_name=_("lead"))
    status = StateField(_("status"), choices=Status.choices, default=Status.ACTIVE, db_default="active")
    # Of the current step; `senders` holds the one of each channel, so that a lead hears from the same address always.
    sender = models.ForeignKey(
        Sender, models.SET_NULL, null=True, blank=True, related_name="enrollments", verbose_name=_("sender")
    )
    senders = models.JSONField(_("senders by channel"), default=dict, blank=True, db_default=EMPTY)
    current_step = models.ForeignKey(
        Step, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("current step"), db_index=False
    )
    round = models.IntegerField(_("round"), default=1, db_default=1)
    resume_at = models.DateTimeField(_("resumes"), null=True, blank=True)
    paused_at = models.DateTimeField(_("paused"), null=True, blank=True)
    pause_reason = models.CharField(_("reason of the pause"), max_length=200, blank=True, default="", db_default="")
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    created_at = created()

    objects = EnrollmentQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.ACTIVE: Swept("campaigns.reconcile_sequences", _("its next step, and at the latest its stale limit")),
        Status.PAUSED: Swept(
            "campaigns.resume_paused_enrollments",
            _("its resume date"),
            since="resume_at",
            instead=lambda enrollment: None if enrollment.resume_at else WaitsFor(_("whoever paused it")),
        ),
        Status.FAILED: Rests(_("It may be enrolled again.")),
    }

    class Meta:
        db_table = "sequence_enrollments"
        verbose_name = _("enrollment")
        verbose_name_plural = _("enrollments")
        triggers = [*state_triggers(), *signal_triggers(enrollments_changed, enrollments=True)]
        constraints = [
            models.UniqueConstraint(fields=["sequence", "lead"], name="sequence_enrollments_lead_once"),
        ]
        indexes = [
            models.Index(fields=["sequence", "sender"], name="enrollments_live", condition=Q(status__in=LIVE)),
            models.Index(fields=["sequence", "status"], name="enrollments_of_sequence"),
            models.Index(
                fields=["resume_at"],
                name="enrollments_resumable",
                condition=Q(status="paused", resume_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.lead} · {self.sequence}"

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    @transition(field=status, source=Status.ACTIVE, target=Status.PAUSED)
    def pause(self) -> None: ...

    @transition(field=status, source=Status.PAUSED, target=Status.ACTIVE)
    def resume(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.COMPLETED)
    def complete(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.REPLIED)
    def reply(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.BOUNCED)
    def bounce(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.UNSUBSCRIBED)
    def unsubscribe(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.STOPPED)
    def stop(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.FAILED)
    def fail(self) -> None: ...

    @transition(field=status, source=Status.FAILED, target=Status.ACTIVE)
    def reenroll(self) -> None: ...
