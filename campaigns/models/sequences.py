from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Case, Exists, ExpressionWrapper, F, Max, Min, OuterRef, Q, Subquery, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Greatest, Least, Now
from django.utils.translation import gettext_lazy as _
from django_fsm import transition

from campaigns.models.keys import created, key
from campaigns.models.senders import Sender
from campaigns.triggers import COUNTED, LIVE, TRUE_COUNTS, UNFINISHED, pending_work
from config.statemachine import StateField, Swept, WaitsFor, state_triggers
from messaging.models import Application
from messaging.models.messages import Kind

DAY = timedelta(days=1)
JUST_ACTIVATED = timedelta(hours=24)
# A finished sequence is completed by the next tick, at most 5 minutes away; twice that is a fault.
STUCK_COMPLETION = timedelta(minutes=10)


# What a person writes into the columns past the door's bounds must not carry a date out of the calendar: the statement
# that meets such a row would fail for all the others.
FEWEST, MOST = 1, 1000


def bounded(column: str) -> str:
    return f"least(greatest({column}, {FEWEST}), {MOST})"


# The stale limit of the sequence `s`, for SQL written by hand.
STALE_AFTER = f"{bounded('s.harvest_days')} * {bounded('s.stale_after_multiplier')} * interval '1 day'"


def days(*names: str) -> ExpressionWrapper:
    """The product of the columns, as that many days."""
    product: Any = Value(DAY, output_field=models.DurationField())
    for name in names:
        product = product * Least(Greatest(F(name), FEWEST), MOST)
    return ExpressionWrapper(product, output_field=models.DurationField())


class DisplayState(models.TextChoices):
    """What a badge says: the status, or why an active sequence with nothing to send is still active."""

    DRAFT = "draft", _("draft")
    GENERATING = "generating", _("generating")
    READY = "ready", _("ready")
    ACTIVE = "active", _("running")
    PAUSED = "paused", _("paused")
    COMPLETED = "completed", _("completed")
    ARCHIVED = "archived", _("archived")
    REPLY_HARVEST = "reply_harvest", _("receiving replies")
    PARTIALLY_PAUSED = "partially_paused", _("partially paused")
    FINALIZING = "finalizing", _("finalizing")


