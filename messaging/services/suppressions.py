from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils.translation import gettext as _

from config.errors import Conflict, Invalid
from messaging.models import Application, Suppression, addresses
from messaging.services import content

Entry = tuple[str, str, str, Any]


def suppress(application: Application | UUID, entries: Sequence[Entry], *, now: datetime) -> int:
    """(channel_type, address, reason, evidence) each; one suppressed already stays as it is. How many are new."""
    rows = [_row(getattr(application, "pk", application), entry, now) for entry in entries]
    # By hash, so two at once wait for each other instead of in a circle.
    rows.sort(key=lambda row: (row.channel_type, row.address_hash))
    before = {row.pk for row in rows}
    Suppression.objects.bulk_create(rows, ignore_conflicts=True)
    return Suppression.objects.filter(pk__in=before).count()


def _row(application_id: Any, entry: Entry, now: datetime) -> Suppression:
    channel, address, reason, evidence = entry
    return Suppression(
        application_id=application_id,
        channel_type=channel,
        address_encrypted=addresses.encrypt(addresses.normal(channel, address)),
        address_hash=addresses.address_hash(channel, address),
        address_hint=addresses.hint(channel, address.strip()),
        reason=reason,
        evidence=evidence,
        created_at=now,
    )


def add_suppression(
    application: Application, channel: str, address: str, reason: str, evidence: Any, *, now: datetime
) -> tuple[Suppression, bool]:
    """The active suppression of the address, and whether it is new."""
    if problem := content.address_problem(channel, address):
        raise Invalid(problem, attr="address")
    created = suppress(application, [(channel, address, reason, evidence)], now=now)
    return Suppression.objects.active().of(channel, address).get(application=application), bool(created)


@transaction.atomic
def lift_suppression(pk: UUID, *, note: str, by: str, now: datetime) -> Suppression:
    row = Suppression.objects.select_for_update().get(pk=pk)
    if row.lifted_at is not None:
        raise Conflict(_("This suppression was lifted already."), code="already_lifted")
    row.lifted_at, row.lifted_by, row.lift_note = now, by, note
    row.save(update_fields=["lifted_at", "lifted_by", "lift_note"])
    return row
