"""Templates and their rendering: {{name}} and nothing else, every value inserted once, never code."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from config.errors import Conflict, Invalid
from locks.services import check_write
from messaging.models import Application, Channel, MessageTemplate

PLACE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.]*)\s*\}\}")
TEXTS = ("title_template", "body_template", "data_template")


class MissingVariables(Invalid):
    code = "missing_variable"

    def __init__(self, names: list[str]) -> None:
        super().__init__(_("Missing: %(names)s") % {"names": ", ".join(names)}, attr="variables")
        self.extra = {"missing": names}


@dataclass(frozen=True)
class Rendered:
    title: str
    body: str
    data: dict[str, Any]


def strings(value: Any) -> Iterator[str]:
    """Every text inside, keys left out: they are not rendered."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from strings(child)


def names_in(*texts: Any) -> list[str]:
    return list(dict.fromkeys(name for text in texts for part in strings(text) for name in PLACE.findall(part)))


def check_places(attr: str, value: Any) -> None:
    """A {{ that is no {{name}} is a typing error now, not a surprise at sending."""
    if any(has_other_braces(text) for text in strings(value)):
        raise Invalid(_("Only {{name}} is allowed between double braces."), code="invalid_template", attr=attr)


def has_other_braces(text: str) -> bool:
    at = text.find("{{")
    while at >= 0:
        place = PLACE.match(text, at)
        if place is None:
            return True
        at = text.find("{{", place.end())
    return False


def render(template: MessageTemplate, variables: Mapping[str, Any]) -> Rendered:
    return render_texts(
        template.title_template,
        template.body_template,
        template.data_template,
        variables,
        html=template.channel == Channel.EMAIL,
    )


def render_texts(
    title: str, body: str, data: Mapping[str, Any], variables: Mapping[str, Any], *, html: bool = False
) -> Rendered:
    """All missing names are told at once. `html`: the body is HTML, so values are escaped there."""
    missing = [name for name in names_in(title, body, data) if lookup(variables, name) is None]
    if missing:
        raise MissingVariables(missing)
    return Rendered(
        _filled(title, variables, str),
        _filled(body, variables, escape if html else str),
        _filled_deep(dict(data), variables),
    )


def lookup(variables: Mapping[str, Any], name: str) -> str | None:
    """By the whole name first, then along its dots."""
    value: Any = variables.get(name)
    if value is None and "." in name:
        value = variables
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else as_text(value)


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _filled(text: str, variables: Mapping[str, Any], shape: Callable[[str], str]) -> str:
    # One pass: a value with braces of its own stays text.
    return PLACE.sub(lambda match: shape(lookup(variables, match[1]) or ""), text)


def _filled_deep(value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return _filled(value, variables, str)
    if isinstance(value, Mapping):
        return {key: _filled_deep(child, variables) for key, child in value.items()}
    if isinstance(value, list):
        return [_filled_deep(child, variables) for child in value]
    return value


def parameters(template: MessageTemplate, variables: Mapping[str, Any]) -> dict[str, str]:
    """What Kakao fills its own copy of the template with."""
    names = names_in(template.title_template, template.body_template, template.data_template)
    return {name: lookup(variables, name) or "" for name in names}


def usable_template(pk: UUID, application_id: UUID, channel: str) -> MessageTemplate:
    """The template for a message of this application and channel; what is foreign or gone does not exist."""
    template = MessageTemplate.objects.existing().filter(pk=pk, application_id=application_id).first()
    if template is None:
        raise Invalid(_("There is no such template."), code="does_not_exist", attr="template_id")
    check_usable(template, channel)
    return template


def check_usable(template: MessageTemplate, channel: str) -> None:
    if not template.active:
        raise Invalid(_("The template is not active."), code="template_inactive", attr="template_id")
    if template.channel != channel:
        raise Invalid(_("The template is for another channel."), code="wrong_channel", attr="template_id")
    if channel == Channel.KAKAO_TALK and not template.provider_code:
        raise Invalid(_("The template has no provider code."), code="no_provider_code", attr="template_id")
    if channel == Channel.KAKAO_TALK and template.approval != MessageTemplate.Approval.APPROVED:
        raise Invalid(_("The template is not approved."), code="template_not_approved", attr="template_id")


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hold:
    """The lock a writer says it holds."""

    actor: Any = None
    lock_id: Any = None
    fence: int | None = None


def create_template(application: Application, fields: Mapping[str, Any], *, now: datetime) -> MessageTemplate:
    row = MessageTemplate(application=application, created_at=now, **fields)
    _check(row)
    _save(row, force_insert=True)
    return row


@transaction.atomic
def change_template(pk: UUID, changes: Mapping[str, Any], *, hold: Hold) -> MessageTemplate:
    """Each edit is a version of its own; the old one stays."""
    row = _gated(pk, hold)
    for name, value in changes.items():
        setattr(row, name, value)
    row.version += 1
    _check(row)
    _save(row, update_fields=[*changes, "version", "updated_at"])
    return row


@transaction.atomic
def delete_template(pk: UUID, *, hold: Hold, now: datetime) -> None:
    row = _gated(pk, hold)
    row.deleted_at = now
    row.save(update_fields=["deleted_at", "updated_at"])


def pass_gate(pk: UUID, hold: Hold) -> None:
    check_write("main", "template", str(pk), lock_id=hold.lock_id, fence=hold.fence, actor=hold.actor)


def _gated(pk: UUID, hold: Hold) -> MessageTemplate:
    pass_gate(pk, hold)
    return MessageTemplate.objects.existing().select_for_update().get(pk=pk)


def _check(row: MessageTemplate) -> None:
    for name in TEXTS:
        check_places(name, getattr(row, name))
    if row.channel == Channel.EMAIL and ("\r" in row.title_template or "\n" in row.title_template):
        raise Invalid(_("A subject has one line."), attr="title_template")
    if not (row.title_template.strip() or row.body_template.strip()):
        raise Invalid(_("A template needs a title or a body."), code="required", attr="body_template")


def _save(row: MessageTemplate, **how: Any) -> None:
    try:
        with transaction.atomic():
            row.save(**how)
    except IntegrityError:
        raise Conflict(_("A template of this name is there already."), code="name_taken", attr="name") from None
