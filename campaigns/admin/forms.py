"""The forms of sequences, steps, senders and leads; what they say is written by the services."""

import re
from typing import Any

from django import forms
from django.utils.text import capfirst
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from unfold.widgets import (
    UnfoldAdminCheckboxSelectMultipleWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminTextInputWidget,
)

from campaigns.models import Lead, Sender, Sequence, Step
from campaigns.models.senders import EVERY_DAY
from config.console import RefusableForm
from messaging.services.content import address_problem
from messaging.services.subscriptions import time_zones

MOST = 2**31 - 1
UNITS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
READ = {**UNITS, "m": 60}
PART = re.compile(r"(\d{1,9})\s*(d|h|min|m|s)\b", re.IGNORECASE)
WEEKDAYS = (_("Mon"), _("Tue"), _("Wed"), _("Thu"), _("Fri"), _("Sat"), _("Sun"))


def number(label: Any, low: int = 0, high: int = MOST, **kwargs: Any) -> forms.IntegerField:
    widget = UnfoldAdminIntegerFieldWidget()
    return forms.IntegerField(label=capfirst(label), min_value=low, max_value=high, widget=widget, **kwargs)


def delay_text(seconds: int) -> str:
    """90000 as '1 d 1 h'."""
    parts = []
    for unit, size in UNITS.items():
        count, seconds = divmod(seconds, size)
        parts += [f"{count} {unit}"] if count else []
    return " ".join(parts) or "0 min"


class DelayField(forms.CharField):
    """Seconds, written as people say them."""

    widget = UnfoldAdminTextInputWidget

    def prepare_value(self, value: Any) -> Any:
        return delay_text(value) if isinstance(value, int) else value

    def to_python(self, value: Any) -> Any:
        text = (super().to_python(value) or "").strip()
        if PART.sub("", text).strip() not in ("", "0"):
            raise forms.ValidationError(_now("Write it like 3 d, 4 h or 30 min."))
        found = sum(int(count) * READ[unit.lower()] for count, unit in PART.findall(text))
        if found > MOST:
            raise forms.ValidationError(_now("That is too long."))
        return found

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool(self.to_python(data) != (initial or 0))
        except forms.ValidationError:
            return True


class SequenceForm(RefusableForm):
    harvest_days = number(_("days in which replies are awaited"), 1, 90, initial=3)
    stale_after_multiplier = number(
        _("stale after this many times as long"),
        1,
        100,
        initial=3,
        help_text=_("Steps due longer ago than the days above times this are skipped, not sent."),
    )

    class Meta:
        model = Sequence
        fields = ["application", "name", "kind", "harvest_days", "stale_after_multiplier"]


class StepForm(forms.ModelForm):  # type: ignore[type-arg]
    position = number(_("position"), 1, required=False, help_text=_("Empty: at the end."))
    delay_seconds = DelayField(
        label=capfirst(_("delay")), initial=0, help_text=_("After the step before, such as 3 d, 4 h or 30 min.")
    )

    class Meta:
        model = Step
        fields = ["position", "channel", "delay_seconds", "stale_policy", "subject", "body"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "body" in self.fields:
            self.fields["body"].widget.attrs["rows"] = 5
            self.fields["subject"].help_text = _("{{name}} and the lead's other fields and attributes are filled in.")

    def _get_validation_exclusions(self) -> set[str]:
        """Two steps may name one position: the service puts them in order."""
        return {*super()._get_validation_exclusions(), "position"}  # type: ignore[misc]


class StepFormSet(forms.BaseInlineFormSet):  # type: ignore[type-arg]
    def validate_unique(self) -> None:
        """As above."""


class SenderForm(RefusableForm):
    daily_limit = number(_("daily limit"), required=False, help_text=_("Empty: no limit."))
    hourly_limit = number(_("hourly limit"), required=False, help_text=_("Empty: no limit."))
    min_gap_seconds = number(_("gap between messages (s)"), high=86400, initial=0)
    gap_jitter_seconds = number(_("random part of the gap (s)"), high=86400, initial=0)
    ramp_start = number(_("ramp-up: first day's limit"), required=False)
    ramp_step = number(_("ramp-up: more per day"), required=False)
    window_days = forms.TypedMultipleChoiceField(
        label=capfirst(_("days of the window")),
        coerce=int,
        choices=list(zip(EVERY_DAY, WEEKDAYS, strict=True)),
        initial=EVERY_DAY,
        widget=UnfoldAdminCheckboxSelectMultipleWidget(),
    )

    class Meta:
        model = Sender
        fields = [
            "application", "channel", "address", "display_name", "daily_limit", "hourly_limit", "min_gap_seconds",
            "gap_jitter_seconds", "window_days", "window_from", "window_to", "window_zone", "time_zone", "ramp_start",
            "ramp_step",
        ]  # fmt: skip

    def clean_time_zone(self) -> str:
        return known_zone(self.cleaned_data["time_zone"])

    def clean(self) -> dict[str, Any]:
        found = super().clean()
        opens, closes = found.get("window_from"), found.get("window_to")
        if (opens is None) != (closes is None):
            self.add_error(
                "window_from" if opens is None else "window_to", _now("A window has a beginning and an end.")
            )
        elif opens is not None and opens == closes:
            self.add_error("window_to", _now("The window cannot end when it begins."))
        return found


class LeadForm(RefusableForm):
    class Meta:
        model = Lead
        fields = ["application", "name", "email", "phone", "company_domain", "time_zone", "locale", "attributes"]

    def clean_email(self) -> str | None:
        return self._address("email")

    def clean_phone(self) -> str | None:
        return self._address("phone")

    def _address(self, name: str) -> str | None:
        value = (self.cleaned_data[name] or "").strip() or None
        if value and (problem := address_problem("email" if name == "email" else "sms", value)):
            raise forms.ValidationError(problem)
        return value

    def clean_time_zone(self) -> str:
        return known_zone(self.cleaned_data["time_zone"])

    def clean_attributes(self) -> dict[str, Any]:
        found = self.cleaned_data["attributes"] or {}
        if not isinstance(found, dict):
            raise forms.ValidationError(_now("Expected an object."))
        return found

    def clean(self) -> dict[str, Any]:
        found = super().clean()
        if not self.errors and not found.get("email") and not found.get("phone"):
            self.add_error("email", _now("A lead has an e-mail address or a phone number."))
        return found


def known_zone(value: str) -> str:
    if value not in time_zones():
        raise forms.ValidationError(_now("Expected an IANA time zone such as Asia/Seoul."))
    return value
