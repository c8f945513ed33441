from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db import models
from django.db.models import Count
from django.db.models.functions import TruncHour
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from campaigns.admin.rules import WORDS
from campaigns.admin.verbs import each
from campaigns.models import EFFECTIVE_DUE, DisplayState, Execution, Sequence, Step
from campaigns.services import reconciling, sequences, statistics
from campaigns.services.completion import display_until, next_tick
from config.console import ConsoleAdmin, badge, columns, confirmed_action, stacked

COLOURS = {
    "draft": "",
    "generating": "info",
    "ready": "info",
    "active": "success",
    "paused": "warning",
    "completed": "primary",
    "archived": "",
    "reply_harvest": "info",
    "partially_paused": "warning",
    "finalizing": "primary",
}


def shown_time(at: datetime | None) -> str:
    """Always with its zone: two screens that mean different ones cost an afternoon."""
    return f"{date_format(timezone.localtime(at), 'Y-m-d H:i')} {timezone.localtime(at).tzname()}" if at else "–"


def why(sequence: Any) -> str:
    """The tooltip: why the badge says so, and until when."""
    now = timezone.now()
    until = {"at": shown_time(display_until(sequence, now))}
    texts = {
        "reply_harvest": _now("Everything is sent; replies are awaited until %(at)s."),
        "partially_paused": _now("Only paused leads have work left; the first resumes at %(at)s."),
        "finalizing": _now("Everything is done; completed by the next tick at %(at)s."),
        "active": _now("Running."),
        "paused": _now("Paused by a person; nothing is sent."),
        "completed": _now("Finished."),
    }
    return texts.get(sequence.display_state, _now("Waits for a person.")) % until


class DisplayFilter(DropdownFilter):
    title = _("badge")
    parameter_name = "display_state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(DisplayState.choices)

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return queryset.filter(display_state=self.value()) if self.value() else queryset


def named(rows: models.QuerySet[Any]) -> Iterable[str]:
    return (f"{row.name} · {row.get_status_display()}" for row in rows)


def stale_preview(rows: models.QuerySet[Any]) -> Iterable[str]:
    """How many would be skipped, per sequence."""
    now = timezone.now()
    keys = [row.pk for row in rows]
    rows_found = reconciling.skippable(keys, now)
    counts = dict(rows_found.order_by().values_list("enrollment__sequence_id").annotate(n=Count("pk")))
    return (_now("%(name)s: %(count)s stale") % {"name": row.name, "count": counts.get(row.pk, 0)} for row in rows)


def skip_stale(ids: list[Any], user: Any, reason: str) -> Counter[str]:
    return reconciling.skip_stale(ids, timezone.now())


def gated(verb: Any) -> Any:
    return lambda pk, user: verb(pk, sequences.Pass(actor=user), timezone.now())


ACTIONS = (
    confirmed_action(
        _("Reconcile now"),
        named,
        each(lambda pk, user: reconciling.reconcile_sequence(pk, timezone.now()), "reconciled"),
        needs_reason=False,
        permissions=["campaigns.change_sequence"],
        name="reconcile_now",
        icon="sync",
    ),
    confirmed_action(
        _("Skip stale steps"),
        stale_preview,
        skip_stale,
        permissions=["campaigns.change_sequence"],
        name="skip_stale",
        icon="hourglass_disabled",
        danger=True,
    ),
    confirmed_action(
        _("Pause"),
        named,
        each(lambda pk, user: sequences.pause_sequence(pk), "paused"),
        permissions=["campaigns.change_sequence"],
        name="pause",
        icon="pause",
    ),
    confirmed_action(
        _("Resume"),
        named,
        each(lambda pk, user: sequences.resume_sequence(pk, timezone.now()), "resumed"),
        permissions=["campaigns.change_sequence"],
        name="resume",
        icon="play_arrow",
    ),
    confirmed_action(
        _("Force completion"),
        named,
        each(lambda pk, user: sequences.complete_sequence(pk, timezone.now()), "completed"),
        permissions=["campaigns.complete_sequence"],
        name="force_complete",
        icon="done_all",
        danger=True,
    ),
    confirmed_action(
        _("Reactivate"),
        named,
        each(gated(sequences.reactivate_sequence), "reactivated"),
        permissions=["campaigns.reactivate_sequence"],
        name="reactivate",
        icon="restart_alt",
    ),
    confirmed_action(
        _("Clone"),
        named,
        each(lambda pk, user: sequences.clone_sequence(pk), "cloned"),
        needs_reason=False,
        permissions=["campaigns.add_sequence"],
        name="clone",
        icon="content_copy",
    ),
)


