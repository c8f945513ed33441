"""A table of leads, pasted or as a file, and the sequence they go into."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminFileFieldWidget, UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget

from campaigns.models import Lead, Sequence
from campaigns.services import importing
from config.console import counts_text, list_url, record_human_action
from config.errors import DomainError
from config.rest.access import is_uuid
from messaging.models import Application

BYTES = 5 * 2**20
SHOWN = 100
IMPORT = ("campaigns.add_lead", "campaigns.change_sequence")


class ImportForm(forms.Form):
    application = forms.ModelChoiceField(
        Application.objects.order_by("slug"), label=_("Application"), widget=UnfoldAdminSelectWidget()
    )
    file = forms.FileField(
        label=_("File"), required=False, widget=UnfoldAdminFileFieldWidget(), help_text=_("CSV, UTF-8 or CP949, 5 MB")
    )
    text = forms.CharField(
        label=_("or text"),
        required=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 8, "placeholder": "name,email,phone,company_domain,time_zone"}),
        help_text=_("The first line names the columns. Columns nobody knows become attributes, for {{name}} places."),
    )
    sequence = forms.ModelChoiceField(
        Sequence.objects.filter(status__in=Sequence.ENROLLABLE).order_by("name"),
        label=_("Enroll in"),
        required=False,
        widget=UnfoldAdminSelectWidget(),
    )

    def clean(self) -> dict[str, Any]:
        found: dict[str, Any] = super().clean() or self.cleaned_data
        upload, sequence = found.get("file"), found.get("sequence")
        if bool(upload) == bool(found.get("text", "").strip()):
            self.add_error("text", _("Give a file or a text."))
        elif upload and upload.size > BYTES:
            self.add_error("file", _("The file is larger than 5 MB: split it."))
        elif upload:
            try:
                found["text"] = importing.decoded(upload.read())
            except DomainError as refusal:
                self.add_error("file", refusal.detail)
        if sequence and found.get("application") and sequence.application_id != found["application"].pk:
            self.add_error("sequence", _("The sequence belongs to another application."))
        return found


def import_view(request: HttpRequest) -> HttpResponse:
    if not request.user.has_perms(IMPORT):  # type: ignore[union-attr]
        raise PermissionDenied
    asked = request.GET.get("sequence", "")
    first = Sequence.objects.filter(pk=asked).first() if is_uuid(asked) else None
    initial = {"sequence": first, "application": first and first.application_id}
    form = ImportForm(request.POST or None, request.FILES or None, initial=initial)
    done = None
    if request.method == "POST" and form.is_valid():
        said = form.cleaned_data
        try:
            done = importing.import_leads(said["application"], said["text"], timezone.now(), sequence=said["sequence"])
        except DomainError as refusal:
            form.add_error(refusal.attr if refusal.attr in form.fields else None, refusal.detail)
        else:
            record_human_action(request.user, said["sequence"] or Lead, "import leads", details=dict(done.counts))
    context = {
        **admin.site.each_context(request),
        "title": _("Import leads"),
        "opts": Lead._meta,
        "form": form,
        "done": done,
        "counts": counts_text(+done.counts) if done else "",
        "problems": done.problems[:SHOWN] if done else [],
        "back": list_url(Lead),
    }
    request.current_app = admin.site.name  # type: ignore[attr-defined]
    return TemplateResponse(request, "campaigns/import.html", context)
