"""Step templates: `{{name}}` places filled from the lead, once, never as code."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from django.utils.translation import gettext as _

from campaigns.models import Lead, Step
from config.errors import Invalid

PLACE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.]*)\s*\}\}")
OWN = ("name", "email", "phone", "company_domain", "locale", "time_zone")


def check_template(text: str, attr: str) -> None:
    """What looks like a place and is none would be sent to people as it stands."""
    if "{{" in PLACE.sub("", text):
        raise Invalid(_("Places are written {{name}}: letters, digits, _ and dots."), code="invalid", attr=attr)


def places(step: Step) -> set[str]:
    return set(PLACE.findall(f"{step.subject}\n{step.body}"))


def value(lead: Lead, name: str) -> str | None:
    """A field of the lead, else an attribute; dots lead into nested attributes. Empty is missing."""
    found: Any = getattr(lead, name) if name in OWN else lead.attributes
    if name not in OWN:
        for part in name.removeprefix("attributes.").split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    return str(found) if isinstance(found, str | int | float) and str(found) != "" else None


def missing(step: Step, lead: Lead) -> list[str]:
    """Why the step cannot be written to this lead: its address, or variables."""
    without = sorted(name for name in places(step) if value(lead, name) is None)
    return without if lead.address(step.channel) else ["address", *without]


def rendered(step: Step, lead: Lead) -> tuple[str, str]:
    """(subject, body); an e-mail's body is HTML, so what comes from the lead is escaped there."""

    def fill(text: str, html: bool) -> str:
        return PLACE.sub(
            lambda place: escape(value(lead, place[1]) or "") if html else value(lead, place[1]) or "", text
        )

    subject = " ".join(fill(step.subject, False).splitlines())
    return subject, fill(step.body, step.channel == "email")


def parameters(step: Step, lead: Lead) -> dict[str, str]:
    return {name: value(lead, name) or "" for name in places(step)}