class SequenceQuerySet(models.QuerySet["Sequence"]):
    """The guards as annotations: reconciler, badge, API, filter and integrity read the same ones.

    Any where rows come with annotations: the type checker cannot follow those through methods.
    """

    def with_work(self) -> Any:
        """`work`: the predicate itself, as the triggers' SQL has it."""
        return self.annotate(work=RawSQL(pending_work('"sequences"."id"'), [], models.BooleanField()))

    def drifted(self) -> Any:
        return self.filter(status__in=Sequence.RECONCILABLE).with_work().exclude(work=F("has_pending_work"))

    def with_guards(self, now: datetime) -> Any:
        """`work`, `harvest_until` (null without a human reply), `untouched` (nobody enrolled, nothing sent)."""
        from campaigns.models.enrollments import Enrollment
        from campaigns.models.executions import Execution
        from campaigns.models.replies import Reply

        replies = Reply.objects.filter(kind="human", enrollment__sequence=OuterRef("pk")).order_by()
        last = replies.values("enrollment__sequence").annotate(last=Max("received_at")).values("last")
        return (
            self.with_work()
            .annotate(last_reply_at=Subquery(last))
            .annotate(
                harvest_until=ExpressionWrapper(
                    F("last_reply_at") + days("harvest_days"), output_field=models.DateTimeField()
                ),
                untouched=~Exists(Enrollment.objects.filter(sequence=OuterRef("pk")))
                & ~Exists(Execution.objects.filter(step__sequence=OuterRef("pk"), status="sent")),
            )
        )

    def harvesting(self, now: datetime) -> Q:
        return Q(harvest_until__gt=now)

    def just_activated(self, now: datetime) -> Q:
        return Q(untouched=True, activated_at__gt=now - JUST_ACTIVATED)

    def completable(self, now: datetime) -> Any:
        """Active, and none of the guards holds. (`~Q` of a nullable comparison would lose the rows without a reply.)"""
        return (
            self.filter(status="active")
            .with_guards(now)
            .filter(work=False)
            .filter(Q(harvest_until__isnull=True) | Q(harvest_until__lte=now))
            .exclude(self.just_activated(now))
        )

    def stuck_in_completion(self, now: datetime) -> Any:
        ended = Case(
            When(untouched=True, then=F("activated_at") + Value(JUST_ACTIVATED)), output_field=models.DateTimeField()
        )
        return (
            self.completable(now)
            .annotate(since=Greatest("pending_work_changed_at", "harvest_until", ended))
            .filter(since__lt=now - STUCK_COMPLETION)
        )

    def contradictory(self) -> Any:
        """Completed, and yet there is work."""
        return self.filter(status="completed").with_work().filter(work=True)

    def with_fresh_work(self, now: datetime) -> Any:
        """`fresh`: not all of the pending work is stale."""
        from campaigns.models.executions import Execution

        fresh = Execution.objects.fresh(now).filter(enrollment__sequence=OuterRef("pk"), enrollment__status__in=LIVE)
        return self.annotate(fresh=Exists(fresh))

    def miscounted(self) -> "SequenceQuerySet":
        """The stored counters do not add up, or are not what the rows say. One pass over all rows, where correlated
        subqueries of the ORM would be one per sequence and counter."""
        names = (*COUNTED, "enrollments")
        wrong = " OR ".join(f"s.{name}_count <> v.{name}" for name in names)
        sql = f"SELECT s.id FROM sequences s JOIN ({TRUE_COUNTS}) v ON v.id = s.id WHERE {wrong}"
        return self.filter(pk__in=RawSQL(sql, []))

    def with_display(self, now: datetime) -> Any:
        """`display_state` and what its tooltip and `display_until` need."""
        from campaigns.models.enrollments import Enrollment
        from campaigns.models.executions import Execution

        dated = Enrollment.objects.filter(sequence=OuterRef("pk"), status="paused", resume_at__isnull=False).order_by()
        busy = Execution.objects.filter(
            enrollment__sequence=OuterRef("pk"), enrollment__status="active", status__in=UNFINISHED
        )
        first = dated.values("sequence").annotate(first=Min("resume_at")).values("first")
        active = Q(status="active")
        return (
            self.with_guards(now)
            .annotate(first_resume_at=Subquery(first))
            .annotate(
                display_state=Case(
                    When(active & Q(work=False) & self.harvesting(now), then=Value("reply_harvest")),
                    When(active & Q(first_resume_at__isnull=False) & ~Exists(busy), then=Value("partially_paused")),
                    When(
                        active & Q(work=False) & (Q(untouched=False) | Q(activated_at__lte=now - JUST_ACTIVATED)),
                        then=Value("finalizing"),
                    ),
                    default=F("status"),
                    output_field=models.CharField(choices=DisplayState.choices),
                )
            )
        )


