from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import admin
from django.core.cache import cache
from django.db.models import F, OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from config.console import ConsoleAdmin, Entry, Figure, Panel, badge, confirmed_action, panel, pill
from config.console.reports import object_link
from messaging.models import Message
from reminders import services
from reminders.models import Alarm, AlarmDelivery, DeletedAlarm, Page, UserInfo, zone_of
from reminders.services.times import is_night

PANEL_KEPT = 60
DELIVERY_COLOURS = {"claimed": "info", "sent": "success", "failed": "danger", "unknown": "warning"}


def send_now(ids: list[UUID], _actor: Any, _reason: str) -> dict[str, int]:
    return {"due": services.make_due(ids, timezone.now())}


def release(ids: list[UUID], _actor: Any, _reason: str) -> dict[str, int]:
    return {"released": services.release_claims(ids)}


def reset(ids: list[UUID], _actor: Any, _reason: str) -> dict[str, int]:
    return {"reset": services.reset_counts(ids)}


class StandingFilter(DropdownFilter):
    title = _("standing")
    parameter_name = "standing"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("due", _("due")), ("processing", _("processing")), ("zombie", _("zombie")), ("refused", _("refused"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        now = timezone.now()
        chosen = {
            "due": Alarm.objects.takeable(now),
            "processing": Alarm.objects.processing(now),
            "zombie": Alarm.objects.zombies(now),
            "refused": Alarm.objects.filter(retry_at__isnull=False),
        }.get(self.value() or "")
        return queryset if chosen is None else queryset & chosen


@admin.register(Alarm)
class AlarmAdmin(ConsoleAdmin):
    icon, menu_order = "alarm", 10
    list_display = ["name", "user_id", "application", "next_local", "sent_count", "claim_age", "standing"]
    list_filter = [StandingFilter, "application"]
    search_fields = ["=id", "=page__id", "=user_id"]
    search_help_text = _("An alarm's, page's or user's exact id")
    list_select_related = ["application"]
    ordering = [F("next_alarm_time").asc(nulls_first=True), "pk"]
    fields = [
        "page", "application", "user_id", "title", "body", "next_local", "sent_count", "standing", "claim_age",
        "last_message", "occurrence", "refusals", "retry_at", "created_at", "updated_at",
    ]  # fmt: skip
    readonly_fields = fields
    actions = [
        confirmed_action(
            _("Send now"),
            None,
            send_now,
            needs_reason=False,
            permissions=["reminders.run_batch"],
            name="send_now",
            icon="send",
        ),
        confirmed_action(
            _("Release claim"),
            None,
            release,
            permissions=["reminders.release_alarm"],
            name="release_claim",
            icon="lock_open",
            when=lambda alarm: alarm.processed_at is not None,
        ),
        confirmed_action(
            _("Reset count"),
            None,
            reset,
            permissions=["reminders.release_alarm"],
            name="reset_count",
            icon="restart_alt",
            when=lambda alarm: alarm.sent_count > 1,
        ),
    ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        info = UserInfo.objects.filter(application_id=OuterRef("application_id"), user_id=OuterRef("user_id"))
        return super().get_queryset(request).annotate(zone_name=Subquery(info.values("timezone")[:1]))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description=_("page"), ordering="page_id")
    def name(self, alarm: Alarm) -> str:
        return str(alarm)[:60]

    @admin.display(description=_("next time (user's clock)"), ordering="next_alarm_time")
    def next_local(self, alarm: Any) -> str:
        if alarm.next_alarm_time is None:
            return _now("at once")
        zone = zone_of(alarm.zone_name)
        return f"{alarm.next_alarm_time.astimezone(zone):%Y-%m-%d %H:%M} {zone.key}"

    @admin.display(description=_("claimed for"), ordering="processed_at")
    def claim_age(self, alarm: Alarm) -> str:
        return timesince(alarm.processed_at, timezone.now(), depth=1) if alarm.processed_at else "–"

    @admin.display(description=_("standing"))
    def standing(self, alarm: Any) -> str:
        return standing(alarm, timezone.now())

    @admin.display(description=_("last message"))
    def last_message(self, alarm: Alarm) -> str:
        return message_link(alarm.last_notification_id)

    def timeline_entries(self, obj: Alarm) -> Iterable[Entry]:
        for delivery in AlarmDelivery.objects.filter(alarm_id=obj.pk).order_by("-occurrence")[:50]:
            yield Entry(
                at=delivery.ended_at or delivery.claimed_at,
                kind="notifications",
                title=_now("Occurrence %(n)d: %(state)s")
                % {"n": delivery.occurrence, "state": delivery.get_state_display()},  # type: ignore[attr-defined]
                body=delivery.reason,
                tone=DELIVERY_COLOURS[delivery.state],
                link=reverse("admin:reminders_alarmdelivery_change", args=[delivery.pk]),
            )


def standing(alarm: Any, now: datetime) -> str:
    """One badge: what keeps the alarm, or what it waits for."""
    if alarm.processed_at and alarm.processed_at < now - settings.ALARM_CLAIM_KEPT:
        return pill(_now("zombie"), "danger", _now("Claimed more than 6 hours ago: its worker died."))
    if alarm.processed_at:
        return pill(_now("processing"), "info")
    if alarm.retry_at and alarm.retry_at > now:
        return pill(_now("refused"), "warning", _now("Tried again at %(at)s") % {"at": alarm.retry_at.isoformat()})
    if alarm.next_alarm_time and alarm.next_alarm_time > now:
        return pill(_now("waiting"))
    if alarm.sent_count > 1 and is_night(now, zone_of(alarm.zone_name)):
        return pill(_now("sleeping"), "primary", _now("Night on the user's clock: it waits for 07:00."))
    return pill(_now("due"), "success")


def message_link(message_id: UUID | None) -> str:
    if message_id is None:
        return "–"
    link = object_link(Message, message_id)
    if not link:
        return str(message_id)
    return format_html('<a class="sb-link" href="{}">{}</a>', link, message_id)


@admin.register(AlarmDelivery)
class AlarmDeliveryAdmin(ConsoleAdmin):
    icon, menu_order = "outgoing_mail", 20
    read_only = True
    state_colours = DELIVERY_COLOURS
    list_display = ["idempotency_key", "shown_state", "reason", "claimed_at", "ended_at", "message"]
    list_filter = ["state"]
    search_fields = ["=idempotency_key", "=alarm_id"]
    ordering = ["-id"]
    shown_state = badge("state", description=_("state"))

    @admin.display(description=_("message"))
    def message(self, delivery: AlarmDelivery) -> str:
        return message_link(delivery.message_id)


@admin.register(Page)
class PageAdmin(ConsoleAdmin):
    icon, menu_order = "description", 30
    read_only = True
    list_display = ["id", "user_id", "application", "title", "deleted_at", "updated_at"]
    list_filter = ["application"]
    list_select_related = ["application"]
    search_fields = ["=id", "=user_id"]
    ordering = ["id"]


@admin.register(UserInfo)
class UserInfoAdmin(ConsoleAdmin):
    icon, menu_order = "schedule", 40
    list_display = ["user_id", "application", "timezone"]
    list_select_related = ["application"]
    search_fields = ["=user_id"]
    readonly_fields = ["application", "user_id"]
    ordering = ["id"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False


@admin.register(DeletedAlarm)
class DeletedAlarmAdmin(ConsoleAdmin):
    icon, menu_order = "delete", 50
    read_only = True
    list_display = ["id", "user_id", "deleted_at"]
    search_fields = ["=id", "=user_id"]
    ordering = ["-id"]


@panel(_("Reminders"), order=35, icon="alarm", permission="reminders.view_alarm")
def reminders_panel(request: HttpRequest) -> Panel:
    # At most a minute old, like the integrity panel: after an outage there may be very many due.
    standing = cache.get_or_set("reminders.schedule", lambda: services.schedule(timezone.now()), PANEL_KEPT) or {}
    link = reverse("admin:reminders_alarm_changelist")
    return Panel(
        figures=[
            Figure(_("due"), standing["due"], f"{link}?standing=due"),
            Figure(_("processing"), standing["processing"], f"{link}?standing=processing"),
            Figure(
                _("zombies"), standing["zombies"], f"{link}?standing=zombie", "danger" if standing["zombies"] else ""
            ),
        ],
        tone="warning" if standing["zombies"] else "success",
        link=link,
    )
