from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import flatten
from django.core.exceptions import PermissionDenied
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django_fsm import TransitionNotAllowed
from unfold.decorators import action as unfold_action
from unfold.widgets import UnfoldAdminRadioSelectWidget, UnfoldAdminSelectWidget

from campaigns.admin.enrollments import ENROLLMENT_COLOURS, execution_entries, reply_entry
from campaigns.admin.forms import LeadForm, SenderForm
from campaigns.admin.importing import import_view
from campaigns.admin.rules import WORDS
from campaigns.admin.verbs import each
from campaigns.models import Enrollment, Execution, Lead, Reply, Sender
from campaigns.services import leads, senders
from campaigns.services.sending import usage
from campaigns.services.windows import allowance
from config.console import Entry, ReasonForm, ServiceAdmin, badge, can_become, confirmed_action, record_human_action
from config.errors import DomainError


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
    """A sender's own page has the one that offers a successor, instead of those that take it out of service."""
    return confirmed_action(
        title, affected, each(act, done), permissions=["campaigns.change_sender"], name=name, icon=icon, danger=danger,
        when=lambda row: not danger and row.deleted_at is None and can_become("active")(row),
    )  # fmt: skip


RETIRE = {"suspend": senders.suspend_sender, "deactivate": senders.deactivate_sender, "delete": senders.delete_sender}


