"""What the pages of messaging share."""

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from config.console import ConsoleAdmin, StorableJSON


class ObjectField(StorableJSON):
    """JSON that is an object; a field left empty is an empty one."""

    def clean(self, value: Any) -> dict[str, Any]:
        found = super().clean(value)
        if found is not None and not isinstance(found, dict):
            raise ValidationError(_("Expected an object."))
        return found or {}


class MessagingAdmin(ConsoleAdmin):
    class Media:
        css = {"all": ["messaging/messaging.css"]}

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        if isinstance(db_field, models.JSONField):
            kwargs.setdefault("form_class", ObjectField)
        return super().formfield_for_dbfield(db_field, request, **kwargs)


class ReadOnlyAdmin(MessagingAdmin):
    """Rows that services alone write; people act on them by the actions."""

    read_only = True


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
