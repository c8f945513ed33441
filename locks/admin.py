"""Locks, branches, the line and the events."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db import models
from django.db.models import Count, OuterRef, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from config.console import ConsoleAdmin, Entry, Figure, Panel, Row, badge, can_become, confirmed_action, panel, pill
from config.errors import DomainError
from locks import services
from locks.models import Branch, BranchLock, LockEvent, LockWaiter

ADMINISTER = "locks.administer_locks"
HEALTH = {"healthy": "success", "warning": "warning", "critical": "danger"}
HEALTH_NAMES = {"healthy": _("healthy"), "warning": _("warning"), "critical": _("critical")}
EXTENSIONS = {1: _("Extend by 1 h"), 4: _("Extend by 4 h"), 24: _("Extend by 24 h")}
EVENTS = 100
WORST = 6
COUNTED = 1000
KINDS = {
    "ACQUIRED": ("lock", "success"),
    "GRANTED": ("lock", "success"),
    "EXTENDED": ("more_time", "info"),
    "RELEASED": ("lock_open", ""),
    "EXPIRED_TTL": ("timer_off", "warning"),
    "EXPIRED_HEARTBEAT": ("heart_broken", "warning"),
    "FORCE_RELEASED": ("gavel", "danger"),
    "CONFLICT": ("block", "warning"),
    "WAIT_QUEUED": ("hourglass", ""),
    "STATE_CHANGED": ("swap_horiz", "info"),
    "HEARTBEAT": ("favorite", ""),
}


def span(seconds: float) -> str:
    """3 h 20 min, 4 min 10 s, 9 s."""
    hours, rest = divmod(int(abs(seconds)), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return gettext("%(h)d h %(m)d min") % {"h": hours, "m": minutes}
    return gettext("%(m)d min %(s)d s") % {"m": minutes, "s": left} if minutes else gettext("%(s)d s") % {"s": left}


def countdown(lock: BranchLock) -> str:
    left = (lock.expires_at - lock.now).total_seconds()
    return span(left) if left >= 0 else gettext("over since %(time)s") % {"time": span(left)}


def health_pill(lock: BranchLock) -> SafeString | str:
    if lock.released_at:
        return "–"
    if lock.heartbeat_health is None:
        return pill(gettext("no heartbeat"), "", gettext("This lock ends at its expiry only."))
    silent = span((lock.now - lock.heard_at).total_seconds())
    why = gettext("silent for %(time)s, heartbeat every %(interval)d s") % {
        "time": silent,
        "interval": lock.heartbeat_interval,
    }
    return pill(HEALTH_NAMES[lock.heartbeat_health], HEALTH[lock.heartbeat_health], why)


def force_locks(ids: list[Any], user: Any, reason: str) -> dict[str, int]:
    """The ids are those confirmed, so a lock granted meanwhile survives."""
    return {"released": len(services.force_unlock(user.get_username(), reason, lock_ids=ids))}


def extend_locks(hours: int) -> Any:
    def extend(ids: list[Any], user: Any, reason: str) -> dict[str, int]:
        done: Counter[str] = Counter()
        for lock in BranchLock.objects.filter(pk__in=ids):
            try:
                services.extend_lock(lock.pk, lock.fence, hours, reason, user.get_username(), admin=True)
            except DomainError as refusal:
                done[refusal.code] += 1
            else:
                done["extended"] += 1
        return done

    return extend


def named(rows: models.QuerySet[BranchLock]) -> Iterable[str]:
    return (f"{lock.branch.name} · {lock} · {lock.locked_by} · {lock.reason}" for lock in rows)


def held(lock: BranchLock) -> bool:
    return lock.released_at is None


def event_entry(event: LockEvent) -> Entry:
    icon, tone = KINDS[event.kind]
    said = [f"{name}: {value}" for name, value in event.details.items() if value not in (None, "", [])]
    fence = [f"{gettext('fence')} {event.fence}"] if event.fence is not None else []
    body = " · ".join([*([event.reason] if event.reason else []), *fence, *said])
    return Entry(event.created_at, icon, f"{event.get_kind_display()} · {event.actor}", body, tone)


class HealthFilter(DropdownFilter):
    title = _("health")
    parameter_name = "health"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(HEALTH_NAMES.items())

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return queryset.filter(state="active", heartbeat_health=self.value()) if self.value() else queryset


@admin.register(BranchLock)
class BranchLockAdmin(ConsoleAdmin):
    icon, menu_order = "lock", 10
    read_only = True
    state_colours = {"active": "info", "released": "", "expired": "warning", "force_released": "danger"}
    list_display = ("branch", "what", "shown_state", "health", "left", "done", "locked_by", "locked_at")
    list_filter = ("state", HealthFilter, "lock_type", "lock_scope")
    list_select_related = ("branch",)
    search_fields = ("branch__name", "locked_by", "resource_type", "resource_id")
    ordering = ("state", "-locked_at")
    shown_state = badge("state", description=_("state"))
    fieldsets = (
        (
            None,
            {"fields": (("branch", "state"), ("lock_type", "lock_scope"), ("resource_type", "resource_id"), "reason")},
        ),
        (_("Holder"), {"fields": (("locked_by", "fence"), ("locked_at", "released_at"), "released_by")}),
        (
            _("Clocks"),
            {
                "fields": (
                    ("left", "expires_at"), ("ttl_source", "auto_release_enabled"), ("lock_delay", "expired_at"),
                )
            },
        ),
        (
            _("Heartbeat"),
            {
                "fields": (
                    ("health", "status"), ("heartbeat_interval", "last_heartbeat"), "heartbeat_source",
                    ("done", "estimated_remaining_hours"),
                )
            },
        ),
    )  # fmt: skip
    readonly_fields = ("left", "health", "done")
    actions = (
        confirmed_action(
            _("Force-unlock"), named, force_locks, permissions=[ADMINISTER], name="force_unlock", icon="gavel",
            danger=True, when=held,
        ),
        *(
            confirmed_action(
                description, named, extend_locks(hours), permissions=[ADMINISTER],
                name=f"extend_{hours}h", icon="more_time", when=held,
            )
            for hours, description in EXTENSIONS.items()
        ),
    )  # fmt: skip

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[BranchLock]:
        return BranchLock.objects.clocked().select_related("branch")

    @admin.display(description=_("lock"))
    def what(self, lock: BranchLock) -> str:
        return str(lock)

    @admin.display(description=_("health"))
    def health(self, lock: BranchLock) -> SafeString | str:
        return health_pill(lock)

    @admin.display(description=_("time left"), ordering="expires_at")
    def left(self, lock: BranchLock) -> str:
        return "–" if lock.released_at else countdown(lock)

    @admin.display(description=_("progress"), ordering="progress")
    def done(self, lock: BranchLock) -> str:
        if lock.progress is None:
            return "–"
        eta = services.eta_seconds(lock)
        return f"{lock.progress:g} %" + (f" · {span(eta)}" if eta is not None and not lock.released_at else "")

    def timeline_entries(self, obj: BranchLock) -> Iterable[Entry]:
        return [event_entry(event) for event in obj.events.order_by("-id")[:EVENTS]]


def set_state(state: str) -> Any:
    def change(ids: list[Any], user: Any, reason: str) -> dict[str, int]:
        done: Counter[str] = Counter()
        for branch in Branch.objects.filter(pk__in=ids).order_by("pk"):
            try:
                services.set_branch_state(branch.name, state, user.get_username(), reason)
            except DomainError as refusal:
                done[refusal.code] += 1
            else:
                done["changed"] += 1
        return done

    return change


def count_of(rows: models.QuerySet[Any]) -> Any:
    """Each count by itself: joined to both, a branch's years of locks would be multiplied by its waiters."""
    counts = rows.filter(branch=OuterRef("pk")).order_by().values("branch").annotate(count=Count("pk"))
    return Coalesce(Subquery(counts.values("count")), 0)


