"""Templates: edited by the service (each edit a version), previewed, sent to oneself, compared."""

import difflib
import json
from collections.abc import Iterator
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import BooleanRadioFilter, ChoicesDropdownFilter, RelatedDropdownFilter
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from config.console import Entry, RefusableForm, ServiceAdmin, pill, record_human_action
from config.errors import DomainError
from messaging.admin.base import MessagingAdmin, ObjectField, page_url
from messaging.admin.cursor import as_uuid
from messaging.admin.messages import addressed
from messaging.models import Application, Message, MessageTemplate, MessageTemplateVersion
from messaging.services import composing, operating, templates

SHOWN = 50
COMPARED = ("name", "title_template", "body_template", "data_template", "provider_code")


class TemplateForm(RefusableForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, rows in (("title_template", 2), ("body_template", 10), ("data_template", 4)):
            if name in self.fields:
                self.fields[name].widget.attrs["rows"] = rows

    def clean(self) -> dict[str, Any]:
        found: dict[str, Any] = super().clean() or self.cleaned_data
        for name in templates.TEXTS:
            try:
                templates.check_places(name, found.get(name) or "")
            except DomainError as error:
                self.add_error(name, error.detail)
        return found


class PreviewForm(forms.Form):
    variables = ObjectField(
        label=_("Variables"), required=False, widget=UnfoldAdminTextareaWidget(attrs={"rows": 6, "class": "sb-code"})
    )
    recipient = forms.CharField(
        label=_("Test recipient"),
        required=False,
        max_length=320,
        widget=UnfoldAdminTextInputWidget(),
        help_text=_("The address, or the id, of one of this application's subscriptions"),
    )


@admin.register(MessageTemplate)
class MessageTemplateAdmin(ServiceAdmin, MessagingAdmin):
    icon, menu_order = "description", 20
    form = TemplateForm
    list_display = ("name", "channel", "version", "on", "approved", "application", "updated_at")
    list_select_related = ("application",)
    list_filter = (
        ("channel", ChoicesDropdownFilter),
        ("active", BooleanRadioFilter),
        ("application", RelatedDropdownFilter),
    )
    search_fields = ("name", "provider_code")
    readonly_fields = ("version", "created_at", "updated_at")
    fieldsets = (
        (None, {"fields": (("application", "name"), ("channel", "active", "version"))}),
        (_("Text"), {"fields": ("title_template", "body_template", "data_template")}),
        (_("KakaoTalk"), {"fields": (("provider_code", "approval"),)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[MessageTemplate]:
        return MessageTemplate.objects.existing()

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), *(["application", "channel"] if obj else [])]

    @admin.display(description=_("state"))
    def on(self, row: MessageTemplate) -> SafeString:
        return pill(_("active"), "success") if row.active else pill(_("inactive"))

    @admin.display(description=_("approval"))
    def approved(self, row: MessageTemplate) -> SafeString | str:
        tones = {"approved": "success", "requested": "warning", "rejected": "danger"}
        return pill(row.get_approval_display(), tones[row.approval]) if row.channel == "kakao_talk" else "–"

    # --- writing: by the service, behind the gate of locks

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> MessageTemplate:
        return templates.create_template(fields.pop("application"), fields, now=timezone.now())

    def change(self, request: HttpRequest, obj: MessageTemplate, changes: dict[str, Any]) -> None:
        templates.change_template(obj.pk, changes, hold=templates.Hold(actor=request.user))

    def remove(self, request: HttpRequest, obj: MessageTemplate) -> None:
        """The row and its versions stay; messages go on naming it."""
        templates.delete_template(obj.pk, hold=templates.Hold(actor=request.user), now=timezone.now())

    # --- preview and test

    def get_urls(self) -> list[URLPattern]:
        own = path(
            "<uuid:key>/preview/",
            self.admin_site.admin_view(self.preview_view),
            name="messaging_messagetemplate_preview",
        )
        return [own, *super().get_urls()]

    def links_for(self, request: HttpRequest, obj: MessageTemplate) -> list[dict[str, Any]]:
        url = reverse("admin:messaging_messagetemplate_preview", args=[obj.pk])
        return [{"title": _("Preview and test"), "url": url}]

    def preview_view(self, request: HttpRequest, key: Any) -> HttpResponse:
        template = get_object_or_404(self.get_queryset(request), pk=key)
        if not self.has_view_permission(request, template):
            raise PermissionDenied
        names = templates.names_in(template.title_template, template.body_template, template.data_template)
        samples = {name: name for name in names}
        sample_text = json.dumps(samples, ensure_ascii=False, indent=2)
        form = PreviewForm(request.POST or None, initial={"variables": samples})
        variables = form.cleaned_data["variables"] if form.is_bound and form.is_valid() else samples
        if request.method == "POST" and form.is_valid() and "send" in request.POST:
            sent = self._send_test(request, template, variables, form.cleaned_data["recipient"])
            if sent is not None:
                return HttpResponseRedirect(page_url(Message, sent))
        rendered, missing = _rendered(template, variables)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Preview and test"),
            "subtitle": str(template),
            "opts": self.model._meta,
            "original": template,
            "form": form,
            "rendered": rendered,
            "missing": missing,
            "data": json.dumps(rendered.data, ensure_ascii=False, indent=2) if rendered and rendered.data else "",
            "sample_text": sample_text,
            "is_html": template.channel == "email",
            "may_send": request.user.has_perm("messaging.add_message"),  # type: ignore[union-attr]
            "back": page_url(MessageTemplate, template.pk),
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        return TemplateResponse(request, "admin/messaging/preview.html", context)

    def _send_test(self, request: HttpRequest, template: MessageTemplate, variables: Any, recipient: str) -> Any:
        if not request.user.has_perm("messaging.add_message"):  # type: ignore[union-attr]
            raise PermissionDenied
        key = as_uuid(recipient) or next(iter(addressed(recipient, [template.application_id])), None)
        if key is None:
            messages.error(request, gettext("This application has no subscription of that address."))
            return None
        wanted = composing.MessageRequest(subscription_id=key, template_id=template.pk, variables=variables)
        application = Application.objects.filter(pk=template.application_id)
        try:
            (outcome,) = composing.create_messages([wanted], application, now=timezone.now())
            operating.raise_refusal(outcome)
        except DomainError as refusal:
            messages.error(request, refusal.detail)
            return None
        record_human_action(request.user, template, gettext("test send"), details={"message": str(outcome.message_id)})
        messages.success(request, gettext("The test message is in the queue."))
        return outcome.message_id

    def timeline_entries(self, obj: MessageTemplate) -> Iterator[Entry]:
        """Each version as what it changed in the one before."""
        rows = list(MessageTemplateVersion.objects.filter(template=obj).order_by("-version")[: SHOWN + 1])
        for new, old in zip(rows, [*rows[1:], None], strict=True):
            title = gettext("Version %(no)s") % {"no": new.version}
            yield Entry(new.created_at, "difference", title, diff(old, new), "info")


def _rendered(template: MessageTemplate, variables: dict[str, Any]) -> tuple[Any, str]:
    try:
        return templates.render(template, variables), ""
    except DomainError as error:
        return None, error.detail


def lines_of(version: MessageTemplateVersion | None) -> list[str]:
    if version is None:
        return []
    lines = []
    for name in COMPARED:
        value = getattr(version, name)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1) if value else ""
        lines += [f"{name}: {line}" for line in text.splitlines()]
    return lines


def diff(old: MessageTemplateVersion | None, new: MessageTemplateVersion) -> SafeString:
    changed = [
        line
        for line in difflib.unified_diff(lines_of(old), lines_of(new), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not changed:
        return format_html("{}", gettext("no change of the text"))
    tones = {"+": "sb-added", "-": "sb-gone"}
    shown = format_html_join("", '<b class="{}">{}</b>', ((tones.get(line[0], ""), line) for line in changed))
    return format_html('<span class="sb-diff sb-code">{}</span>', shown)
