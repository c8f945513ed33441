"""What the pages of messaging share."""

import json
from collections.abc import Iterable
from typing import Any

from django.db import models
from django.http import HttpRequest
from django.template.defaultfilters import date as date_filter
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from config.console import ConsoleAdmin


class MessagingAdmin(ConsoleAdmin):
    """Adds buttons above a row's page: the list's own actions, where they apply, and links."""

    change_form_outer_before_template = "admin/messaging/act.html"

    class Media:
        css = {"all": ["messaging/messaging.css"]}

    def acts_for(self, obj: Any) -> Iterable[str]:
        """Names of the actions that make sense for this row as it is."""
        return ()

    def links_for(self, request: HttpRequest, obj: Any) -> list[dict[str, Any]]:
        return []

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        obj = kwargs.get("obj")
        if obj is not None and obj.pk is not None and not kwargs.get("add"):
            allowed = self.get_actions(request)
            wanted = [name for name in self.acts_for(obj) if name in allowed]
            context["acts"] = [{"name": name, "title": allowed[name][2]} for name in wanted]
            context["acts_url"] = list_url(self.model)
            context["links"] = self.links_for(request, obj)
        return super().render_change_form(request, context, *args, **kwargs)


class ReadOnlyAdmin(MessagingAdmin):
    """Rows that services alone write; people act on them by the actions."""

    read_only = True


def moment(field: str, description: Any) -> Any:
    """A column for a time, short and in one line."""

    def show(self: Any, obj: Any) -> SafeString | str:
        at = getattr(obj, field)
        shown = date_filter(timezone.localtime(at), "Y-m-d H:i:s") if at else "–"
        return format_html('<span class="whitespace-nowrap">{}</span>', shown)

    show.short_description = description  # type: ignore[attr-defined]
    return show


def list_url(model: type[models.Model]) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


def page_url(model: type[models.Model], key: Any) -> str:
    try:
        return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[key])
    except NoReverseMatch:
        return ""


def linked(model: type[models.Model], key: Any, text: Any) -> SafeString | str:
    return format_html('<a class="sb-link" href="{}">{}</a>', page_url(model, key), text) if key else "–"


def code_block(value: Any) -> SafeString:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    return format_html('<pre class="sb-code">{}</pre>', text) if text not in ("", "{}", "[]") else format_html("–")


def folded(text: Any) -> SafeString:
    return format_html(
        '<details class="sb-fold"><summary>{}</summary><pre class="sb-code">{}</pre></details>', _("raw answer"), text
    )