def force_branches(ids: list[Any], user: Any, reason: str) -> dict[str, int]:
    locks = list(BranchLock.objects.active().filter(branch__in=ids).values_list("pk", flat=True))
    return force_locks(locks, user, reason)


def holding(rows: models.QuerySet[Branch]) -> Iterable[str]:
    """The locks that a force-unlock of the branches would end."""
    return named(BranchLock.objects.active().filter(branch__in=rows).select_related("branch").order_by("pk")[:50])


@admin.register(Branch)
class BranchAdmin(ConsoleAdmin):
    icon, menu_order = "account_tree", 20
    read_only = True
    state_colours = {
        "ACTIVE": "success",
        "LOCKED_FOR_WRITE": "info",
        "READY": "primary",
        "ARCHIVED": "",
        "ERROR": "danger",
    }
    list_display = ("name", "shown_state", "fence", "held", "waiting", "indexing_service", "indexing_started_at")
    list_filter = ("state",)
    search_fields = ("name",)
    ordering = ("name",)
    shown_state = badge("state", description=_("state"))
    fields = (
        "name", "state", "fence", "lock_list", "line", "indexing_service", "indexing_started_at",
        "indexing_completed_at", "created_at",
    )  # fmt: skip
    readonly_fields = ("lock_list", "line")
    actions = (
        confirmed_action(
            _("Force-unlock all its locks"), holding, force_branches, permissions=[ADMINISTER],
            name="force_unlock_branches", icon="gavel", danger=True, when=lambda branch: branch.held_count > 0,
        ),
        confirmed_action(
            _("Set ACTIVE"), None, set_state("ACTIVE"), permissions=[ADMINISTER], name="set_active",
            when=can_become("ACTIVE"),
        ),
        confirmed_action(
            _("Set ERROR"), None, set_state("ERROR"), permissions=[ADMINISTER], name="set_error",
            when=can_become("ERROR"),
        ),
        confirmed_action(
            _("Archive"), None, set_state("ARCHIVED"), permissions=[ADMINISTER], name="archive", danger=True,
            when=can_become("ARCHIVED"),
        ),
    )  # fmt: skip

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Branch]:
        return Branch.objects.annotate(
            held_count=count_of(BranchLock.objects.active()),
            waiting_count=count_of(LockWaiter.objects.filter(state="waiting")),
        )

    @admin.display(description=_("locks"))
    def held(self, branch: Any) -> int:
        return int(branch.held_count)

    @admin.display(description=_("waiting"))
    def waiting(self, branch: Any) -> int:
        return int(branch.waiting_count)

    @admin.display(description=_("locks"))
    def lock_list(self, branch: Branch) -> SafeString | str:
        locks = BranchLock.objects.active().clocked().on(branch.pk).order_by("pk")[:50]
        rows = (
            (reverse("admin:locks_branchlock_change", args=[lock.pk]), lock, lock.locked_by, countdown(lock),
             health_pill(lock))
            for lock in locks
        )  # fmt: skip
        return format_html_join("", '<p><a href="{}">{}</a> · {} · {} {}</p>', rows) or "–"

    @admin.display(description=_("waiters, first come first"))
    def line(self, branch: Branch) -> SafeString | str:
        waiters = LockWaiter.objects.queued().filter(branch=branch).order_by("id")[:50]
        # Told as text: what is escaped is text already and knows no format of times.
        rows = (
            (waiter, waiter.resource_type or "", waiter.resource_id or "",
             f"{timezone.localtime(waiter.deadline_at):%H:%M:%S}")
            for waiter in waiters
        )  # fmt: skip
        return format_html_join("", "<p>{} {} {} · {}</p>", rows) or "–"

    def timeline_entries(self, obj: Branch) -> Iterable[Entry]:
        quiet = obj.events.exclude(kind=LockEvent.Kind.HEARTBEAT)
        return [event_entry(event) for event in quiet.order_by("-id")[:EVENTS]]


