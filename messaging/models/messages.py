from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib.postgres.functions import RandomUUID
from django.db import models
from django.db.models import Exists, F, Min, OuterRef, Q, Value
from django.db.models.functions import Coalesce, Greatest, Now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import Refreshable, Rests, StateField, Swept, state_triggers
from config.triggers import append_only, undeletable
from messaging.models.applications import Application
from messaging.models.subscriptions import Channel, Subscription
from messaging.models.templates import MessageTemplate
from messaging.triggers import (
    CHANNEL_OF_SUBSCRIPTION,
    COUNT_RECEIPTS,
    MESSAGE_CREATED,
    MESSAGE_MOVED,
    RECOUNT_USAGE,
    RETRY_CLEARS,
    VERSION_HISTORY,
)
from messaging.triggers.rollups import ROLLUP_TRIGGERS
from messaging.triggers.webhooks import WEBHOOK_OUTBOX

EMPTY: Any = Value({}, models.JSONField())
DUE = Coalesce("next_attempt_at", "scheduled_at", "created_at")
# GREATEST of PostgreSQL passes over NULL: without scheduled_at the clock starts at created_at.
CLOCK_START = Greatest("created_at", "scheduled_at")
# The parameters are what a Kakao template was filled with: the body once more.
CONTENT_CLEARED: dict[str, Any] = {"title": "", "body": "", "data": {}, "template_parameters": {}}


class Kind(models.TextChoices):
    NOTICE = "notice", _("notice")
    MARKETING = "marketing", _("marketing")
    TRANSACTIONAL = "transactional", _("transactional")


class FailureType(models.TextChoices):
    NETWORK = "network", _("network")
    OUTAGE = "outage", _("outage")
    RATE_LIMITED = "rate_limited", _("rate limited")
    PERMANENT = "permanent", _("permanent")
    CONFIG = "config", _("set-up")


class HoldReason(models.TextChoices):
    OUTCOME_UNKNOWN = "outcome_unknown", _("outcome unknown")


def longest_pending(rows: "MessageQuerySet") -> datetime | None:
    """By the clock that ends them. What is scheduled for later does not wait yet."""
    return rows.annotate(clock_start=CLOCK_START).order_by("clock_start").values_list("clock_start", flat=True).first()


def longest_accepted(rows: "MessageQuerySet") -> datetime | None:
    """Of the channels that give a receipt; one look per channel, because the index begins with it."""
    waiting = [channel for channel, patience in settings.RECEIPT_TIMEOUT.items() if patience is not None]
    first = [rows.filter(channel_type=channel).aggregate(at=Min("sent_at"))["at"] for channel in waiting]
    return min((at for at in first if at is not None), default=None)


def unhurried(message: "Message") -> Rests | None:
    """What no clock ends: a channel without receipts, and what has expired already."""
    if message.status == Message.Status.SUCCESSFUL and settings.RECEIPT_TIMEOUT[message.channel_type] is None:
        return Rests(_("Its channel gives no receipts; an open or a click may still come."))
    return Rests(_("It has expired: nothing counts as a conversion any more.")) if message.expired_at else None


def longest_delivered(rows: "MessageQuerySet") -> datetime | None:
    """What is expired waits for nothing."""
    return rows.filter(expired_at__isnull=True).aggregate(at=Min("received_at"))["at"]


def unclaimed(now: datetime) -> Q:
    """Nobody is sending it: no lease, or one that ran out with no open attempt, which no dispatcher leaves behind."""
    begun = MessageAttempt.objects.filter(message=OuterRef("pk"), ended_at__isnull=True)
    lapsed = Q(leased_until__lte=now) | Q(leased_until__isnull=True)
    return Q(lease_id__isnull=True) | (lapsed & Q(~Exists(begun)))


