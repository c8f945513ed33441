"""PCs with their slots, devices with their troubles."""

from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db import models
from django.db.models import Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from config.console import ConsoleAdmin, Entry, badge, confirmed_action, pill
from devices import services
from devices.admin.bars import bar
from devices.models import PC, Device

DEVICE_COLOURS = {"online": "success", "busy": "info", "offline": "", "error": "danger", "quarantined": "warning"}


class SilenceFilter(DropdownFilter):
    title = _("silence")
    parameter_name = "silence"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("stale", _("stale"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.stale(timezone.now()) if self.value() == "stale" else queryset


@admin.register(PC)
class PCAdmin(ConsoleAdmin):
    icon, menu_order = "computer", 20
    state_colours = {"online": "success", "offline": ""}
    list_display = ["pc_number", "state", "slots", "device_figures", "agent", "last_heartbeat_at"]
    list_select_related = ["summary", "agent"]
    search_fields = ["pc_number"]
    list_filter = ["status", SilenceFilter]
    fields = ["pc_number", "agent", "max_slots", "status", "last_heartbeat_at", "agent_version", "system"]
    readonly_fields = ["status", "agent_version", "system", "last_heartbeat_at"]
    ordering = ["pc_number"]

    class Media:
        css = {"all": ["devices/devices.css"]}

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Agents only, in a plain list: an autocomplete would need the right to look through all users."""
        if db_field.name == "agent":
            users = get_user_model().objects.filter(Q(groups__name="device-agent") | Q(pcs__isnull=False))
            kwargs["queryset"] = users.distinct().order_by("username")
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    @admin.display(description=_("status"), ordering="status")
    def state(self, pc: PC) -> str:
        heard = pc.last_heartbeat_at
        since = _now("silent for %(time)s") % {"time": timesince(heard)} if heard else _now("never heard of")
        if pc.status == PC.Status.ONLINE and pc.is_stale(timezone.now()):
            return pill(_now("stale"), "warning", since)
        return pill(pc.get_status_display(), self.state_colours[pc.status], since)

    @admin.display(description=_("slots used"))
    def slots(self, pc: PC) -> str:
        summary = pc.summary
        title = _now("%(free)d free of %(target)d") % {"free": summary.free_slots, "target": summary.target}
        return bar(summary.running_count, summary.target, title=title)

    @admin.display(description=_("devices"))
    def device_figures(self, pc: PC) -> str:
        summary = pc.summary
        link = f"{reverse('admin:devices_device_changelist')}?pc__id__exact={pc.pk}"
        found = [
            pill(f"{label} {count}", tone)
            for label, count, tone in (
                (_now("error"), summary.error_count, "danger"),
                (_now("offline"), summary.offline_count, ""),
            )
            if count
        ]
        return format_html(
            '<a class="sb-link" href="{}">{}</a> {} {}', link, summary.device_count, *[*found, "", ""][:2]
        )


def _recover(ids: list[UUID], actor: Any, reason: str) -> Counter[str]:
    done = services.recover_devices(ids, actor, reason, timezone.now())
    return Counter(recovered=len(done), untouched=len(ids) - len(done))


def _quarantine(ids: list[UUID], actor: Any, reason: str) -> Counter[str]:
    done = services.quarantine_devices(ids, actor, reason, timezone.now())
    return Counter(quarantined=len(done), untouched=len(ids) - len(done))


def _lines(devices: models.QuerySet[Device]) -> Iterable[str]:
    for device in devices.select_related("pc"):
        reason = f" · {device.error_reason[:100]}" if device.error_reason else ""
        yield f"{device.serial} ({device.pc}) · {device.get_status_display()}{reason}"


@admin.register(Device)
class DeviceAdmin(ConsoleAdmin):
    icon, menu_order = "smartphone", 30
    read_only = True
    state_colours = DEVICE_COLOURS
    list_display = ["serial", "pc", "state", "trouble", "total_errors", "battery_level", "model", "connection_id"]
    list_select_related = ["pc"]
    search_fields = ["serial", "connection_id"]
    list_filter = ["status", "pc"]
    ordering = ["serial"]
    fields = [
        "serial", "pc", "status", "connection_id", "model", "battery", "labels", "listed", "missed_lists", "offline_at",
        "error_reason", "errored_at", "total_errors", "created_at",
    ]  # fmt: skip
    state = badge("status", description=_("status"), tooltip=lambda device: device.error_reason or "")
    actions = [
        confirmed_action(
            _("Recover"),
            _lines,
            _recover,
            permissions=["devices.change_device"],
            name="recover",
            icon="healing",
            when=lambda device: device.status in ("error", "quarantined"),
        ),
        confirmed_action(
            _("Quarantine"),
            _lines,
            _quarantine,
            permissions=["devices.change_device"],
            name="quarantine",
            icon="block",
            danger=True,
            when=lambda device: device.status != "quarantined",
        ),
    ]

    class Media:
        css = {"all": ["devices/devices.css"]}

    @admin.display(description=_("trouble"))
    def trouble(self, device: Device) -> str:
        return (device.error_reason or "")[:80] or "–"

    @admin.display(description=_("battery"), ordering="battery")
    def battery_level(self, device: Device) -> str:
        return "–" if device.battery is None else f"{device.battery} %"

    def timeline(self, obj: Device) -> list[Entry]:
        """People's acts come from the device's own history, which the API writes too."""
        return [entry for entry in super().timeline(obj) if not (entry.kind == "person" and entry.tone == "primary")]

    def timeline_entries(self, obj: Device) -> Iterable[Entry]:
        for act in obj.history.order_by("-id")[:50]:
            change = f"{act.before} → {act.after}"
            body = f"{change} · {act.reason}" if act.reason else change
            yield Entry(act.created_at, "person", f"{act.actor}: {act.get_act_display()}", body)
        for row in obj.rows.select_related("task").order_by("-changed_at")[:20]:
            link = reverse("admin:devices_taskdevice_change", args=[row.pk])
            yield Entry(
                row.changed_at, "task", f"{row.task.name}: {row.get_status_display()}", row.error or "", "", link
            )
