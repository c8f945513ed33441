"""Tasks with their progress, the queue, and each device's run as a timeline."""

import json
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.db.models import Prefetch, Sum
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.decorators import action
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextareaWidget

from config.console import (
    ConsoleAdmin,
    Entry,
    Figure,
    Panel,
    RefusableForm,
    Row,
    ServiceAdmin,
    StorableJSON,
    badge,
    can_become,
    columns,
    confirmed_action,
    few,
    panel,
)
from config.errors import Conflict
from devices import services
from devices.admin.bars import bar, progress
from devices.models import MOST_DEVICES, PC, Attempt, Event, PCSummary, Task, TaskDevice

COLOURS = {"pending": "", "running": "info", "success": "success", "failed": "danger", "cancelled": "warning"}
EVENT_TONES = {
    "SENT": "info", "SUCCEEDED": "success", "FAILED": "warning", "TIMEOUT": "warning", "FAILED_FINAL": "danger",
    "CANCELLED": "warning",
}  # fmt: skip
ICONS = {"success": "check_circle", "cancelled": "cancel", None: "play_circle"}
OUTCOMES: dict[Any, Any] = {"success": _("success"), None: _("running"), **dict(TaskDevice.FailureKind.choices)}
ROWS_SHOWN, ACTIVE_SHOWN, WAITING_SHOWN, WAITING_COUNTED = 200, 8, 50, 100
MOST_BYTES = 64 * 1024
SPANS, SPAN, SLOTS_KEPT = 48, timedelta(minutes=30), 60


def _cancel(ids: list[UUID], actor: Any, reason: str) -> Counter[str]:
    return _each(ids, services.cancel_task, "cancelled")


def _retry(ids: list[UUID], actor: Any, reason: str) -> Counter[str]:
    return _each(ids, services.retry_task, "retried")


def _each(ids: list[UUID], verb: Any, word: str) -> Counter[str]:
    """Locked in the order of all, then the oldest last: cancelling a queue must not start each task for a moment."""
    done: Counter[str] = Counter()
    for task in sorted(
        Task.objects.filter(pk__in=ids).locked(), key=lambda task: (task.created_at, task.pk), reverse=True
    ):
        try:
            verb(task, timezone.now())
            done[word] += 1
        except Conflict:
            done["untouched"] += 1
    return done


class TaskForm(RefusableForm):
    """A new task; a task that exists is cancelled or run again, not edited."""

    device_count = forms.IntegerField(
        label=_("Devices"), min_value=1, max_value=MOST_DEVICES, widget=UnfoldAdminIntegerFieldWidget()
    )
    payload = StorableJSON(
        label=_("Payload"), required=False, initial=dict, widget=UnfoldAdminTextareaWidget(attrs={"rows": 5})
    )
    selector = StorableJSON(
        label=_("Selector"),
        required=False,
        initial=dict,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 2}),
        help_text=_('Only devices with all of these labels, such as {"rack": "A"}.'),
    )

    class Meta:
        model = Task
        fields = ["name", "device_count", "payload", "selector"]

    def clean_selector(self) -> dict[str, str]:
        found = self.cleaned_data["selector"] or {}
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise forms.ValidationError(_now("Expected an object of texts."))
        return found

    def clean_payload(self) -> Any:
        found = self.cleaned_data["payload"]
        if len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()) > MOST_BYTES:
            raise forms.ValidationError(_now("The payload is larger than 64 KiB."))
        return {} if found is None else found