class MessageQuerySet(models.QuerySet["Message"]):
    def alive(self, now: datetime) -> "MessageQuerySet":
        """Not past the last word of 24 h; the other side of `overdue`."""
        return self.alias(clock_start=CLOCK_START).filter(clock_start__gt=now - settings.MESSAGE_LIFE)

    def overdue(self, now: datetime) -> "MessageQuerySet":
        """Neither sent nor ended within 24 h. A leased one is not: somebody may be sending it at this moment."""
        return (
            self.filter(unclaimed(now), status__in=["pending", "errored"])
            .annotate(clock_start=CLOCK_START)
            .filter(clock_start__lte=now - settings.MESSAGE_LIFE)
        )

    def retryable(self, now: datetime) -> "MessageQuerySet":
        return self.alive(now).filter(status="errored", next_attempt_at__lte=now)

    def due(self, now: datetime) -> "MessageQuerySet":
        """What a dispatcher may take now."""
        return (
            self.alive(now)
            .alias(due_at=DUE)
            .filter(unclaimed(now), status="pending", hold_reason__isnull=True, due_at__lte=now)
        )

    def unreceipted(self, now: datetime) -> "MessageQuerySet":
        """Accepted by a provider, and no receipt within the channel's time; channels without one never are."""
        late = [
            Q(channel_type=channel, sent_at__lte=now - patience)
            for channel, patience in settings.RECEIPT_TIMEOUT.items()
            if patience is not None
        ]
        return self.filter(status="successful").filter(Q(*late, _connector=Q.OR) if late else Q(pk__in=[]))

    def unconverted(self, now: datetime) -> "MessageQuerySet":
        """Received, and past the time in which it may still be converted."""
        return self.filter(
            status="received", expired_at__isnull=True, received_at__lte=now - settings.CONVERSION_WINDOW
        )

    def archivable(self, now: datetime) -> "MessageQuerySet":
        return self.filter(status="failed", archived_at__isnull=True, failed_at__lte=now - settings.FAILED_KEPT)

    def unresolved(self, now: datetime) -> "MessageQuerySet":
        """Held because nobody knows whether they arrived, and still to be looked into; without a time: by a person.

        Past their day they are not: let go of, they would end as never sent.
        """
        free = Q(lease_id__isnull=True) | Q(leased_until__lte=now)
        held = self.filter(free, status="pending", hold_reason=HoldReason.OUTCOME_UNKNOWN, next_attempt_at__lte=now)
        return held.alive(now)

    def inbox(self, now: datetime) -> "MessageQuerySet":
        """What an app shows: delivered, not yet opened, not expired, though no sweep may have written that down."""
        patience = settings.RECEIPT_TIMEOUT["in_app"]
        accepted = Q(status="successful") if patience is None else Q(status="successful", sent_at__gt=now - patience)
        shown = Q(status="received", expired_at__isnull=True, received_at__gt=now - settings.CONVERSION_WINDOW)
        return self.filter(accepted | shown, channel_type="in_app")

    def cancellable(self) -> "MessageQuerySet":
        return self.filter(status__in=["pending", "errored"], lease_id__isnull=True)


