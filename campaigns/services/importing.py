"""Leads from a table, as spreadsheets write them: once each, and into a sequence where one is named."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from campaigns.models import Lead
from campaigns.models import Sequence as SequenceRow
from campaigns.services.enrolling import enroll_leads
from campaigns.services.leads import create_leads
from config.errors import Invalid
from messaging.models import Application
from messaging.services.content import address_problem
from messaging.services.subscriptions import time_zones

MOST = 10_000
BATCH = 1000
TEXT = 1000
COLUMNS = {
    "name": "name", "이름": "name", "email": "email", "e-mail": "email", "이메일": "email", "phone": "phone",
    "전화": "phone", "전화번호": "phone", "휴대폰": "phone", "company_domain": "company_domain",
    "domain": "company_domain",
    "time_zone": "time_zone", "timezone": "time_zone", "시간대": "time_zone", "locale": "locale", "language": "locale",
}  # fmt: skip


@dataclass
class Imported:
    counts: Counter[str] = field(default_factory=Counter)  # created, exists, invalid, and how enrolling went
    problems: list[tuple[int, str]] = field(default_factory=list)  # line and what is wrong with it


def decoded(content: bytes) -> str:
    """UTF-8, or what Korean spreadsheets save by default."""
    for encoding in ("utf-8-sig", "cp949"):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise Invalid(_("The file is neither UTF-8 nor CP949 text."), attr="file")


def read_table(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, fields) of each row; columns nobody knows become attributes."""
    if "\0" in text:
        raise Invalid(_("The text holds a NUL character."), attr="text")
    lines = text.strip("\ufeff\r\n ").splitlines()
    mark = max(",;\t", key=lines[0].count) if lines else ","
    rows = csv.reader(lines, delimiter=mark)
    names = [name.strip() for name in next(rows, [])]
    known = [COLUMNS.get(name.lower()) for name in names]
    if "email" not in known and "phone" not in known:
        raise Invalid(_("The first line names the columns, and one of them is email or phone."), attr="text")
    for values in rows:
        if not any(value.strip() for value in values):
            continue
        fields: dict[str, Any] = {"attributes": {}}
        for name, column, value in zip(names, known, values, strict=False):
            if column:
                fields[column] = value.strip()
            elif name and value.strip():
                fields["attributes"][name] = value.strip()
        yield rows.line_num, fields


def problem(fields: Mapping[str, Any]) -> str | None:
    """Why the row cannot be a lead."""
    email, phone = fields.get("email"), fields.get("phone")
    if not email and not phone:
        return _("A lead has an e-mail address or a phone number.")
    for channel, address in (("email", email), ("sms", phone)):
        if address and (wrong := address_problem(channel, address)):
            return f"{address}: {wrong}"
    if fields.get("time_zone") and fields["time_zone"] not in time_zones():
        return _("Expected an IANA time zone such as Asia/Seoul.")
    for name, limit in (("name", 200), ("company_domain", 253), ("locale", 20)):
        if len(fields.get(name) or "") > limit:
            return _("%(column)s is longer than %(limit)s characters.") % {"column": name, "limit": limit}
    return None


def clean(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Addresses left out are null, a number is written without its spaces and dashes."""
    kept = {name: value for name, value in fields.items() if value}
    if phone := kept.get("phone"):
        kept["phone"] = phone.translate(str.maketrans("", "", " -.()"))
    return kept


def import_leads(
    application: Application, text: str, now: datetime, *, sequence: SequenceRow | None = None
) -> Imported:
    """Batch by batch, each its own transaction: run again after a failure, it goes on where it stopped."""
    done, good = Imported(), []
    for count, (line, fields) in enumerate(read_table(text), 1):
        if count > MOST:
            raise Invalid(_("More than %(most)s rows: split the table.") % {"most": f"{MOST:,}"}, attr="text")
        row = clean(fields)
        if wrong := problem(row):
            done.problems.append((line, wrong))
        else:
            good.append(row)
    done.counts["invalid"] = len(done.problems)
    for start in range(0, len(good), BATCH):
        _take(application, good[start : start + BATCH], now, sequence, done.counts)
    return done


@transaction.atomic
def _take(
    application: Application,
    rows: Sequence[dict[str, Any]],
    now: datetime,
    sequence: SequenceRow | None,
    counts: Counter[str],
) -> None:
    known = _by_phone(application, rows)
    here = [known[row["phone"]] for row in rows if not row.get("email") and row["phone"] in known]
    fresh = [row for row in rows if row.get("email") or row["phone"] not in known]
    made = create_leads(application, fresh, now)
    keys = dict.fromkeys([*here, *(lead.pk for lead, _new in made)])
    counts["created"] += sum(new for _lead, new in made)
    counts["exists"] += len(rows) - sum(new for _lead, new in made)
    if sequence is not None:
        counts.update(result.status for result in enroll_leads(sequence.pk, list(keys), now))


def _by_phone(application: Application, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Leads without an e-mail address are told apart by their number."""
    numbers = [row["phone"] for row in rows if not row.get("email")]
    found = Lead.objects.filter(application=application, phone__in=numbers, email=None)
    return {phone: pk for phone, pk in found.values_list("phone", "pk") if phone}