@admin.register(Task)
class TaskAdmin(ServiceAdmin):
    icon, menu_order = "list_alt", 10
    form = TaskForm
    state_colours = COLOURS
    list_display = ["name", "state", "progress_bar", "created_at", "started_at", "completed_at"]
    list_filter = ["status"]
    search_fields = ["name", "=id"]
    ordering = ["-created_at"]
    fields = [
        "name", "status", "progress_bar", "device_count", "devices_done", "devices_failed", "selector", "payload",
        "retry_of", "error", "created_at", "started_at", "completed_at",
    ]  # fmt: skip
    readonly_fields = ["progress_bar"]
    change_form_outer_after_template = "devices/task_rows.html"
    state = badge("status", description=_("status"))
    actions_list = ["queue"]
    actions = [
        confirmed_action(
            _("Cancel"),
            None,
            _cancel,
            permissions=["devices.change_task"],
            danger=True,
            when=can_become("cancelled"),
        ),
        confirmed_action(
            _("Run failed devices again"),
            None,
            _retry,
            permissions=["devices.change_task"],
            when=lambda task: bool(task.completed_at and task.devices_failed),
        ),
    ]

    class Media:
        css = {"all": ["devices/devices.css"]}

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return super().get_fields(request, obj) if obj else TaskForm.Meta.fields

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> Task:
        return services.create_task(now=timezone.now(), **fields)

    @admin.display(description=_("progress"))
    def progress_bar(self, task: Task) -> str:
        return progress(task)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if task := kwargs.get("obj"):
            context.update(rows=rows_of(task), rows_link=rows_link(task), rows_shown=ROWS_SHOWN)
        return super().render_change_form(request, context, *args, **kwargs)

    @action(description=_("Queue"), url_path="queue", icon="queue")
    def queue(self, request: HttpRequest) -> HttpResponse:
        """The running task and what waits; polled for its inner part."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        part = "part" in request.GET
        context = queue_context() if part else {**self.admin_site.each_context(request), **queue_context()}
        template = "devices/queue_part.html" if part else "devices/queue.html"
        return TemplateResponse(request, template, {**context, "title": _now("Queue"), "opts": Task._meta})


def rows_of(task: Task, most: int = ROWS_SHOWN) -> list[dict[str, Any]]:
    """The task's rows with a chip per attempt, the latest change first."""
    rows = (
        TaskDevice.objects.filter(task=task)
        .select_related("device", "device__pc")
        .prefetch_related(Prefetch("attempts", Attempt.objects.order_by("attempt_no")))
        .order_by("-changed_at", "pk")[:most]
    )
    return [
        {
            "row": row,
            "tone": COLOURS[row.status],
            "link": reverse("admin:devices_taskdevice_change", args=[row.pk]),
            "attempts": [attempt_chip(attempt) for attempt in row.attempts.all()],
        }
        for row in rows
    ]


def attempt_chip(attempt: Attempt) -> dict[str, Any]:
    tone = {"success": "success", "cancelled": "warning", None: "info"}.get(attempt.outcome, "danger")
    took = (attempt.ended_at or timezone.now()) - attempt.started_at
    return {
        "number": attempt.attempt_no,
        "icon": ICONS.get(attempt.outcome, "error"),
        "tone": tone,
        "outcome": OUTCOMES.get(attempt.outcome, attempt.outcome),
        "seconds": f"{max(0.0, took.total_seconds()):.1f}",
        "who": attempt.claimed_by,
        "error": attempt.error or "",
    }


def rows_link(task: Task) -> str:
    return f"{reverse('admin:devices_taskdevice_changelist')}?task__id__exact={task.pk}"


def queue_context() -> dict[str, Any]:
    active = Task.objects.filter(status=Task.Status.RUNNING).first()
    waiting = Task.objects.filter(status=Task.Status.PENDING).oldest_first()
    pcs = PC.objects.filter(status=PC.Status.ONLINE).select_related("summary").order_by("pc_number")[:WAITING_SHOWN]
    return {
        "active": active,
        "active_progress": progress(active) if active else "",
        "active_rows": rows_of(active, ACTIVE_SHOWN) if active else [],
        "waiting": list(waiting[:WAITING_SHOWN]),
        "waiting_count": waiting.count(),
        "ended": Task.objects.exclude(completed_at=None).order_by("-completed_at")[:5],
        "pcs": [(pc, bar(pc.summary.running_count, pc.summary.target)) for pc in pcs],
        "refreshed_at": timezone.now(),
        "slots_chart": slots_chart(timezone.now()),
    }


