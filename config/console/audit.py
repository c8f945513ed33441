"""What people did, in django's own LogEntry, as JSON the timeline can read."""

import json
from collections.abc import Iterable
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models


def record_human_action(
    user: Any,
    obj_or_model: models.Model | type[models.Model],
    verb: str,
    reason: str = "",
    details: dict[str, Any] | None = None,
) -> LogEntry:
    """One row per act. With a model instead of an object the act concerned the table, not one row."""
    whole_table = isinstance(obj_or_model, type)
    return LogEntry.objects.create(
        user_id=user.pk,
        content_type=ContentType.objects.get_for_model(obj_or_model),
        object_id=None if whole_table else str(obj_or_model.pk),
        object_repr=str(obj_or_model._meta.verbose_name_plural if whole_table else obj_or_model)[:200],
        action_flag=CHANGE,
        change_message=message(verb, reason, details),
    )


def record_human_actions(user: Any, model: type[models.Model], keys: Iterable[Any], verb: str, reason: str) -> None:
    """The same act on many rows, in one statement and without reading them."""
    content_type, name = ContentType.objects.get_for_model(model), str(model._meta.verbose_name)
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=user.pk,
            content_type=content_type,
            object_id=str(key),
            object_repr=f"{name} {key}"[:200],
            action_flag=CHANGE,
            change_message=message(verb, reason, None),
        )
        for key in keys
    )


def message(verb: str, reason: str, details: dict[str, Any] | None) -> str:
    said = {"action": str(verb), "reason": reason, "details": details or {}}
    return json.dumps({key: value for key, value in said.items() if value}, cls=DjangoJSONEncoder, ensure_ascii=False)


def read(entry: LogEntry) -> tuple[str, str]:
    """(what, why) of a log entry, ours or the admin form's."""
    if entry.change_message.startswith("{"):
        said = json.loads(entry.change_message)
        details = ", ".join(f"{key}: {value}" for key, value in said.get("details", {}).items())
        return said.get("action", ""), " · ".join(part for part in (said.get("reason", ""), details) if part)
    return str(entry.get_action_flag_display()), entry.get_change_message()
