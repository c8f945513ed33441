"""States as coloured badges, and the check that none lacks a colour."""

from collections.abc import Callable, Mapping
from typing import Any

from django.contrib import admin
from django.core.checks import CheckMessage, Error, register
from django.db import models
from django.utils.html import format_html
from django.utils.safestring import SafeString

from config.console.liveness import owner, state_fields

# The classes are unfold's own (its stylesheet is compiled and holds no others).
SHAPE = "inline-block font-semibold rounded-default text-[11px] uppercase whitespace-nowrap h-6 leading-6 px-2"
TONES = {
    "": "bg-base-500/8 text-base-700 dark:bg-base-500/20 dark:text-base-200",
    "info": "bg-blue-100 text-blue-700 dark:bg-blue-500/20 dark:text-blue-400",
    "success": "bg-green-100 text-green-700 dark:bg-green-500/20 dark:text-green-400",
    "warning": "bg-orange-100 text-orange-700 dark:bg-orange-500/20 dark:text-orange-400",
    "danger": "bg-red-100 text-red-700 dark:bg-red-500/20 dark:text-red-400",
    "primary": "bg-primary-100 text-primary-700 dark:bg-primary-500/20 dark:text-primary-400",
}


def pill(text: Any, tone: str = "", tooltip: str = "") -> SafeString:
    return format_html('<span class="{} {}" title="{}">{}</span>', SHAPE, TONES[tone], tooltip, text)


def badge(
    field: str = "status",
    colours: Mapping[str, str] | None = None,
    labels: Mapping[str, Any] | None = None,
    tooltip: Callable[[Any], str] | None = None,
    description: Any = None,
) -> Callable[[Any, Any], SafeString | str]:
    """A column for list_display: `state = badge("status")`. Colours come from the ModelAdmin's `state_colours`.

    The tooltip says why and until when: `tooltip(obj)`, else the ModelAdmin's `why(obj)`, else the state's owner.
    """

    def show(self: Any, obj: models.Model) -> SafeString | str:
        state = getattr(obj, field)
        if state in (None, ""):
            return "–"
        named = getattr(obj, f"get_{field}_display", lambda: state)()
        tones = colours if colours is not None else getattr(self, "state_colours", {})
        return pill((labels or {}).get(state, named), tones.get(state, ""), _why(self, obj, field, tooltip))

    show.admin_order_field = field  # type: ignore[attr-defined]
    show.short_description = description or field.replace("_", " ")  # type: ignore[attr-defined]
    return show


def _why(model_admin: Any, obj: models.Model, field: str, tooltip: Callable[[Any], str] | None) -> str:
    if tooltip is not None:
        return str(tooltip(obj))
    if hasattr(model_admin, "why"):
        return str(model_admin.why(obj) or "")
    found = owner(obj, field) if field in state_fields(type(obj)) else None
    return " · ".join(part for part in (found.title, found.body) if part) if found else ""


@register()
def check_state_colours(**_kwargs: Any) -> list[CheckMessage]:
    """Every state of a registered FSM model has a colour, so a new state cannot appear grey by oversight."""
    return [error for model_admin in admin.site._registry.values() for error in colour_errors(model_admin)]


def colour_errors(model_admin: Any) -> list[CheckMessage]:
    from config.statemachine import graph

    model, colours = model_admin.model, getattr(model_admin, "state_colours", {})
    states = [state for name in state_fields(model) for state in graph(model, name).states]
    missing = [state for state in states if state not in colours]
    unknown = sorted({tone for tone in colours.values() if tone not in TONES})
    name = type(model_admin).__name__
    errors: list[CheckMessage] = []
    if missing:
        errors.append(Error(f"{name}.state_colours: no colour for {', '.join(missing)}", obj=model, id="config.E010"))
    if unknown:
        errors.append(Error(f"{name}.state_colours: no such tone: {', '.join(unknown)}", obj=model, id="config.E011"))
    return errors
