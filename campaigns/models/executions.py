from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Case, Exists, ExpressionWrapper, F, OuterRef, Q, Value, When
from django.db.models.functions import Coalesce, Greatest
from django.db.models.lookups import IsNull
from django.utils.translation import gettext_lazy as _
from django_fsm import transition

from campaigns.models.enrollments import Enrollment
from campaigns.models.keys import created, key
from campaigns.models.leads import SUBSCRIPTION_OF
from campaigns.models.senders import Sender, SenderQuerySet
from campaigns.models.sequences import days
from campaigns.models.steps import Step
from campaigns.triggers import LIVE, UNFINISHED, executions_changed, signal_triggers
from config.statemachine import StateField, Swept, WaitsFor, state_triggers
from messaging.models import Message, Subscription

EFFECTIVE_DUE = Coalesce("deferred_until", "scheduled_at")
STRANDED_AFTER = timedelta(minutes=10)
STUCK_AFTER = timedelta(minutes=30)
QUEUED = ("pending", "deferred")
# Over rows with `due_at` and `stale_before`.
TOO_LATE = Q(step__stale_policy="skip", due_at__lt=F("stale_before"))


class SkipReason(models.TextChoices):
    STALE = "stale", _("too late")
    ORPHANED = "orphaned", _("the enrollment had ended")
    STRANDED_NO_SENDER = "stranded_no_sender", _("no healthy sender")
    REPLIED = "replied", _("the lead replied")
    BOUNCED = "bounced", _("the address bounced")
    UNSUBSCRIBED = "unsubscribed", _("the lead unsubscribed")
    STOPPED = "stopped", _("stopped")
    SUPPRESSED = "suppressed", _("the address is suppressed")
    FORCE_COMPLETED = "force_completed", _("the sequence was completed by hand")
    ARCHIVED = "archived", _("the sequence was archived")
    STEP_REMOVED = "step_removed", _("the step was removed")


def stale_before(now: datetime) -> ExpressionWrapper:
    return ExpressionWrapper(
        Value(now, output_field=models.DateTimeField())
        - days("enrollment__sequence__harvest_days", "enrollment__sequence__stale_after_multiplier"),
        output_field=models.DateTimeField(),
    )


class ExecutionQuerySet(models.QuerySet["Execution"]):
    def with_due(self) -> Any:
        """`due_at`: the effective due time; in a paused enrollment never before it resumes."""
        paused = Greatest(EFFECTIVE_DUE, "enrollment__resume_at")
        return self.annotate(
            due_at=Case(
                When(enrollment__status="paused", then=paused),
                default=EFFECTIVE_DUE,
                output_field=models.DateTimeField(),
            )
        )

    def queued(self) -> "ExecutionQuerySet":
        return self.filter(status__in=QUEUED)

    def due(self, now: datetime) -> Any:
        """May be sent: due, in an active enrollment of an active sequence."""
        return (
            self.queued()
            .annotate(effective_due=EFFECTIVE_DUE)
            .filter(effective_due__lte=now, enrollment__status="active", enrollment__sequence__status="active")
        )

    def stale(self, now: datetime) -> Any:
        """Forgotten for longer than harvest_days × N; a step that may be sent late never is."""
        return self.queued().with_due().alias(stale_before=stale_before(now)).filter(TOO_LATE)

    def fresh(self, now: datetime) -> Any:
        """Unfinished, and not stale."""
        unfinished = self.filter(status__in=UNFINISHED).with_due().alias(stale_before=stale_before(now))
        return unfinished.filter(Q(status="processing") | ~TOO_LATE)

    def stranded(self, now: datetime) -> Any:
        return self.due(now - STRANDED_AFTER)

    def to_suppressed(self) -> "ExecutionQuerySet":
        """The lead's address of the step's channel must not be written to."""
        return self.annotate(
            subscription_id=Case(
                *(
                    When(step__channel=channel, then=F(f"enrollment__lead__{link}_id"))
                    for channel, (link, _type, _field) in SUBSCRIPTION_OF.items()
                )
            )
        ).filter(
            Exists(
                Subscription.objects.filter(pk=OuterRef("subscription_id")).filter(
                    Q(status__lte=0) | Q(Exists(Subscription.objects.suppressed().filter(pk=OuterRef("pk"))))
                )
            )
        )

    def actionable(self, now: datetime) -> "ExecutionQuerySet":
        """Of the stranded: without a healthy sender (`unmanned`), too late (`late`), or not yet back in the queue."""
        healthy = Sender.objects.filter(SenderQuerySet.HEALTHY, pk=OuterRef("enrollment__sender"))
        return (
            self.with_due()
            .annotate(unmanned=~Exists(healthy), stale_before=stale_before(now))
            .annotate(
                late=Case(
                    When(TOO_LATE, then=Value(True)),
                    default=Value(False),
                )
            )
            .filter(Q(unmanned=True) | Q(late=True) | Q(status="deferred"))
        )

    def stuck(self, now: datetime) -> "ExecutionQuerySet":
        """Processing for half an hour, and messaging is not at it any more (its own deadline owns what it works on)."""
        working = Message.objects.filter(pk=OuterRef("message_id"), status__in=["pending", "errored"])
        return self.filter(status="processing", processing_started_at__lte=now - STUCK_AFTER).filter(~Exists(working))

    def answered(self) -> "ExecutionQuerySet":
        """Processing, and the message has a result."""
        done = Message.objects.filter(pk=OuterRef("message_id")).exclude(status__in=["pending", "errored"])
        return self.filter(Exists(done), status="processing")

    def orphaned(self) -> "ExecutionQuerySet":
        return self.queued().exclude(enrollment__status__in=LIVE)

    def of(self, sequence_ids: Any) -> "ExecutionQuerySet":
        return self.filter(enrollment__sequence__in=sequence_ids)