class RetireForm(ReasonForm):
    how = forms.ChoiceField(
        label=_("How"),
        choices=[
            ("suspend", _("Suspend: for a while")),
            ("deactivate", _("Deactivate: until somebody activates it")),
            ("delete", _("Delete: for good")),
        ],
        widget=UnfoldAdminRadioSelectWidget(),
    )
    successor = forms.ChoiceField(
        label=_("Hand its leads over to"),
        required=False,
        widget=UnfoldAdminSelectWidget(),
        help_text=_("Without a successor due steps move to another sender of the pool, or are skipped."),
    )
    field_order = ("how", "successor", "reason")

    def __init__(self, *args: Any, candidates: list[dict[str, Any]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        named = [(str(one["id"]), one["display_name"] or one["address"]) for one in candidates]
        self.fields["successor"].choices = [("", "–"), *named]  # type: ignore[attr-defined]


@admin.register(Sender)
class SenderAdmin(ServiceAdmin):
    icon, menu_order = "outgoing_mail", 50
    form = SenderForm
    fieldsets = (
        (None, {"fields": (("application", "channel"), ("address", "display_name"))}),
        (_("State"), {"fields": (("status", "last_error", "deleted_at"),)}),
        (
            _("How much"),
            {
                "fields": (
                    ("daily_limit", "hourly_limit"), ("min_gap_seconds", "gap_jitter_seconds"),
                    ("ramp_start", "ramp_step"),
                )
            },
        ),
        (_("When"), {"fields": ("window_days", ("window_from", "window_to"), ("window_zone", "time_zone"))}),
    )  # fmt: skip
    readonly_fields = ("last_error", "deleted_at")
    state_colours = {"active": "success", "error": "danger", "suspended": "warning", "inactive": ""}
    rule_words = WORDS
    list_display = ("address", "display_name", "channel", "state", "used", "window", "last_error", "deleted_at")
    list_filter = ("status", "channel", "application")
    search_fields = ("address", "display_name")
    ordering = ("address",)
    state = badge("status", description=_("state"))
    actions = (
        action(_("Activate"), "activate", "play_arrow", lambda pk, user: senders.activate_sender(pk, timezone.now()),
               "activated"),
        action(_("Suspend"), "suspend", "pause", lambda pk, user: senders.suspend_sender(pk), "suspended",
               danger=True),
        action(_("Deactivate"), "deactivate", "power_settings_new", lambda pk, user: senders.deactivate_sender(pk),
               "deactivated", danger=True),
    )  # fmt: skip

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        found = super().get_fieldsets(request, obj)
        return found if obj else [part for part in found if "status" not in flatten(part[1]["fields"])]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), *(["application", "channel"] if obj else [])]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and (obj is None or obj.deleted_at is None)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """By the page that says who is affected."""
        return False

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> Sender:
        return senders.create_sender(fields.pop("application"), fields)

    def change(self, request: HttpRequest, obj: Sender, changes: dict[str, Any]) -> None:
        senders.change_sender(obj.pk, changes)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.retire_view)
        return [path("<uuid:key>/retire/", view, name="campaigns_sender_retire"), *super().get_urls()]

    def links_for(self, request: HttpRequest, obj: Sender) -> list[dict[str, Any]]:
        if obj.deleted_at or not self.has_change_permission(request, obj):
            return []
        return [{"title": _("Retire…"), "url": reverse("admin:campaigns_sender_retire", args=[obj.pk])}]

    def retire_view(self, request: HttpRequest, key: Any) -> HttpResponse:
        """Who is affected when this sender goes, and who could take over; then it goes."""
        sender = get_object_or_404(Sender, pk=key)
        if not self.has_change_permission(request, sender):
            raise PermissionDenied
        found, page = senders.impact(sender), reverse("admin:campaigns_sender_change", args=[sender.pk])
        form = RetireForm(request.POST or None, candidates=found["candidates"])
        if request.method == "POST" and form.is_valid():
            try:
                self.retire(request, sender, form.cleaned_data)
            except (DomainError, TransitionNotAllowed) as refusal:
                form.add_error(None, str(getattr(refusal, "detail", refusal)))
            else:
                messages.success(request, _now("%(sender)s is retired.") % {"sender": sender})
                return HttpResponseRedirect(page)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Retire a sender"),
            "opts": self.model._meta,
            "original": sender,
            "impact": found,
            "form": form,
            "back": page,
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        return TemplateResponse(request, "campaigns/retire.html", context)

    @transaction.atomic
    def retire(self, request: HttpRequest, sender: Sender, said: dict[str, Any]) -> None:
        successor = said["successor"] or None
        RETIRE[said["how"]](sender.pk, reassign_to=successor)
        details = {"reassign_to": successor} if successor else None
        record_human_action(request.user, sender, f"sender {said['how']}", said["reason"], details)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        self.usage = usage(list(Sender.objects.all()), timezone.now()) if Sender.objects.exists() else {}
        return super().changelist_view(request, extra_context)

    @admin.display(description=_("used today"))
    def used(self, row: Sender) -> str:
        found = allowance(row, timezone.now(), *getattr(self, "usage", {}).get(row.pk, (0, 0, None)))
        return f"{found.used_today} / {'∞' if found.daily is None else found.daily}"

    @admin.display(description=_("window"))
    def window(self, row: Sender) -> str:
        if row.window_from is None or row.window_to is None:
            return _now("always")
        place = _now("lead's time") if row.window_zone == "lead" else row.time_zone
        return f"{row.window_from:%H:%M}–{row.window_to:%H:%M} {place}"


@admin.register(Lead)
class LeadAdmin(ServiceAdmin):
    icon, menu_order = "person_search", 60
    form = LeadForm
    list_display = ("name", "email", "phone", "company_domain", "time_zone", "application")
    list_filter = ("application",)
    search_fields = ("name", "email", "phone", "company_domain")
    ordering = ("-created_at",)
    fields = (
        ("name", "application"), ("email", "phone"), ("company_domain", "locale"), "time_zone", "attributes",
    )  # fmt: skip

    actions_list = ("import_leads",)

    @unfold_action(description=_("Import leads"), url_path="import", icon="upload", permissions=["add"])
    def import_leads(self, request: HttpRequest) -> HttpResponse:
        return import_view(request)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), *(["application"] if obj else [])]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """What was written to a person stays; nobody is written to who is suppressed or stopped."""
        return False

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> Lead:
        return leads.create_lead(fields.pop("application"), fields, timezone.now())

    def change(self, request: HttpRequest, obj: Lead, changes: dict[str, Any]) -> None:
        leads.change_lead(obj.pk, changes, timezone.now())

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
