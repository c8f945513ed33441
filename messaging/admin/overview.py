"""Messaging on the dashboard: what today brought, what waits, what needs somebody."""

from datetime import UTC, timedelta

from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from config.console import Figure, Panel, Row, few, panel
from config.console.panels import age
from messaging.admin.base import list_url
from messaging.models import (
    Application,
    Channel,
    Message,
    ProviderCircuit,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookInbox,
)
from messaging.models.messages import CLOCK_START
from messaging.services.analytics import message_figures


@panel(gettext_lazy("Messages today"), order=40, icon="mail", permission="messaging.view_message")
def today_panel(request: HttpRequest) -> Panel:
    midnight = timezone.now().astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    applications = list(Application.objects.values_list("pk", flat=True))
    found = message_figures(applications, midnight, midnight + timedelta(days=1), "channel")
    totals, channels = found["totals"], dict(Channel.choices)
    rows = [
        Row(
            # Days are UTC days, here as in the analytics.
            title=channels.get(row["key"], row["key"]),
            note=_("accepted %(sent)s · delivered %(received)s · converted %(converted)s · failed %(failed)s")
            % {name: f"{row[name]:,}" for name in ("sent", "received", "converted", "failed")},
            link=f"{list_url(Message)}?channel_type__exact={row['key']}",
            aside=f"{row['created']:,}",
        )
        for row in found["results"]
    ]
    figures = [
        Figure(_("accepted"), f"{totals['sent']:,}", tone="info"),
        Figure(_("delivered"), f"{totals['received']:,}", tone="success"),
        Figure(_("failed"), f"{totals['failed']:,}", tone="danger" if totals["failed"] else ""),
    ]
    link = reverse("admin:messaging_messagerollup_changelist")
    return Panel(figures=figures, rows=rows, link=link, empty="" if rows else _("No message yet today."))


@panel(gettext_lazy("Message queue"), order=41, icon="pending_actions", permission="messaging.view_message")
def queue_panel(request: HttpRequest) -> Panel:
    now, url = timezone.now(), list_url(Message)
    due = Message.objects.due(now)
    held = Message.objects.filter(status="pending", hold_reason__isnull=False)
    errored = Message.objects.filter(status="errored")
    waits = _("nothing waits")
    if first := due.order_by(CLOCK_START).values_list("created_at", flat=True)[:1].first():
        waits = _("the oldest is %(age)s old") % {"age": age(first, now)}
    rows = [
        Row(_("due now"), waits, f"{url}?state=pending", few(due), "info"),
        Row(_("waiting for a retry"), link=f"{url}?state=errored", badge=few(errored), tone="warning"),
        Row(
            _("outcome unknown"),
            _("held until a provider or an operator tells"),
            f"{url}?state=unknown",
            few(held),
            "warning",
        ),
    ]
    rows = [row for row in rows if row.badge != "0" or row.title == _("due now")]
    circuits = [
        Row(
            circuit.provider,
            _("left alone since %(age)s: %(reason)s") % {"age": age(circuit.opened_at, now), "reason": circuit.reason},
            list_url(ProviderCircuit),
            _("breaker open"),
            "danger",
        )
        for circuit in ProviderCircuit.objects.order_by("provider")[:20]
    ]
    return Panel(rows=[*circuits, *rows], tone="danger" if circuits else "success", link=url)


@panel(gettext_lazy("Webhooks"), order=42, icon="webhook", permission="messaging.view_webhookdelivery")
def webhooks_panel(request: HttpRequest) -> Panel | None:
    waiting = WebhookDelivery.objects.filter(delivered_at__isnull=True, given_up_at__isnull=True)
    day_ago = timezone.now() - timedelta(days=1)
    rows = [
        Row(_("to be told"), link=f"{list_url(WebhookDelivery)}?told=no", badge=few(waiting), tone="info"),
        Row(
            _("given up within a day"),
            link=f"{list_url(WebhookDelivery)}?told=given_up",
            badge=few(WebhookDelivery.objects.filter(given_up_at__gte=day_ago)),
            tone="danger",
        ),
        Row(
            _("endpoints switched off by themselves"),
            link=list_url(WebhookEndpoint),
            badge=few(WebhookEndpoint.objects.filter(active=False).exclude(disabled_reason="")),
            tone="warning",
        ),
        Row(
            _("provider events parked"),
            link=f"{list_url(WebhookInbox)}?state__exact=parked",
            badge=few(WebhookInbox.objects.parked()),
            tone="warning",
        ),
    ]
    rows = [row for row in rows if row.badge != "0"]
    return Panel(rows=rows, tone="warning", link=list_url(WebhookDelivery)) if rows else None
