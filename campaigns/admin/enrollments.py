from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db import models
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from campaigns.admin.rules import WORDS
from campaigns.admin.verbs import each
from campaigns.models import Enrollment, Execution, Reply, Sender, Sequence
from campaigns.services import enrollments
from campaigns.services.explaining import explain
from config.console import ConsoleAdmin, Entry, badge, can_become, confirmed_action
from config.models import Decision

EXECUTION_COLOURS = {
    "pending": "info",
    "processing": "primary",
    "deferred": "warning",
    "awaiting_enrichment": "warning",
    "sent": "success",
    "skipped": "",
    "failed": "danger",
}
ENROLLMENT_COLOURS = {
    "active": "success",
    "paused": "warning",
    "completed": "primary",
    "replied": "info",
    "bounced": "danger",
    "unsubscribed": "danger",
    "stopped": "",
    "failed": "danger",
}
GATE_NAMES = {
    "sequence_status": _("sequence"),
    "enrollment": _("enrollment"),
    "suppression": _("suppression"),
    "window": _("sending window"),
    "sender_health": _("sender"),
    "allowance": _("allowance"),
    "queue_position": _("place in the queue"),
    "eta": _("expected"),
}


def named(rows: models.QuerySet[Any]) -> Iterable[str]:
    return (f"{row} · {row.get_status_display()}" for row in rows)


def action(title: Any, name: str, icon: str, act: Any, done: str, becomes: str, danger: bool = False) -> Any:
    return confirmed_action(
        title, named, each(act, done), permissions=["campaigns.change_enrollment"], name=name, icon=icon, danger=danger,
        when=can_become(becomes),
    )  # fmt: skip


@admin.register(Enrollment)
class EnrollmentAdmin(ConsoleAdmin):
    """Why a lead has not been written to stands on top of its page."""

    icon, menu_order, read_only = "how_to_reg", 20, True
    state_colours = ENROLLMENT_COLOURS
    list_display = ("lead", "sequence", "state", "current_step", "sender", "resume_at", "pause_reason", "round")
    list_filter = ("status", ("resume_at", admin.EmptyFieldListFilter), "sequence", "sender")
    list_select_related = ("lead", "sequence", "current_step", "sender")
    search_fields = ("lead__email", "lead__name", "lead__phone")
    ordering = ("-created_at",)
    state = badge("status", description=_("state"))
    change_form_before_template = "campaigns/explain.html"
    fields = (
        "lead", "sequence", "status", "sender", "current_step", "round", "resume_at", "paused_at", "pause_reason",
        "ended_at", "created_at",
    )  # fmt: skip
    actions = (
        action(
            _("Pause"), "pause", "pause",
            lambda pk, user: enrollments.pause_enrollment(pk, timezone.now(), resume_at=None), "paused", "paused",
        ),
        action(
            _("Resume"), "resume", "play_arrow",
            lambda pk, user: enrollments.resume_enrollment(pk, timezone.now()), "resumed", "active",
        ),
        action(
            _("Stop"), "stop", "stop", lambda pk, user: enrollments.stop_enrollment(pk, timezone.now()), "stopped",
            "stopped", danger=True,
        ),
    )  # fmt: skip

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if (obj := kwargs.get("obj")) is not None:
            said = explain(obj, timezone.now())
            gates = [
                {**gate.__dict__, "title": GATE_NAMES[gate.name], "value": shown_value(gate.value)}
                for gate in said.gates
            ]
            context.update(explanation=said, gates=gates, decides=GATE_NAMES.get(said.decides or ""))
        return super().render_change_form(request, context, *args, **kwargs)

    def timeline_entries(self, obj: Any) -> Iterable[Entry]:
        for row in obj.executions.select_related("step", "message").order_by("-pk")[:50]:
            yield from execution_entries(row)
        yield from map(reply_entry, obj.replies.order_by("-received_at")[:50])
        around = Decision.objects.filter(object_type="sequences", object_id=str(obj.sequence_id)).order_by("-id")[:20]
        for decision in around:
            link = reverse("admin:config_decision_change", args=[decision.pk])
            title = _now("sequence: %(rule)s") % {"rule": decision.rule}
            rows = _now("%(count)s rows") % {"count": decision.affected}
            meaning = WORDS.get(decision.rule) or WORDS.get(decision.rule.split(".")[0], "")
            yield Entry(decision.created_at, "smart_toy", title, f"{meaning} · {rows}" if meaning else rows, link=link)


def shown_value(value: Any) -> Any:
    """A gate's value in the reader's language; the API says the bare word."""
    words = {
        **dict(Sequence.Status.choices),
        **dict(Enrollment.Status.choices),
        **dict(Sender.Status.choices),
        "open": _("open"),
        "closed": _("closed"),
        "suppressed": _("suppressed"),
    }
    return words.get(value, value) if isinstance(value, str) else value


def reply_entry(reply: Reply) -> Entry:
    title = _now("reply: %(kind)s") % {"kind": reply.get_kind_display()}
    body = (reply.evidence.get("date_quote") or reply.text)[:300]
    return Entry(reply.received_at, "reply", title, body, "info")


def execution_entries(row: Execution) -> Iterable[Entry]:
    body = row.get_skip_reason_display() if row.skip_reason else row.failure
    link = reverse("admin:campaigns_execution_change", args=[row.pk])
    at = row.executed_at or row.processing_started_at or row.created_at
    title = f"{row.step} · {row.get_status_display()}"
    yield Entry(at, "send", title, body or "", EXECUTION_COLOURS[row.status], link)
    if row.message is not None:
        message = row.message
        title = _now("message: %(status)s") % {"status": message.get_status_display()}
        link = reverse("admin:messaging_message_change", args=[message.pk])
        moment = message.failed_at or message.received_at or message.sent_at or message.created_at
        yield Entry(moment, "mail", title, message.error_reason or "", link=link)


class DueFilter(DropdownFilter):
    title = _("due")
    parameter_name = "due"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("now", _("due now")), ("stale", _("stale"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        wanted = {"now": Execution.objects.due, "stale": Execution.objects.stale}.get(self.value() or "")
        return queryset.filter(pk__in=wanted(timezone.now()).values("pk")) if wanted else queryset


@admin.register(Execution)
class ExecutionAdmin(ConsoleAdmin):
    icon, menu_order, read_only = "playlist_play", 30, True
    state_colours = EXECUTION_COLOURS
    list_display = ("lead", "step", "state", "scheduled_at", "deferred_until", "executed_at", "skip_reason", "failure")
    list_filter = ("status", DueFilter, "skip_reason")
    list_select_related = ("enrollment__lead", "step")
    search_fields = ("enrollment__lead__email", "enrollment__lead__name")
    ordering = ("-id",)
    state = badge("status", description=_("state"))

    @admin.display(description=_("lead"))
    def lead(self, row: Execution) -> str:
        return str(row.enrollment.lead)


@admin.register(Reply)
class ReplyAdmin(ConsoleAdmin):
    icon, menu_order, read_only = "reply_all", 40, True
    list_display = ("received_at", "lead", "kind", "subject", "ooo_until")
    list_filter = ("kind",)
    list_select_related = ("enrollment__lead",)
    search_fields = ("enrollment__lead__email", "subject")
    ordering = ("-received_at",)

    @admin.display(description=_("lead"))
    def lead(self, row: Reply) -> str:
        return str(row.enrollment.lead)