@admin.register(LockWaiter)
class LockWaiterAdmin(ConsoleAdmin):
    icon, menu_order = "hourglass", 30
    read_only = True
    state_colours = {"waiting": "info", "granted": "success", "timed_out": "warning", "gone": ""}
    list_display = ("branch", "client", "lock_scope", "resource_type", "shown_state", "created_at", "deadline_at")
    list_filter = ("state",)
    list_select_related = ("branch",)
    search_fields = ("branch__name", "client")
    ordering = ("-id",)
    shown_state = badge("state", description=_("state"))


@admin.register(LockEvent)
class LockEventAdmin(ConsoleAdmin):
    icon, menu_order = "history", 40
    read_only = True
    list_display = ("created_at", "branch", "shown_kind", "actor", "fence", "reason")
    list_filter = ("kind",)
    list_select_related = ("branch",)
    search_fields = ("branch__name", "actor")
    ordering = ("-id",)

    @admin.display(description=_("kind"))
    def shown_kind(self, event: LockEvent) -> SafeString:
        return pill(event.get_kind_display(), KINDS[event.kind][1])


@panel(_("Locks"), order=50, icon="lock", permission="locks.view_branchlock")
def locks_panel(request: HttpRequest) -> Panel:
    """Drawn every ten seconds: one statement, the worst of at most a thousand locks first."""
    link = reverse("admin:locks_branchlock_changelist")
    locks = list(BranchLock.objects.active().clocked().select_related("branch").worst_first()[:COUNTED])
    health = Counter(lock.heartbeat_health for lock in locks)
    held = f"{COUNTED}+" if len(locks) == COUNTED else str(len(locks))
    figures = [Figure(_("held"), held, f"{link}?state__exact=active")]
    figures += [
        Figure(HEALTH_NAMES[state], health[state], f"{link}?health={state}", HEALTH[state])
        for state in ("healthy", "warning", "critical")
        if health[state]
    ]
    rows = [_panel_row(lock) for lock in locks[:WORST] if lock.heartbeat_health in ("warning", "critical")]
    tone = "danger" if health["critical"] else "warning" if rows else "success"
    return Panel(figures=figures, rows=rows, tone=tone, link=link)


def _panel_row(lock: BranchLock) -> Row:
    return Row(
        title=f"{lock.branch.name} · {lock}",
        note=lock.locked_by,
        link=reverse("admin:locks_branchlock_change", args=[lock.pk]),
        badge=HEALTH_NAMES[str(lock.heartbeat_health)],
        tone=HEALTH[str(lock.heartbeat_health)],
        aside=countdown(lock),
    )
