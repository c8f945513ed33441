"""Admin pages of the tables that belong to no domain, and of the libraries' tables."""

from typing import Any

from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django_q.models import Failure, OrmQ, Schedule, Success
from knox.models import AuthToken
from unfold.contrib.filters.admin import DropdownFilter
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from config import console
from config.console.base import told
from config.console.bulk import progress
from config.console.panels import counts_text, outcome
from config.models import BulkAction, Decision, SweepRun

admin.site.extra_urls = console.urls  # type: ignore[attr-defined]
admin.site.site_title = admin.site.site_header = "Signalbox"
admin.site.index_title = _("Dashboard")

for model in (User, Group, AuthToken, Schedule, Success, Failure, OrmQ, AccessAttempt, AccessLog, AccessFailureLog):
    if admin.site.is_registered(model):
        admin.site.unregister(model)


class SweepFilter(DropdownFilter):
    title = _("sweep")
    parameter_name = "sweep"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in settings.SWEEPS]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return queryset.filter(name=self.value()) if self.value() else queryset


class OutcomeFilter(DropdownFilter):
    title = _("outcome")
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("error", _("error")), ("running", _("running")), ("done", _("done"))]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        if self.value() == "error":
            return queryset.exclude(error="")
        if self.value() == "running":
            return queryset.filter(error="", ended_at=None)
        return queryset.filter(error="", ended_at__isnull=False) if self.value() == "done" else queryset


@admin.register(SweepRun)
class SweepRunAdmin(console.ConsoleAdmin):
    icon, menu_order = "cleaning_services", 10
    menu_title = _("Sweeps")
    read_only = True
    started = console.moment("started_at", _("started"))
    list_display = ("name", "started", "duration", "outcome", "counted", "host")
    list_filter = (SweepFilter, OutcomeFilter)
    ordering = ("-started_at",)
    actions = ("run_now",)
    change_form_outer_before_template = None

    @admin.display(description=_("duration"))
    def duration(self, run: SweepRun) -> str:
        return f"{(run.ended_at - run.started_at).total_seconds():.1f} s" if run.ended_at else "–"

    @admin.display(description=_("outcome"))
    def outcome(self, run: SweepRun) -> str:
        word, tone = outcome(run)
        return console.pill(word, tone, run.error[:300])

    @admin.display(description=_("outcomes"))
    def counted(self, run: SweepRun) -> str:
        return counts_text(run.counts)

    @admin.action(description=_("Run these sweeps now"))
    def run_now(self, request: HttpRequest, queryset: models.QuerySet[SweepRun]) -> None:
        from django_q.tasks import async_task

        if not request.user.has_perm("config.run_sweeps"):  # type: ignore[union-attr]
            raise PermissionDenied
        names = sorted(set(queryset.order_by().values_list("name", flat=True).distinct()) & set(settings.SWEEPS))
        for name in names:
            async_task("config.sweeping.tick", name, task_name=f"by hand {name}")
            console.record_human_action(request.user, SweepRun, _now("run now"), details={"sweep": name})
        messages.success(request, _now("Asked for: %(names)s") % {"names": ", ".join(names) or "–"})

    run_now.needs = ("config.run_sweeps",)  # type: ignore[attr-defined]

    def timeline_entries(self, obj: SweepRun) -> list[console.Entry]:
        """The decisions this run took."""
        return [
            console.Entry(
                at=decision.created_at,
                kind="smart_toy",
                title=f"{name} · {decision.rule}",
                body=story,
                link=reverse("admin:config_decision_change", args=[decision.pk]),
            )
            for decision, name, story in told(Decision.objects.filter(run_id=obj.pk).order_by("-id")[:50])
        ]


