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
from django.utils.text import capfirst
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.admin import StackedInline, TabularInline
from unfold.contrib.filters.admin import DropdownFilter

from campaigns.admin.forms import SequenceForm, StepForm, StepFormSet
from campaigns.admin.importing import IMPORT
from campaigns.admin.rules import WORDS
from campaigns.admin.verbs import each
from campaigns.models import EFFECTIVE_DUE, DisplayState, Execution, Sender, Sequence, SequenceSender, Step
from campaigns.services import reconciling, sequences, statistics
from campaigns.services.completion import display_until, next_tick
from config.console import ServiceAdmin, badge, can_become, columns, confirmed_action, stacked
from config.console.panels import age

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
        _("Activate"),
        named,
        each(gated(sequences.activate_sequence), "activated"),
        needs_reason=False,
        permissions=["campaigns.change_sequence"],
        name="activate",
        icon="rocket_launch",
        when=lambda row: row.status in ("draft", "ready"),
    ),
    confirmed_action(
        _("Reconcile now"),
        named,
        each(lambda pk, user: reconciling.reconcile_sequence(pk, timezone.now()), "reconciled"),
        needs_reason=False,
        permissions=["campaigns.change_sequence"],
        name="reconcile_now",
        icon="sync",
        when=lambda row: row.status in Sequence.RECONCILABLE,
    ),
    confirmed_action(
        _("Skip stale steps"),
        stale_preview,
        skip_stale,
        permissions=["campaigns.change_sequence"],
        name="skip_stale",
        icon="hourglass_disabled",
        danger=True,
        when=lambda row: row.has_pending_work and row.status in Sequence.RECONCILABLE,
    ),
    confirmed_action(
        _("Pause"),
        named,
        each(lambda pk, user: sequences.pause_sequence(pk), "paused"),
        permissions=["campaigns.change_sequence"],
        name="pause",
        icon="pause",
        when=can_become("paused"),
    ),
    confirmed_action(
        _("Resume"),
        named,
        each(lambda pk, user: sequences.resume_sequence(pk, timezone.now()), "resumed"),
        permissions=["campaigns.change_sequence"],
        name="resume",
        icon="play_arrow",
        when=lambda row: row.status == "paused",
    ),
    confirmed_action(
        _("Force completion"),
        named,
        each(lambda pk, user: sequences.complete_sequence(pk, timezone.now()), "completed"),
        permissions=["campaigns.complete_sequence"],
        name="force_complete",
        icon="done_all",
        danger=True,
        when=can_become("completed"),
    ),
    confirmed_action(
        _("Reactivate"),
        named,
        each(gated(sequences.reactivate_sequence), "reactivated"),
        permissions=["campaigns.reactivate_sequence"],
        name="reactivate",
        icon="restart_alt",
        when=lambda row: row.status == "completed",
    ),
    confirmed_action(
        _("Archive"),
        named,
        each(lambda pk, user: sequences.archive_sequence(pk, timezone.now()), "archived"),
        permissions=["campaigns.change_sequence"],
        name="archive",
        icon="archive",
        danger=True,
        when=can_become("archived"),
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


class PoolInline(TabularInline):
    model = SequenceSender
    verbose_name, verbose_name_plural = _("sender"), _("senders")
    fields = ("position", "sender")
    ordering = ("position",)
    extra = 0

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """A table's heading is no label: each input carries its own."""
        if db_field.name == "sender":
            kwargs["queryset"] = Sender.objects.filter(deleted_at=None).order_by("address")
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            getattr(field.widget, "widget", field.widget).attrs["aria-label"] = capfirst(db_field.verbose_name)
        return field


class StepInline(StackedInline):
    model = Step
    form, formset = StepForm, StepFormSet
    fields = (("position", "channel"), ("delay_seconds", "stale_policy"), "subject", "body")
    extra = 0

    def get_extra(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> int:
        return 0 if obj else 1

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Step]:
        return Step.objects.standing()


@admin.register(Sequence)
class SequenceAdmin(ServiceAdmin):
    icon, menu_order = "campaign", 10
    form = SequenceForm
    inlines = (PoolInline, StepInline)
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
                "fields": (("name", "application"), ("kind",), ("harvest_days", "stale_after_multiplier")),
            },
        ),
        (
            _("State"),
            {
                "fields": (
                    ("status", "has_pending_work", "pending_work_changed_at"), ("activated_at", "completed_at"),
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

    readonly_fields = (
        "has_pending_work", "pending_work_changed_at", "activated_at", "completed_at", "total_count", "sent_count",
        "failed_count", "skipped_count", "waiting_count", "enrollments_count",
    )  # fmt: skip

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        return Sequence.objects.with_display(timezone.now())

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        found = super().get_fieldsets(request, obj)
        return found if obj else found[:1]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), *(["application"] if obj else [])]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and (obj is None or obj.status != "archived")

    def links_for(self, request: HttpRequest, obj: Sequence) -> list[dict[str, Any]]:
        if obj.status not in Sequence.ENROLLABLE or not request.user.has_perms(IMPORT):  # type: ignore[union-attr]
            return []
        return [
            {"title": _("Enroll leads…"), "url": f"{reverse('admin:campaigns_lead_import_leads')}?sequence={obj.pk}"}
        ]

    # --- writing: by the services, behind the gate of locks

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> Sequence:
        return sequences.create_sequence(fields.pop("application"), fields)

    def change(self, request: HttpRequest, obj: Sequence, changes: dict[str, Any]) -> None:
        sequences.change_sequence(obj.pk, changes, sequences.Pass(actor=request.user))

    def remove(self, request: HttpRequest, obj: Sequence) -> None:
        sequences.delete_sequence(obj.pk, sequences.Pass(actor=request.user))

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        shown = sequences.Pass(actor=request.user)
        formset.new_objects, formset.changed_objects, formset.deleted_objects = [], [], []
        if formset.model is Step:
            save_steps(form.instance, formset, shown)
        elif formset.has_changed():
            save_pool(form.instance, formset, shown)

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
        return _now("in %(time)s") % {"time": age(timezone.now(), timezone.now() + left)}

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


def save_steps(sequence: Sequence, formset: Any, shown: sequences.Pass) -> None:
    for form in formset.deleted_forms:
        if not form.instance._state.adding:
            sequences.remove_step(sequence.pk, form.instance.pk, shown, timezone.now())
            formset.deleted_objects.append(form.instance)
    for form in formset.forms:
        if form in formset.deleted_forms or not form.has_changed():
            continue
        given = {name: form.cleaned_data[name] for name in form.fields if name in StepForm.Meta.fields}
        if form.instance._state.adding:
            formset.new_objects.append(sequences.add_step(sequence.pk, given, shown))
        else:
            changes = {name: given[name] for name in form.changed_data if name in given}
            sequences.change_step(sequence.pk, form.instance.pk, changes, shown)
            formset.changed_objects.append((form.instance, form.changed_data))


def save_pool(sequence: Sequence, formset: Any, shown: sequences.Pass) -> None:
    kept = [form for form in formset.forms if form not in formset.deleted_forms and form.cleaned_data.get("sender")]
    kept.sort(key=lambda form: form.cleaned_data.get("position") or len(kept))
    senders = [form.cleaned_data["sender"] for form in kept]
    sequences.change_sequence(sequence.pk, {}, shown, sender_ids=[sender.pk for sender in senders])
    formset.new_objects = [form.instance for form in kept if form.instance._state.adding]


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
