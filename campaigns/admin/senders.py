from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db import models
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from campaigns.admin.enrollments import ENROLLMENT_COLOURS, execution_entries, reply_entry
from campaigns.admin.verbs import each
from campaigns.models import Enrollment, Execution, Lead, Reply, Sender
from campaigns.services import senders
from campaigns.services.sending import usage
from campaigns.services.windows import allowance
from config.console import ConsoleAdmin, Entry, badge, confirmed_action


def affected(rows: models.QuerySet[Any]) -> Iterable[str]:
    """Who is affected, before anything happens."""
    for row in rows:
        found = senders.impact(row)
        yield _now("%(sender)s: %(enrollments)s live enrollments in %(sequences)s sequences") % {
            "sender": row,
            "enrollments": found["enrollments"],
            "sequences": found["sequences_count"],
        }


def action(title: Any, name: str, icon: str, act: Any, done: str, danger: bool = False) -> Any:
    permissions = ["campaigns.change_sender"]
    return confirmed_action(
        title, affected, each(act, done), permissions=permissions, name=name, icon=icon, danger=danger
    )


@admin.register(Sender)
class SenderAdmin(ConsoleAdmin):
    icon, menu_order, read_only = "outgoing_mail", 50, True
    state_colours = {"active": "success", "error": "danger", "suspended": "warning", "inactive": ""}
    list_display = ("address", "display_name", "channel", "state", "used", "window", "last_error", "deleted_at")
    list_filter = ("status", "channel", "application")
    search_fields = ("address", "display_name")
    ordering = ("address",)
    state = badge("status", description=_("state"))
    actions = (
        action(_("Activate"), "activate", "play_arrow", lambda pk, user: senders.activate_sender(pk, timezone.now()),
               "activated"),
        action(_("Suspend"), "suspend", "pause", lambda pk, user: senders.suspend_sender(pk), "suspended", danger=True),
        action(_("Deactivate"), "deactivate", "power_settings_new", lambda pk, user: senders.deactivate_sender(pk),
               "deactivated", danger=True),
    )  # fmt: skip

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        self.usage = usage(list(Sender.objects.all()), timezone.now()) if Sender.objects.exists() else {}
        return super().changelist_view(request, extra_context)

    @admin.display(description=_("used today"))
    def used(self, row: Sender) -> str:
        found = allowance(row, timezone.now(), *getattr(self, "usage", {}).get(row.pk, (0, 0)))
        return f"{found.used_today} / {'∞' if found.daily is None else found.daily}"

    @admin.display(description=_("window"))
    def window(self, row: Sender) -> str:
        if row.window_from is None or row.window_to is None:
            return _now("always")
        place = _now("lead's time") if row.window_zone == "lead" else row.time_zone
        return f"{row.window_from:%H:%M}–{row.window_to:%H:%M} {place}"


@admin.register(Lead)
class LeadAdmin(ConsoleAdmin):
    icon, menu_order, read_only = "person_search", 60, True
    list_display = ("name", "email", "phone", "company_domain", "time_zone", "application")
    list_filter = ("application",)
    search_fields = ("name", "email", "phone", "company_domain")
    ordering = ("-created_at",)
    fields = (
        "name", "email", "phone", "company_domain", "time_zone", "locale", "attributes", "application", "created_at",
    )  # fmt: skip

    def timeline_entries(self, obj: Lead) -> Iterable[Entry]:
        """All that was written to this person and came back, in whichever sequence."""
        for row in Enrollment.objects.filter(lead=obj).select_related("sequence").order_by("-pk")[:50]:
            link = reverse("admin:campaigns_enrollment_change", args=[row.pk])
            yield Entry(
                row.created_at, "how_to_reg", _now("enrolled in %(name)s") % {"name": row.sequence.name}, link=link
            )
            if row.ended_at:
                title = f"{row.sequence.name} · {row.get_status_display()}"
                yield Entry(row.ended_at, "flag", title, "", ENROLLMENT_COLOURS[row.status], link)
        steps = Execution.objects.filter(enrollment__lead=obj).select_related("step", "message").order_by("-pk")
        for step in steps[:50]:
            yield from execution_entries(step)
        yield from map(reply_entry, Reply.objects.filter(enrollment__lead=obj).order_by("-received_at")[:50])