class RuleFilter(DropdownFilter):
    title = _("rule")
    parameter_name = "rule"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The rules among the latest decisions: all of them would be a scan of the table."""
        latest = Decision.objects.order_by("-id").values("rule")[:2000]
        rules = {row["rule"] for row in latest}
        return [(rule, rule) for rule in sorted(rules | ({self.value()} - {None, ""}))]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return queryset.filter(rule=self.value()) if self.value() else queryset


class ObjectTypeFilter(DropdownFilter):
    title = _("object type")
    parameter_name = "object_type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(m._meta.db_table, m._meta.verbose_name_plural) for m in admin.site._registry if _is_ours(m)]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return queryset.filter(object_type=self.value()) if self.value() else queryset


def _is_ours(model: type[models.Model]) -> bool:
    from config.console.site import DOMAINS

    return model._meta.app_label in DOMAINS


@admin.register(Decision)
class DecisionAdmin(console.ConsoleAdmin):
    icon, menu_order = "smart_toy", 20
    read_only = True
    at = console.moment("created_at", _("at"))
    list_display = ("at", "rule", "what", "story", "affected", "effect")
    list_filter = (RuleFilter, ObjectTypeFilter)
    search_fields = ("=object_id",)
    search_help_text = _("The object's exact id")
    ordering = ("-id",)
    change_form_outer_before_template = change_form_outer_after_template = None

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        changelist = super().get_changelist_instance(request)
        for decision, name, story in told(changelist.result_list):
            decision.told = name, story  # type: ignore[attr-defined]
        return changelist

    @admin.display(description=_("object"))
    def what(self, decision: Decision) -> str:
        from config.console.reports import object_link

        tables = {model._meta.db_table: model for model in admin.site._registry}
        model = tables.get(decision.object_type)
        link = object_link(model, decision.object_id) if model else ""
        name = decision.told[0]  # type: ignore[attr-defined]
        return format_html('<a class="sb-link" href="{}">{}</a>', link, name) if link else name

    @admin.display(description=_("change"))
    def story(self, decision: Decision) -> str:
        return decision.told[1]  # type: ignore[attr-defined]

    @admin.display(description=_("effect"))
    def effect(self, decision: Decision) -> str:
        return console.pill(_now("took effect"), "success") if decision.won else console.pill(_now("too late"))


@admin.register(BulkAction)
class BulkActionAdmin(console.ConsoleAdmin):
    icon, menu_order = "checklist", 25
    read_only = True
    state_colours = {"running": "info", "finished": "success"}
    list_display = ("title", "state", "total", "counted", "actor", "created_at", "ended_at")
    list_filter = ("status",)
    list_select_related = ("actor",)
    ordering = ("-created_at",)
    fields = ("title", "actor", "reason", "created_at", "ended_at")
    change_form_before_template = "admin/console/bulk_page.html"
    state = console.badge("status", state_colours, description=_("status"))

    @admin.display(description=_("outcomes"))
    def counted(self, bulk: BulkAction) -> str:
        return counts_text(bulk.counts)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        context.update(progress(kwargs["obj"]))
        return super().render_change_form(request, context, *args, **kwargs)


@admin.register(Schedule)
class ScheduleAdmin(console.ConsoleAdmin):
    icon, menu_order = "schedule", 30
    menu_title = _("Schedules")
    read_only = True
    list_display = ("name", "func", "cron", "next_run")
    change_form_outer_before_template = None


@admin.register(Failure)
class FailureAdmin(console.ConsoleAdmin):
    icon, menu_order = "error", 40
    menu_title = _("Failed tasks")
    read_only = True
    list_display = ("name", "func", "started", "stopped", "short_result")
    ordering = ("-started",)
    change_form_outer_before_template = None

    @admin.display(description=_("result"))
    def short_result(self, task: Failure) -> str:
        return str(task.result or "")[:120]


@admin.register(User)
class UserAdmin(DjangoUserAdmin, console.ConsoleAdmin):  # type: ignore[misc]
    icon, menu_order = "person", 10
    form, add_form, change_password_form = UserChangeForm, UserCreationForm, AdminPasswordChangeForm
    list_display = ("username", "email", "in_groups", "is_active", "is_staff", "last_login")
    list_filter = ("is_active", "is_staff", "groups")
    change_form_outer_before_template = None

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[User]:
        return super().get_queryset(request).prefetch_related("groups")

    @admin.display(description=_("groups"))
    def in_groups(self, user: User) -> str:
        return ", ".join(group.name for group in user.groups.all()) or "–"


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, console.ConsoleAdmin):  # type: ignore[misc]
    icon, menu_order = "groups", 20
    change_form_outer_before_template = None


@admin.register(AuthToken)
class AuthTokenAdmin(console.ConsoleAdmin):
    """Tokens are made by `manage.py create_client`, which shows them once; here they can only be revoked."""

    icon, menu_title = "key", _("Tokens")
    list_display = ("token_key", "user", "created", "expiry", "validity")
    list_select_related = ("user",)
    search_fields = ("user__username", "token_key")
    fields = ("user", "token_key", "created", "expiry")
    ordering = ("-created",)
    change_form_outer_before_template = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description=_("validity"))
    def validity(self, token: AuthToken) -> str:
        from django.utils import timezone

        if token.expiry is None:
            return console.pill(_now("no end"), "warning")
        if token.expiry < timezone.now():
            return console.pill(_now("expired"))
        return console.pill(
            _now("%(time)s left") % {"time": timesince(timezone.now(), token.expiry, depth=1)}, "success"
        )


@admin.register(AccessAttempt)
class AccessAttemptAdmin(console.ConsoleAdmin):
    """Deleting an attempt lifts its lock-out."""

    icon, menu_title = "shield_lock", _("Login attempts")
    list_display = ("attempt_time", "username", "ip_address", "failures_since_start", "locked_out")
    search_fields = ("username", "ip_address")
    fields = ("attempt_time", "username", "ip_address", "user_agent", "path_info", "failures_since_start")
    ordering = ("-attempt_time",)
    change_form_outer_before_template = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description=_("state"))
    def locked_out(self, attempt: AccessAttempt) -> str:
        locked = attempt.failures_since_start >= settings.AXES_FAILURE_LIMIT
        return console.pill(_now("locked out"), "danger") if locked else console.pill(_now("watched"), "info")