class Sequence(models.Model):
    """Steps sent one after another to the leads enrolled in it."""

    class Status(models.TextChoices):
        DRAFT = "draft", _("draft")
        GENERATING = "generating", _("generating")
        READY = "ready", _("ready")
        ACTIVE = "active", _("active")
        PAUSED = "paused", _("paused")
        COMPLETED = "completed", _("completed")
        ARCHIVED = "archived", _("archived")

    RECONCILABLE = ("active", "paused", "completed")
    ENROLLABLE = ("draft", "ready", "active", "paused", "completed")

    id = key()
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="sequences", verbose_name=_("application")
    )
    name = models.CharField(_("name"), max_length=200)
    kind = models.CharField(_("kind"), max_length=13, choices=Kind.choices, default=Kind.NOTICE, db_default="notice")
    status = StateField(_("status"), choices=Status.choices, default=Status.DRAFT, db_default="draft")
    # Derived: written by the triggers of enrollments and executions, mended by the reconciler, by nobody else.
    has_pending_work = models.BooleanField(_("work pending"), default=False, db_default=False, editable=False)
    pending_work_changed_at = models.DateTimeField(_("work pending since"), db_default=Now(), editable=False)
    total_count = models.BigIntegerField(_("executions"), default=0, db_default=0, editable=False)
    sent_count = models.BigIntegerField(_("sent"), default=0, db_default=0, editable=False)
    failed_count = models.BigIntegerField(_("failed"), default=0, db_default=0, editable=False)
    skipped_count = models.BigIntegerField(_("skipped"), default=0, db_default=0, editable=False)
    waiting_count = models.BigIntegerField(_("waiting"), default=0, db_default=0, editable=False)
    enrollments_count = models.BigIntegerField(_("enrollments"), default=0, db_default=0, editable=False)
    harvest_days = models.IntegerField(_("days in which replies are awaited"), default=3, db_default=3)
    stale_after_multiplier = models.IntegerField(_("stale after this many times as long"), default=3, db_default=3)
    activated_at = models.DateTimeField(_("activated"), null=True, blank=True)
    completed_at = models.DateTimeField(_("completed at"), null=True, blank=True)
    senders: "models.ManyToManyField[Sender, SequenceSender]" = models.ManyToManyField(
        Sender, through="SequenceSender", related_name="sequences", verbose_name=_("senders")
    )
    created_at = created()

    objects = SequenceQuerySet.as_manager()
    born = tuple(Status.values)
    liveness = {
        Status.DRAFT: WaitsFor(_("its author")),
        Status.GENERATING: WaitsFor(_("whoever writes its texts")),
        Status.READY: WaitsFor(_("whoever activates it")),
        Status.ACTIVE: Swept("campaigns.reconcile_sequences", _("5 min after its last work"), since="activated_at"),
        Status.PAUSED: WaitsFor(_("whoever paused it")),
        Status.COMPLETED: Swept("campaigns.reconcile_sequences", _("5 min after new work"), since="completed_at"),
    }

    class Meta:
        db_table = "sequences"
        verbose_name = _("sequence")
        verbose_name_plural = _("sequences")
        triggers = state_triggers()
        constraints = [
            models.CheckConstraint(
                name="sequences_started_when",
                condition=~Q(status__in=["active", "paused", "completed"]) | Q(activated_at__isnull=False),
            ),
            models.CheckConstraint(
                name="sequences_completed_when", condition=~Q(status="completed") | Q(completed_at__isnull=False)
            ),
        ]
        indexes = [models.Index(fields=["status", "has_pending_work"], name="sequences_candidates")]
        permissions = [
            ("complete_sequence", "Can force sequences to completion"),
            ("reactivate_sequence", "Can reactivate completed sequences"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def counters(self) -> dict[str, int]:
        return {name: getattr(self, f"{name}_count") for name in (*COUNTED, "enrollments")}

    @transition(field=status, source=Status.DRAFT, target=Status.GENERATING)
    def generate(self) -> None: ...

    @transition(field=status, source=Status.GENERATING, target=Status.DRAFT)
    def cancel_generating(self) -> None: ...

    @transition(field=status, source=Status.GENERATING, target=Status.READY)
    def mark_ready(self) -> None: ...

    @transition(field=status, source=[Status.DRAFT, Status.READY], target=Status.ACTIVE)
    def activate(self, now: datetime) -> None:
        self.activated_at = now

    @transition(field=status, source=Status.ACTIVE, target=Status.PAUSED)
    def pause(self) -> None: ...

    @transition(field=status, source=Status.PAUSED, target=Status.ACTIVE)
    def resume(self) -> None: ...

    @transition(field=status, source=[Status.ACTIVE, Status.PAUSED], target=Status.COMPLETED)
    def complete(self, now: datetime) -> None:
        self.completed_at = now

    @transition(field=status, source=Status.COMPLETED, target=Status.ACTIVE)
    def reactivate(self, now: datetime) -> None:
        self.activated_at = now

    @transition(
        field=status,
        source=[Status.DRAFT, Status.GENERATING, Status.READY, Status.PAUSED, Status.COMPLETED],
        target=Status.ARCHIVED,
    )
    def archive(self) -> None: ...


class SequenceSender(models.Model):
    """A sender in a sequence's pool, in the order of preference."""

    id = models.BigAutoField(primary_key=True)
    sequence = models.ForeignKey(Sequence, models.CASCADE, related_name="pool", verbose_name=_("sequence"))
    sender = models.ForeignKey(Sender, models.CASCADE, related_name="pools", verbose_name=_("sender"))
    position = models.IntegerField(_("position"), default=1, db_default=1)

    class Meta:
        db_table = "sequence_senders"
        verbose_name = _("sender of a sequence")
        verbose_name_plural = _("senders of a sequence")
        constraints = [models.UniqueConstraint(fields=["sequence", "sender"], name="sequence_senders_once")]

    def __str__(self) -> str:
        return f"{self.position}. {self.sender}"