@admin.register(Sequence)
class SequenceAdmin(ConsoleAdmin):
    icon, menu_order, read_only = "campaign", 10, True
    state_colours, rule_words = COLOURS, WORDS
    list_display = (
        "name", "state", "progress", "has_pending_work", "waiting_count", "sent_count", "failed_count",
        "skipped_count", "enrollments_count", "evaluated_next",
    )  # fmt: skip
    list_filter = ("status", DisplayFilter, "has_pending_work", "application")
    list_before_template = "campaigns/tabs.html"
    change_form_before_template = "campaigns/sequence.html"
    search_fields = ("name",)
    ordering = ("-created_at",)
    actions = ACTIONS
    state = badge(
        "display_state", colours=COLOURS, labels=dict(DisplayState.choices), tooltip=why, description=_("state")
    )
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("name", "application"), ("kind", "status"), ("has_pending_work", "pending_work_changed_at"),
                    ("activated_at", "completed_at"), ("harvest_days", "stale_after_multiplier"),
                )
            },
        ),
        (
            _("Counters"),
            {
                "fields": (
                    ("total_count", "sent_count", "failed_count"),
                    ("skipped_count", "waiting_count", "enrollments_count"),
                )
            },
        ),
    )  # fmt: skip

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        return Sequence.objects.with_display(timezone.now())

    @admin.display(description=_("progress"))
    def progress(self, row: Sequence) -> SafeString | str:
        if not row.total_count:
            return "–"
        share = round(100 * (row.total_count - row.waiting_count) / row.total_count)
        return format_html('<progress max="100" value="{}" title="{} %"></progress>', share, share)

    @admin.display(description=_("next tick"))
    def evaluated_next(self, row: Sequence) -> str:
        if row.status not in Sequence.RECONCILABLE:
            return "–"
        left = next_tick(timezone.now()) - timezone.now()
        return _now("in %(seconds)s s") % {"seconds": int(left.total_seconds())}

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        counts = dict(Sequence.objects.order_by().values_list("status").annotate(n=Count("pk")))
        here = request.GET.get("status__exact", "")
        tabs = [
            {"value": value, "label": _now("Running") if value == "active" else label, "count": counts.get(value, 0)}
            for value, label in Sequence.Status.choices
        ]
        everything = {"value": "", "label": _now("All"), "count": sum(counts.values())}
        return super().changelist_view(
            request, {**(extra_context or {}), "tabs": [everything, *tabs], "tab_here": here}
        )

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if (obj := kwargs.get("obj")) is not None:
            now = timezone.now()
            context.update(
                stats={"steps": funnel(obj)},
                upcoming=upcoming_chart(obj, now),
                reply_hours=reply_chart(obj, now),
                why=why(obj),
                enrollments_url=f"{reverse('admin:campaigns_enrollment_changelist')}?sequence__id__exact={obj.pk}",
            )
        return super().render_change_form(request, context, *args, **kwargs)


def upcoming(sequence: Sequence, now: datetime) -> list[tuple[datetime, int]]:
    """How many steps fall due in each of the next 24 hours."""
    rows = (
        Execution.objects.of([sequence.pk])
        .queued()
        .filter(enrollment__status__in=("active", "paused"))
        .annotate(due=EFFECTIVE_DUE)
        .filter(due__lt=now + timedelta(hours=24))
        .annotate(hour=TruncHour("due"))
        .order_by()
        .values_list("hour")
        .annotate(n=Count("pk"))
    )
    found: Counter[datetime] = Counter()
    first = now.replace(minute=0, second=0, microsecond=0)
    for hour, count in rows:
        found[max(hour, first)] += count
    return [(hour, found[hour]) for hour in (first + timedelta(hours=n) for n in range(24))]


def upcoming_chart(sequence: Sequence, now: datetime) -> SafeString | str:
    hours = upcoming(sequence, now)
    most = max(count for _hour, count in hours)
    bars = [(f"{timezone.localtime(hour):%H:%M}", count, f"{shown_time(hour)}: {count:,}") for hour, count in hours]
    return columns(bars, most, _now("Steps due by hour")) if most else ""


def reply_chart(sequence: Sequence, now: datetime) -> SafeString | str:
    found = statistics.reply_hours(sequence, now, timezone.get_current_timezone())  # type: ignore[arg-type]
    if not any(answers for _sent, answers in found.values()):
        return ""
    rates = {hour: answers / sent for hour, (sent, answers) in found.items()}
    told = _now("%(hour)s: %(answers)s of %(sent)s answered, %(rate)s")
    bars = [
        (
            f"{hour:02}",
            rates.get(hour, 0.0),
            told % {"hour": f"{hour:02}:00", "sent": sent, "answers": answers, "rate": f"{rates.get(hour, 0.0):.0%}"},
        )
        for hour, (sent, answers) in ((hour, found.get(hour, (0, 0))) for hour in range(24))
    ]
    return columns(bars, max(rates.values()), _now("Reply rate by hour"))


def funnel(sequence: Sequence) -> list[dict[str, Any]]:
    steps = statistics.sequence_stats(sequence)["steps"]
    names = Step.objects.in_bulk([step["step_id"] for step in steps])
    words = (
        ("sent", _now("Sent"), "success"),
        ("failed", _now("Failed"), "danger"),
        ("skipped", _now("Skipped"), "none"),
        ("waiting", _now("Waiting"), "info"),
    )
    return [
        {
            **step,
            "name": str(names[step["step_id"]]),
            "bar": stacked([(word, step[name], tone) for name, word, tone in words]) if step["total"] else "",
        }
        for step in steps
    ]