@admin.register(TaskDevice)
class TaskDeviceAdmin(ConsoleAdmin):
    icon, menu_order = "play_circle", 40
    menu_title = _("Device runs")
    read_only = True
    state_colours = COLOURS
    list_display = ["task", "device", "state", "tries", "failure_kind", "started_at", "deadline_at", "completed_at"]
    list_select_related = ["task", "device"]
    list_filter = ["status", "failure_kind", "timed_out"]
    search_fields = ["=id", "=task__id", "=device__serial"]
    ordering = ["-id"]
    fields = [
        "task", "device", "status", "attempt", "max_attempts", "claimed_by", "lease_expires_at", "started_at",
        "deadline_at", "acked_at", "completed_at", "result", "error", "timed_out", "failure_kind", "final",
    ]  # fmt: skip
    state = badge("status", description=_("status"), tooltip=lambda row: row.error or "")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        return lookup == "task__id__exact" or super().lookup_allowed(lookup, value, request)  # type: ignore[arg-type]

    @admin.display(description=_("attempt"), ordering="attempt")
    def tries(self, row: TaskDevice) -> str:
        return f"{row.attempt} / {row.max_attempts}"

    def timeline_entries(self, obj: TaskDevice) -> Iterable[Entry]:
        attempts = {attempt.attempt_no: attempt for attempt in obj.attempts.all()}
        for event in Event.objects.filter(task_device=obj).order_by("-id")[:50]:
            title = event.get_event_display()
            if event.attempt_no:
                title = _now("%(event)s · attempt %(number)d") % {"event": title, "number": event.attempt_no}
            yield Entry(event.created_at, "event_note", title, _told(event, attempts), EVENT_TONES.get(event.event, ""))


def _told(event: Event, attempts: dict[int, Attempt]) -> str:
    attempt = attempts.get(event.attempt_no)
    if attempt is None:
        return ""
    if event.event == Event.Kind.SENT:
        return attempt.claimed_by
    ended = (Event.Kind.FAILED, Event.Kind.TIMEOUT)
    return attempt.error or "" if event.event in ended else ""


@panel(_("Device queue"), order=55, icon="queue", permission="devices.view_task")
def queue_panel(request: HttpRequest) -> Panel:
    link = reverse("admin:devices_task_queue")
    active = Task.objects.filter(status=Task.Status.RUNNING).first()
    waiting = len(Task.objects.filter(status=Task.Status.PENDING).values_list("pk", flat=True)[: WAITING_COUNTED + 1])
    shown = f"{WAITING_COUNTED}+" if waiting > WAITING_COUNTED else waiting
    rows = []
    if active is not None:
        open_rows = _now("%(open)d open, %(failed)d failed") % {
            "open": active.open_rows,
            "failed": active.devices_failed,
        }
        rows.append(
            Row(
                title=active.name,
                note=open_rows,
                link=reverse("admin:devices_task_change", args=[active.pk]),
                badge=f"{active.devices_done} / {active.device_count}",
                tone="info",
            )
        )
    figures = [Figure(_now("waiting"), shown, f"{reverse('admin:devices_task_changelist')}?status__exact=pending")]
    return Panel(figures=[*figures, *_fleet_figures()], rows=rows, link=link, empty=_now("No task is running."))


def _fleet_figures() -> list[Figure]:
    link, now = reverse("admin:devices_pc_changelist"), timezone.now()
    online = PC.objects.filter(status=PC.Status.ONLINE)
    slots = PCSummary.objects.filter(pc__in=online).aggregate(used=Sum("running_count"), target=Sum("target"))
    used = f"{slots['used'] or 0:,} / {slots['target'] or 0:,}"
    figures = [
        Figure(_now("PCs online"), few(online), f"{link}?status__exact=online", "success"),
        Figure(_now("slots"), used, f"{link}?status__exact=online", "info"),
    ]
    if (stale := few(PC.objects.stale(now))) != "0":
        figures.append(Figure(_now("stale"), stale, f"{link}?silence=stale", "warning"))
    return figures


def slots_chart(now: datetime) -> SafeString:
    """Slots in use over the last day, in half hours: the seconds run in each, over its length."""
    found = cache.get_or_set("devices.slots", lambda: Attempt.objects.busy_slots(now, SPANS, SPAN), SLOTS_KEPT) or []
    bars = [
        (f"{timezone.localtime(at):%H:%M}", busy, f"{timezone.localtime(at):%H:%M} · {busy:.1f}") for at, busy in found
    ]
    return columns(bars, max([busy for _at, busy in found] + [1]), _now("Slots used over the last day"), every=6)
