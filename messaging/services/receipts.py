"""What the device, the recipient or the provider reports about a message that was accepted."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext as _

from config.errors import Conflict, Invalid, Unavailable
from messaging.models import HoldReason, Message
from messaging.providers import Answer
from messaging.services.resolving import settle

Status = Message.Status
AHEAD = timedelta(minutes=5)
# A receipt can outrun the answer of the provider it is about.
COME_BACK = 5


@transaction.atomic
def record_receipt(pk: UUID, *, now: datetime, occurred_at: datetime | None = None) -> Message:
    """Delivered. The first report counts; again, or after the conversion, it changes nothing."""
    row = _reportable(pk, now)
    at = _moment(row, occurred_at, now)
    if row.status == Status.SUCCESSFUL:
        row.receive(at)
        row.save(update_fields=["status", "received_at", "receipt_implied"])
    return row


@transaction.atomic
def record_conversion(
    pk: UUID,
    *,
    now: datetime,
    action: str = "",
    data: Mapping[str, Any] | None = None,
    occurred_at: datetime | None = None,
) -> Message:
    """Opened, clicked, answered. Without a receipt before it the receipt is implied, at the same moment."""
    row = _reportable(pk, now)
    at = _moment(row, occurred_at, now)
    if row.status == Status.CONVERTED:
        return row
    if row.status == Status.SUCCESSFUL:
        row.receive(at, implied=True)
        row.save(update_fields=["status", "received_at", "receipt_implied"])
    if row.expired_at is not None or (row.received_at and row.received_at <= now - settings.CONVERSION_WINDOW):
        raise Conflict(_("The message has expired."), code="expired")
    # A device's clock: nothing is opened before it arrived.
    row.convert(max(at, row.received_at) if row.received_at else at)
    row.conversion = {**({"action": action} if action else {}), **({"data": dict(data)} if data else {})}
    row.save(update_fields=["status", "converted_at", "conversion"])
    return row


def _reportable(pk: UUID, now: datetime) -> Message:
    row = Message.objects.select_for_update(of=("self",)).get(pk=pk)
    if row.hold_reason == HoldReason.OUTCOME_UNKNOWN:
        # Who reports it has it: nobody need ask the provider any more.
        settle(row, Answer("accepted", code="receipt"), now=now)
    if row.status in (Status.PENDING, Status.ERRORED):
        raise Unavailable(_("The message is not sent yet. Try again."), code="not_sent_yet", retry_after=COME_BACK)
    if row.status == Status.FAILED:
        detail = _("The message has failed: %(reason)s.") % {"reason": row.error_reason}
        raise Conflict(detail, code="already_failed")
    return row


def _moment(row: Message, occurred_at: datetime | None, now: datetime) -> datetime:
    if occurred_at is None:
        return now
    if occurred_at > now + AHEAD:
        raise Invalid(_("This is more than 5 minutes ahead."), attr="occurred_at")
    return max(occurred_at, row.sent_at) if row.sent_at else occurred_at
