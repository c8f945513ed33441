"""Messaging on the dashboard: what today brought, what waits, what needs somebody."""

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from config.console import Figure, Panel, Row, few, list_url, panel, sparkline
from config.console.panels import MOST, age
from config.models import SweepRun
from messaging.admin.messages import STATES, midnight
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
from messaging.services.analytics import accepted_by_day, message_figures

DAYS = 13  # before today, in the small courses
PACE_RUNS = 50


@panel(gettext_lazy("Messages today"), order=40, icon="mail", permission="messaging.view_message")
def today_panel(request: HttpRequest) -> Panel:
    start = midnight()
    applications = list(Application.objects.values_list("pk", flat=True))
    found = message_figures(applications, start, start + timedelta(days=1), "channel")
    held = Message.objects.filter(STATES["unknown"][1], created_at__gte=start).order_by()
    unknown = Counter(held.values_list("channel_type", flat=True)[:MOST])
    past, channels = accepted_by_day(start - timedelta(days=DAYS), start), dict(Channel.choices)
    rows = [
        Row(
            title=channels.get(row["key"], row["key"]),
            figures=tuple(_figures(row, unknown[row["key"]], f"&channel_type__exact={row['key']}")),
            link=f"{list_url(Message)}?within=today&channel_type__exact={row['key']}",
            aside=sparkline(
                [*past.get(row["key"], [0] * DAYS), row["sent"]],
                "info",
                _("accepted each day, %(days)s days") % {"days": DAYS + 1},
            ),
        )
        for row in found["results"]
    ]
    link = reverse("admin:messaging_messagerollup_changelist")
    figures = [figure for figure in _figures(found["totals"], unknown.total()) if figure.value != "0"]
    return Panel(figures=figures, rows=rows, link=link, empty="" if rows else _("No message yet today."))


def _figures(counts: dict[str, Any], unknown: int, more: str = "") -> list[Figure]:
    today = f"{list_url(Message)}?within=today{more}"
    shown = [
        Figure(_("accepted"), f"{counts['sent']:,}", f"{today}&stage=sent", "info"),
        Figure(_("delivered"), f"{counts['received']:,}", f"{today}&stage=received", "success"),
        Figure(_("unknown"), f"{unknown:,}", f"{today}&state=unknown", "warning"),
        Figure(_("failed"), f"{counts['failed']:,}", f"{today}&stage=failed", "danger"),
    ]
    return [figure if figure.value != "0" else replace(figure, tone="") for figure in shown]


def backlog_seconds(count: int, now: datetime) -> int | None:
    """How long `count` messages take at the pace of the last hour's dispatching; None if nothing was dispatched."""
    runs = SweepRun.objects.filter(
        name="messaging.dispatch_due_messages", started_at__gt=now - timedelta(hours=1), ended_at__isnull=False
    )
    done, busy = 0, 0.0
    newest: Any = runs.order_by("-started_at").values_list("counts", "started_at", "ended_at")[:PACE_RUNS]
    for counts, started_at, ended_at in newest:
        if handled := sum(counts.values()):
            done, busy = done + handled, busy + (ended_at - started_at).total_seconds()
    return round(count * busy / done) if done else None


@panel(gettext_lazy("Message queue"), order=30, icon="pending_actions", permission="messaging.view_message")
def queue_panel(request: HttpRequest) -> Panel:
    now, url = timezone.now(), list_url(Message)
    due = Message.objects.due(now)
    shown = few(due)
    held = Message.objects.filter(status="pending", hold_reason__isnull=False)
    errored = Message.objects.filter(status="errored")
    waits = _("nothing waits")
    if shown != "0" and (first := due.order_by(CLOCK_START).values_list("created_at", flat=True)[:1].first()):
        waits = _("the oldest is %(age)s old") % {"age": age(first, now)}
        if (left := backlog_seconds(int(shown.strip("+").replace(",", "")), now)) is not None:
            waits += " · " + _("done in about %(time)s") % {"time": age(now, now + timedelta(seconds=left))}
    rows = [
        Row(_("due now"), waits, f"{url}?state=due", shown, "info"),
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
