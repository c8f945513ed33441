"""Who is responsible for a row in its present state: a sweep and until when, or a person."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import models
from django.template.defaultfilters import date as date_filter
from django.utils import timezone
from django.utils.translation import gettext as _


@dataclass(frozen=True)
class Owner:
    kind: str  # sweep | person | nobody
    state: str
    title: str
    body: str
    tone: str


def owner(obj: models.Model, field_name: str | None = None) -> Owner | None:
    """None for a model without a state machine."""
    from config.statemachine import Rests, Swept, WaitsFor, graph

    field_name = field_name or next(iter(state_fields(type(obj))), None)
    if field_name is None:
        return None
    state, found = str(getattr(obj, field_name)), graph(type(obj), field_name)
    label = _label(obj, field_name)
    if state in found.terminal:
        return Owner("nobody", label, _("Finished"), _("This state is final; nothing is due."), "")
    said = getattr(type(obj), "liveness", {}).get(state)
    if isinstance(said, Swept) and said.instead:
        said = said.instead(obj) or said
    if isinstance(said, Rests):
        return Owner("nobody", label, _("Nothing is due"), str(said.why), "")
    if isinstance(said, WaitsFor):
        return Owner("person", label, _("Waits for %(whom)s") % {"whom": said.whom}, "", "warning")
    if isinstance(said, Swept):
        body = _("Resolved by the sweep %(sweep)s: %(deadline)s") % {"sweep": said.sweep, "deadline": said.deadline}
        return Owner("sweep", label, _("Looked after by a sweep"), body + _since(obj, said.since), "info")
    return Owner("nobody", label, _("Nobody is responsible"), _("This state has no owner: a defect."), "danger")


def state_fields(model: type[models.Model]) -> list[str]:
    from django_fsm import FSMFieldMixin

    return [field.name for field in model._meta.concrete_fields if isinstance(field, FSMFieldMixin)]


def _label(obj: Any, field_name: str) -> str:
    display = getattr(obj, f"get_{field_name}_display", None)
    return str(display() if display else getattr(obj, field_name))


def _since(obj: models.Model, name: str) -> str:
    at = getattr(obj, name, None)
    if not isinstance(at, datetime):
        return ""
    shown = date_filter(timezone.localtime(at), "Y-m-d H:i:s")
    text = _(" (due %(at)s)") if at > timezone.now() else _(" (counted from %(at)s)")
    return text % {"at": shown}