class Execution(models.Model):
    """One step for one lead in one round: the same row can never make two messages."""

    class Status(models.TextChoices):
        PENDING = "pending", _("pending")
        PROCESSING = "processing", _("processing")
        DEFERRED = "deferred", _("deferred")
        AWAITING_ENRICHMENT = "awaiting_enrichment", _("awaiting enrichment")
        SENT = "sent", _("sent")
        SKIPPED = "skipped", _("skipped")
        FAILED = "failed", _("failed")

    WAITING = (*UNFINISHED, "awaiting_enrichment")

    id = key()
    enrollment = models.ForeignKey(
        Enrollment, models.CASCADE, related_name="executions", verbose_name=_("enrollment"), db_index=False
    )
    step = models.ForeignKey(Step, models.CASCADE, related_name="executions", verbose_name=_("step"))
    round = models.IntegerField(_("round"), default=1, db_default=1)
    status = StateField(_("status"), choices=Status.choices, default=Status.PENDING, db_default="pending")
    scheduled_at = models.DateTimeField(_("scheduled"))
    deferred_until = models.DateTimeField(_("deferred until"), null=True, blank=True)
    processing_started_at = models.DateTimeField(_("processing since"), null=True, blank=True)
    executed_at = models.DateTimeField(_("executed"), null=True, blank=True)
    skip_reason = models.CharField(
        _("reason"), max_length=20, choices=SkipReason.choices, null=True, blank=True, default=None
    )
    failure = models.CharField(_("failure"), max_length=255, blank=True, default="", db_default="")
    # No constraint: messaging may purge its old rows without asking us.
    message = models.ForeignKey(
        Message,
        models.DO_NOTHING,
        null=True,
        blank=True,
        db_constraint=False,
        db_index=False,
        related_name="+",
        verbose_name=_("message"),
    )
    # Who claimed it: its allowance was used, whoever the enrollment's sender is later.
    sender = models.ForeignKey(
        Sender, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("sender"), db_index=False
    )
    created_at = created()

    objects = ExecutionQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.PENDING: Swept("campaigns.send_due_steps", _("its due time"), since="scheduled_at"),
        Status.DEFERRED: Swept("campaigns.send_due_steps", _("the end of the deferral"), since="deferred_until"),
        Status.PROCESSING: Swept(
            "campaigns.reconcile_sequences", _("30 min, or messaging's own deadline"), since="processing_started_at"
        ),
        Status.AWAITING_ENRICHMENT: WaitsFor(_("whoever completes the lead")),
    }

    class Meta:
        db_table = "sequence_step_executions"
        verbose_name = _("step execution")
        verbose_name_plural = _("step executions")
        triggers = [*state_triggers(), *signal_triggers(executions_changed, enrollments=False)]
        constraints = [
            models.UniqueConstraint(fields=["enrollment", "step", "round"], name="step_executions_once"),
            models.CheckConstraint(
                name="step_executions_skipped_why",
                condition=Q(status="skipped", skip_reason__isnull=False)
                | (~Q(status="skipped") & Q(skip_reason__isnull=True)),
            ),
            models.CheckConstraint(
                name="step_executions_executed_when",
                condition=~Q(status__in=["sent", "failed"]) | Q(executed_at__isnull=False),
            ),
            models.CheckConstraint(
                name="step_executions_deferred_until_when",
                condition=~Q(status="deferred") | Q(deferred_until__isnull=False),
            ),
            models.CheckConstraint(
                name="step_executions_processing_since_when",
                condition=~Q(status="processing") | Q(processing_started_at__isnull=False),
            ),
        ]
        # Partial: what is over costs the sweeps nothing, however much of it there is.
        indexes = [
            models.Index(fields=["enrollment"], name="executions_unfinished", condition=Q(status__in=UNFINISHED)),
            models.Index(fields=["enrollment"], name="executions_awaiting", condition=Q(status="awaiting_enrichment")),
            models.Index(EFFECTIVE_DUE, name="executions_queued", condition=Q(status__in=QUEUED)),
            models.Index(
                fields=["processing_started_at"], name="executions_processing", condition=Q(status="processing")
            ),
            # What a sender's allowance and gap are counted from.
            models.Index(
                Coalesce("processing_started_at", "executed_at"),
                name="executions_claimed",
                condition=Q(IsNull(Coalesce("processing_started_at", "executed_at"), False)),
            ),
            models.Index(fields=["message"], name="executions_of_message", condition=Q(message__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.step} · {self.get_status_display()}"

    @property
    def effective_due_at(self) -> datetime:
        return self.deferred_until or self.scheduled_at

    @transition(field=status, source=[Status.PENDING, Status.DEFERRED], target=Status.PROCESSING)
    def start(self) -> None: ...

    @transition(field=status, source=Status.PENDING, target=Status.DEFERRED)
    def defer(self) -> None: ...

    @transition(
        field=status, source=[Status.DEFERRED, Status.PROCESSING, Status.AWAITING_ENRICHMENT], target=Status.PENDING
    )
    def requeue(self) -> None: ...

    @transition(field=status, source=[Status.PENDING, Status.DEFERRED], target=Status.AWAITING_ENRICHMENT)
    def await_enrichment(self) -> None: ...

    @transition(field=status, source=Status.PROCESSING, target=Status.SENT)
    def record_sent(self) -> None: ...

    @transition(field=status, source=Status.PROCESSING, target=Status.FAILED)
    def record_failed(self) -> None: ...

    @transition(
        field=status,
        source=[Status.PENDING, Status.DEFERRED, Status.PROCESSING, Status.AWAITING_ENRICHMENT],
        target=Status.SKIPPED,
    )
    def skip(self) -> None: ...
