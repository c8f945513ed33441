from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Count, Exists, OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext_lazy as _
from prometheus_client.core import GaugeMetricFamily

from config.integrity import Invariant
from messaging.models import (
    Application,
    Message,
    MessageAttempt,
    MessageEvent,
    ProviderCircuit,
    WebhookDelivery,
    WebhookInbox,
)
from messaging.services.analytics import drifted_applications, heal_drift

# Sweeps come every five minutes at most; what is later than two of them is not going to come by itself.
GRACE = timedelta(minutes=10)
LOOKED_AT = 100_000


def double_sends(_now: datetime) -> QuerySet[Message]:
    """Accepted by a provider more than once. Read from the few accepted attempts that were not a message's first."""
    again = MessageAttempt.objects.filter(outcome="accepted", attempt_no__gt=1).values("message_id")
    accepted = Count("attempts", filter=Q(attempts__outcome="accepted"))
    return Message.objects.filter(pk__in=again).annotate(accepted=accepted).filter(accepted__gt=1)


def past_deadline(now: datetime) -> QuerySet[Message]:
    """What a sweep should have ended by now, by the sweeps' own predicates, each over its own index."""
    late, rows = now - GRACE, Message.objects
    found = [rows.overdue(late), rows.retryable(late), rows.unreceipted(late), rows.unconverted(late)]
    keys = [due.values("pk") for due in (*found, rows.archivable(late))]
    return rows.filter(pk__in=keys[0].union(*keys[1:], all=True))


def open_attempts(now: datetime) -> QuerySet[MessageAttempt]:
    """Nobody holds a lease on the message, yet the attempt has not ended: its outcome was never looked into."""
    late = now - GRACE
    held = Message.objects.filter(pk=OuterRef("message_id"), lease_id__isnull=False, leased_until__gt=late)
    return MessageAttempt.objects.filter(ended_at__isnull=True).exclude(Exists(held))


LAST_EVENT = {
    "pending": ("created", "retried"),
    "successful": ("sent",),
    "received": ("received",),
    "converted": ("converted",),
    "failed": ("failed",),
    "errored": ("errored",),
}


def events_disagree(_now: datetime) -> QuerySet[Message]:
    """The last event is not that of the state. Of the latest messages: all of them would be too many."""
    last = MessageEvent.objects.filter(message_id=OuterRef("pk")).order_by("-id").values("event_type")[:1]
    agrees = Q(*(Q(status=s, last_event__in=e) for s, e in LAST_EVENT.items()), _connector=Q.OR)
    ids = Message.objects.order_by("-pk").values_list("pk", flat=True)
    oldest = list(ids[LOOKED_AT : LOOKED_AT + 1])
    latest = Message.objects.filter(pk__gt=oldest[0]) if oldest else Message.objects.all()
    return latest.annotate(last_event=Subquery(last)).exclude(agrees & Q(last_event__isnull=False))


def drifted(now: datetime) -> QuerySet[Application]:
    return Application.objects.filter(pk__in=drifted_applications(now))


def metrics() -> Iterator[GaugeMetricFamily]:
    circuits = GaugeMetricFamily(
        "signalbox_provider_circuit_open", "Providers left alone", labels=["provider", "reason"]
    )
    for provider, reason in ProviderCircuit.objects.values_list("provider", "reason"):
        circuits.add_metric([provider, reason], 1)
    yield circuits
    held = Message.objects.filter(status="pending", hold_reason__isnull=False).count()
    yield GaugeMetricFamily("signalbox_messages_held", "Messages whose outcome is unknown", value=held)
    told = WebhookDelivery.objects.filter(delivered_at__isnull=True, given_up_at__isnull=True).count()
    yield GaugeMetricFamily("signalbox_webhooks_waiting", "Webhooks still to be told", value=told)
    parked = WebhookInbox.objects.parked().count()
    yield GaugeMetricFamily("signalbox_provider_events_parked", "Provider events without their message", value=parked)
    yield from _latencies()


def _latencies() -> Iterator[GaugeMetricFamily]:
    """From the last attempts: how long messages wait until a provider has accepted them."""
    family = GaugeMetricFamily("signalbox_send_latency_seconds", "Created to accepted", labels=["channel", "quantile"])
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT m.channel_type, percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (
                       ORDER BY extract(epoch FROM a.ended_at - GREATEST(m.created_at, m.scheduled_at)))
              FROM (SELECT message_id, ended_at FROM message_attempts WHERE outcome = 'accepted'
                     ORDER BY id DESC LIMIT 1000) a JOIN messages m ON m.id = a.message_id
             GROUP BY 1
            """
        )
        for channel, (median, late) in cursor.fetchall():
            family.add_metric([channel, "0.5"], median)
            family.add_metric([channel, "0.95"], late)
    yield family


INVARIANTS = [
    Invariant(
        "messaging.double_sends",
        "error",
        _("Messages that a provider has accepted more than once."),
        double_sends,
    ),
    Invariant(
        "messaging.past_deadline",
        "error",
        _("Messages whose time in their state is over by more than ten minutes."),
        past_deadline,
    ),
    Invariant(
        "messaging.open_attempts",
        "error",
        _("Attempts that never ended though nobody holds a lease."),
        open_attempts,
    ),
    Invariant(
        "messaging.events_disagree",
        "error",
        _("Messages whose last event is not that of their state."),
        events_disagree,
    ),
    Invariant(
        "messaging.rollup_drift",
        "warning",
        _("Applications whose roll-ups, the figures behind the analytics, differ from their messages."),
        drifted,
        heal_drift,
        _("counts again and adds the difference"),
    ),
]