class Message(Refreshable):
    class Status(models.TextChoices):
        PENDING = "pending", _("pending")
        SUCCESSFUL = "successful", _("accepted by provider")
        RECEIVED = "received", _("delivered")
        CONVERTED = "converted", _("converted")
        FAILED = "failed", _("failed")
        ERRORED = "errored", _("errored")

    # Made here, in the order of time; SQL written by hand may leave it out.
    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    application = models.ForeignKey(
        Application, models.PROTECT, db_index=False, related_name="messages", verbose_name=_("application")
    )
    subscription = models.ForeignKey(
        Subscription, models.PROTECT, db_index=False, related_name="messages", verbose_name=_("subscription")
    )
    # Of the subscription, kept here so that a claim for one provider reads one index.
    subscription_type = models.CharField(_("subscription type"), max_length=12, choices=Subscription.Type.choices)
    user_id = models.CharField(_("user"), max_length=255, null=True, blank=True)
    channel_type = models.CharField(_("channel"), max_length=10, choices=Channel.choices)
    kind = models.CharField(_("kind"), max_length=13, choices=Kind.choices, default=Kind.NOTICE, db_default="notice")
    title = models.TextField(_("title"), blank=True, default="", db_default="")
    body = models.TextField(_("body"), blank=True, default="", db_default="")
    data = models.JSONField(_("data"), default=dict, db_default=EMPTY, blank=True)
    template = models.ForeignKey(
        MessageTemplate,
        models.SET_NULL,
        null=True,
        blank=True,
        db_index=False,
        related_name="+",
        verbose_name=_("template"),
    )
    template_version = models.IntegerField(_("template version"), null=True, blank=True)
    # What the template was filled with; Kakao wants the code and the values, not the text.
    template_code = models.CharField(max_length=20, blank=True, default="", db_default="")
    template_parameters = models.JSONField(default=dict, db_default=EMPTY, blank=True)
    campaign = models.CharField(_("campaign"), max_length=255, null=True, blank=True)
    # The subscription's when the message was made: what it is counted under by tag.
    segment = models.IntegerField(null=True, editable=False)
    # Whom it is from, where that is not the provider's usual: a mailbox with its name, or a number.
    from_address = models.CharField(
        pgettext_lazy("message", "from"), max_length=512, blank=True, default="", db_default=""
    )
    priority = models.SmallIntegerField(_("priority"), default=5, db_default=5)
    scheduled_at = models.DateTimeField(_("scheduled"), null=True, blank=True)

    status = StateField(_("status"), choices=Status.choices, default=Status.PENDING, db_default="pending")
    created_at = models.DateTimeField(_("created"), db_default=Now())
    sent_at = models.DateTimeField(_("accepted"), null=True, blank=True)
    received_at = models.DateTimeField(_("delivered"), null=True, blank=True)
    converted_at = models.DateTimeField(_("converted"), null=True, blank=True)
    failed_at = models.DateTimeField(_("failed"), null=True, blank=True)
    retried_at = models.DateTimeField(_("last retried"), null=True, blank=True)
    expired_at = models.DateTimeField(_("expired"), null=True, blank=True)
    archived_at = models.DateTimeField(_("archived"), null=True, blank=True)

    error_reason = models.CharField(_("reason"), max_length=255, null=True, blank=True)
    error_details = models.JSONField(_("error details"), default=dict, db_default=EMPTY, blank=True)
    failure_type = models.CharField(_("failure"), max_length=12, choices=FailureType.choices, null=True, blank=True)
    network_retries = models.SmallIntegerField(_("network retries"), default=0, db_default=0)
    outage_retries = models.SmallIntegerField(_("outage retries"), default=0, db_default=0)
    rate_limited_retries = models.SmallIntegerField(_("rate-limit retries"), default=0, db_default=0)
    next_attempt_at = models.DateTimeField(_("next attempt"), null=True, blank=True)
    hold_reason = models.CharField(
        pgettext_lazy("message", "held"), max_length=20, choices=HoldReason.choices, null=True, blank=True
    )
    receipt_implied = models.BooleanField(_("receipt implied"), default=False, db_default=False)
    conversion = models.JSONField(_("conversion"), default=dict, db_default=EMPTY, blank=True)

    # A lease is one dispatcher's claim; it is let go of when the result is recorded, and only then.
    lease_id = models.UUIDField(_("lease"), null=True, blank=True, editable=False)
    leased_until = models.DateTimeField(_("leased until"), null=True, blank=True, editable=False)
    attempt_count = models.SmallIntegerField(_("attempts"), default=0, db_default=0, editable=False)
    provider_message_id = models.CharField(_("provider's id"), max_length=255, null=True, blank=True)

    retry_of = models.ForeignKey(
        "self",
        models.SET_NULL,
        null=True,
        blank=True,
        db_index=False,
        related_name="retries",
        verbose_name=_("retry of"),
    )
    failover_of = models.ForeignKey(
        "self",
        models.SET_NULL,
        null=True,
        blank=True,
        db_index=False,
        related_name="failovers",
        verbose_name=_("failover of"),
    )
    idempotency_key = models.CharField(_("idempotency key"), max_length=255, null=True, blank=True)
    # Of the request that made it: the same key with another body is a conflict.
    fingerprint = models.CharField(max_length=64, blank=True, default="", db_default="")
    version = models.SmallIntegerField(default=0, db_default=0, editable=False)
    version_history = models.JSONField(_("history"), default=dict, db_default=EMPTY, editable=False)

    objects = MessageQuerySet.as_manager()
    liveness = {
        Status.PENDING: Swept("messaging.expire_messages", _("24 h without being accepted"), oldest=longest_pending),
        Status.ERRORED: Swept("messaging.retry_errored_messages", _("its next attempt"), since="next_attempt_at"),
        Status.SUCCESSFUL: Swept(
            "messaging.expire_messages",
            _("72 h without a receipt"),
            since="sent_at",
            oldest=longest_accepted,
            instead=unhurried,
        ),
        Status.RECEIVED: Swept(
            "messaging.expire_messages",
            _("30 d without a conversion"),
            since="received_at",
            oldest=longest_delivered,
            instead=unhurried,
        ),
    }

    class Meta:
        db_table = "messages"
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        triggers = [
            *state_triggers(),
            *undeletable("messages"),
            CHANNEL_OF_SUBSCRIPTION,
            RETRY_CLEARS,
            VERSION_HISTORY,
            MESSAGE_CREATED,
            MESSAGE_MOVED,
            COUNT_RECEIPTS,
            RECOUNT_USAGE,
            *ROLLUP_TRIGGERS,
            WEBHOOK_OUTBOX,
        ]
        constraints = [
            models.CheckConstraint(
                name="messages_pending_is_untouched",
                condition=~Q(status="pending")
                | Q(
                    sent_at__isnull=True,
                    received_at__isnull=True,
                    converted_at__isnull=True,
                    failed_at__isnull=True,
                ),
            ),
            models.CheckConstraint(
                name="messages_successful_was_sent",
                condition=~Q(status="successful") | Q(sent_at__isnull=False),
            ),
            models.CheckConstraint(
                name="messages_received_was_received",
                condition=~Q(status__in=["received", "converted"])
                | Q(sent_at__isnull=False, received_at__isnull=False),
            ),
            models.CheckConstraint(
                name="messages_converted_has_its_time",
                condition=Q(status="converted", converted_at__isnull=False)
                | (~Q(status="converted") & Q(converted_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="messages_failed_has_time_and_reason",
                condition=Q(status="failed", failed_at__isnull=False, error_reason__isnull=False, error_reason__gt="")
                | (~Q(status="failed") & Q(failed_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="messages_errored_has_its_plan",
                condition=~Q(status="errored")
                | Q(
                    error_details__has_key="errored_at",
                    error_details__errored_at__gt="",
                    next_attempt_at__isnull=False,
                    failure_type__isnull=False,
                    failure_type__gt="",
                ),
            ),
            models.CheckConstraint(
                name="messages_errored_was_not_sent",
                condition=~Q(status="errored") | Q(sent_at__isnull=True, received_at__isnull=True),
            ),
            models.CheckConstraint(
                name="messages_expired_is_not_converted",
                condition=Q(expired_at__isnull=True) | Q(converted_at__isnull=True),
            ),
            models.CheckConstraint(
                name="messages_expired_was_received", condition=Q(expired_at__isnull=True) | Q(status="received")
            ),
            models.CheckConstraint(
                name="messages_archived_was_failed", condition=Q(archived_at__isnull=True) | Q(status="failed")
            ),
            models.CheckConstraint(name="messages_priority", condition=Q(priority__range=(0, 9))),
            models.CheckConstraint(name="messages_kind", condition=Q(kind__in=Kind.values)),
            models.CheckConstraint(name="messages_channel_type", condition=Q(channel_type__in=Channel.values)),
            models.CheckConstraint(
                name="messages_failure_type",
                condition=Q(failure_type__isnull=True) | Q(failure_type__in=FailureType.values),
            ),
            models.CheckConstraint(
                name="messages_hold_reason",
                condition=Q(hold_reason__isnull=True) | Q(hold_reason__in=HoldReason.values),
            ),
            models.UniqueConstraint(
                fields=["application", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="messages_idempotency_key_once",
            ),
            models.UniqueConstraint(
                fields=["retry_of"], condition=Q(retry_of__isnull=False), name="messages_retried_once"
            ),
            models.UniqueConstraint(
                fields=["failover_of"], condition=Q(failover_of__isnull=False), name="messages_failed_over_once"
            ),
        ]
        # Partial on the live states: what is over costs the sweeps nothing, however much of it there is.
        indexes = [
            models.Index(fields=["application", "created_at"], name="messages_of_application"),
            models.Index(fields=["subscription", "created_at"], name="messages_of_subscription"),
            models.Index(
                fields=["application", "user_id"], name="messages_of_user", condition=Q(user_id__isnull=False)
            ),
            models.Index(fields=["campaign"], name="messages_of_campaign", condition=Q(campaign__isnull=False)),
            models.Index(
                F("subscription_type"),
                F("priority").desc(),
                DUE,
                name="messages_due",
                condition=Q(status="pending", hold_reason__isnull=True),
            ),
            models.Index(
                fields=["next_attempt_at"],
                name="messages_held",
                condition=Q(status="pending", hold_reason__isnull=False),
            ),
            models.Index(fields=["next_attempt_at"], name="messages_errored", condition=Q(status="errored")),
            models.Index(CLOCK_START, name="messages_clock", condition=Q(status__in=["pending", "errored"])),
            models.Index(
                fields=["channel_type", "sent_at"], name="messages_unreceipted", condition=Q(status="successful")
            ),
            models.Index(
                fields=["received_at"],
                name="messages_unconverted",
                condition=Q(status="received", expired_at__isnull=True),
            ),
            models.Index(
                fields=["failed_at"], name="messages_archivable", condition=Q(status="failed", archived_at__isnull=True)
            ),
            # Few among millions, and what people look for in lists.
            models.Index(fields=["application", "created_at"], name="messages_failed", condition=Q(status="failed")),
            models.Index(
                fields=["provider_message_id"],
                name="messages_of_provider_id",
                condition=Q(provider_message_id__isnull=False),
            ),
        ]
        permissions = [
            ("cancel_message", "Can cancel messages"),
            ("report_receipt", "Can report receipts and conversions"),
            ("retry_message", "Can retry failed messages"),
            ("resolve_message", "Can resolve unknown outcomes"),
            ("read_inbox", "Can read inboxes"),
        ]

    def __str__(self) -> str:
        return f"{self.get_channel_type_display()} {self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """As the trigger does for rows written by hand: the channel is the subscription's."""
        if not (self.subscription_type and self.channel_type):
            self.subscription_type, self.channel_type = self.subscription.type, self.subscription.channel_type
        super().save(*args, **kwargs)

    @property
    def retry_counts(self) -> dict[str, int]:
        return {
            "network": self.network_retries,
            "outage": self.outage_retries,
            "rate_limited": self.rate_limited_retries,
        }

    @transition(field=status, source=Status.PENDING, target=Status.SUCCESSFUL)
    def send(self, at: datetime) -> None:
        self.sent_at = at

    @transition(field=status, source=[Status.PENDING, Status.SUCCESSFUL, Status.ERRORED], target=Status.FAILED)
    def fail(self, at: datetime, reason: str) -> None:
        self.failed_at, self.error_reason = at, reason

    @transition(field=status, source=Status.PENDING, target=Status.ERRORED)
    def error(self, at: datetime, failure_type: str, next_attempt_at: datetime) -> None:
        self.error_details = {**self.error_details, "errored_at": at.isoformat()}
        self.failure_type, self.next_attempt_at = failure_type, next_attempt_at

    @transition(field=status, source=Status.ERRORED, target=Status.PENDING)
    def retry(self, at: datetime) -> None:
        self.retried_at, self.next_attempt_at, self.failure_type, self.error_details = at, None, None, {}

    @transition(field=status, source=Status.SUCCESSFUL, target=Status.RECEIVED)
    def receive(self, at: datetime, implied: bool = False) -> None:
        self.received_at, self.receipt_implied = at, implied

    @transition(
        field=status,
        source=Status.RECEIVED,
        target=Status.CONVERTED,
        conditions=[lambda message: getattr(message, "expired_at", None) is None],
    )
    def convert(self, at: datetime) -> None:
        self.converted_at = at

    @transition(field=status, source=Status.SUCCESSFUL, target=Status.FAILED)
    def timeout(self, at: datetime) -> None:
        self.failed_at, self.error_reason = at, "receipt_timeout"

    @transition(field=status, source=Status.RECEIVED, target=Status.RECEIVED)
    def expire(self, at: datetime) -> None:
        self.expired_at = at


class MessageEvent(models.Model):
    """What happened to a message; written by a trigger, which knows that the row is there: no foreign key."""

    id = models.BigAutoField(primary_key=True)
    message = models.ForeignKey(Message, models.DO_NOTHING, db_constraint=False, related_name="events")
    event_type = models.CharField(_("event"), max_length=20)
    occurred_at = models.DateTimeField(_("at"), db_default=Now())
    metadata = models.JSONField(_("details"), default=dict, db_default=EMPTY)

    class Meta:
        db_table = "message_events"
        verbose_name = _("message event")
        verbose_name_plural = _("message events")
        triggers = append_only("message_events")
        constraints = [
            models.CheckConstraint(
                name="message_events_type",
                condition=Q(
                    event_type__in=["created", "sent", "received", "converted", "failed", "errored", "retried"]
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.event_type


class MessageAttemptQuerySet(models.QuerySet["MessageAttempt"]):
    def lost(self, now: datetime) -> "MessageAttemptQuerySet":
        """Begun by somebody who is gone: the lease ran out, or nobody holds one."""
        unheld = Q(message__lease_id__isnull=True, started_at__lte=now - settings.MESSAGE_LEASE)
        return self.filter(Q(message__leased_until__lte=now) | unheld, ended_at__isnull=True)


class MessageAttempt(models.Model):
    """One call of a provider: the row is there before the call, so a crash leaves it open."""

    class Outcome(models.TextChoices):
        ACCEPTED = "accepted", _("accepted")
        REJECTED = "rejected", _("rejected")
        TRANSIENT = "transient", _("transient")
        RATE_LIMITED = "rate_limited", _("rate limited")
        CONFIG = "config", _("set-up")
        UNKNOWN = "unknown", _("unknown")

    id = models.BigAutoField(primary_key=True)
    message = models.ForeignKey(
        Message, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="attempts"
    )
    attempt_no = models.SmallIntegerField(_("no."))
    started_at = models.DateTimeField(_("started"), db_default=Now())
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)
    outcome = models.CharField(_("outcome"), max_length=12, choices=Outcome.choices, null=True, blank=True)
    provider = models.CharField(_("provider"), max_length=50, blank=True, default="", db_default="")
    provider_message_id = models.CharField(_("provider's id"), max_length=255, null=True, blank=True)
    code = models.CharField(_("code"), max_length=100, null=True, blank=True)
    raw = models.TextField(_("raw answer"), null=True, blank=True)
    latency_ms = models.IntegerField(_("latency (ms)"), null=True, blank=True)

    objects = MessageAttemptQuerySet.as_manager()

    class Meta:
        db_table = "message_attempts"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        constraints = [
            models.UniqueConstraint(fields=["message", "attempt_no"], name="message_attempts_once"),
            models.CheckConstraint(
                name="message_attempts_ended_with_outcome",
                condition=Q(ended_at__isnull=True, outcome__isnull=True)
                | Q(ended_at__isnull=False, outcome__isnull=False),
            ),
            models.CheckConstraint(
                name="message_attempts_outcome",
                condition=Q(outcome__isnull=True)
                | Q(outcome__in=["accepted", "rejected", "transient", "rate_limited", "config", "unknown"]),
            ),
        ]
        indexes = [
            models.Index(fields=["message"], name="message_attempts_open", condition=Q(ended_at__isnull=True)),
            # A message accepted twice has an accepted attempt beyond its first: few rows, a cheap ledger.
            models.Index(
                fields=["message"],
                name="message_attempts_again",
                condition=Q(outcome="accepted", attempt_no__gt=1),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} #{self.attempt_no}"
