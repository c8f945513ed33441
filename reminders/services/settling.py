"""Deliveries nobody will come back to: the alarm has moved on or is gone."""

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from config.decisions import decide, record
from messaging.models import Message
from reminders.models import Alarm, AlarmDelivery, DeletedAlarm

State = AlarmDelivery.State
SUPERSEDED = "superseded"


def supersede(alarms: Iterable[Alarm], now: datetime) -> None:
    """End the deliveries of the occurrences the alarms are about to leave, unless somebody may be sending right now."""
    alive = now - settings.ALARM_CLAIM_KEPT
    left = {row.pk: row.occurrence for row in alarms if not (row.processed_at and row.processed_at >= alive)}
    open_ = AlarmDelivery.objects.filter(alarm_id__in=left).exclude(state=State.SENT)
    rows = open_.values_list("pk", "alarm_id", "occurrence")
    settle_deliveries([pk for pk, alarm_id, occurrence in rows if left[alarm_id] == occurrence], now)


@transaction.atomic
def settle_deliveries(ids: Iterable[UUID], now: datetime, run_id: UUID | None = None) -> int:
    """What messaging holds was sent, whoever failed to write it down; the rest is given up."""
    open_ = AlarmDelivery.objects.filter(pk__in=ids).exclude(state=State.SENT)
    rows = list(open_.select_for_update(skip_locked=True).order_by("pk"))
    if not rows:
        return 0
    before = {row.pk: row.state for row in rows}
    messages = _messages_of(rows)
    # The graph leads from unknown and failed only through a new claim.
    open_.filter(pk__in=before).exclude(state=State.CLAIMED).update(state=State.CLAIMED)
    for row in rows:
        if row.state != State.CLAIMED:
            row.claim()
        row.message_id = messages.get(row.idempotency_key)
        row.send() if row.message_id else row.fail()
        row.reason, row.ended_at = "" if row.message_id else SUPERSEDED, now
    AlarmDelivery.objects.bulk_update(rows, ["state", "message_id", "reason", "ended_at"])
    record(
        decide(
            "settle_abandoned_delivery",
            row,
            before={"state": before[row.pk]},
            after={"state": row.state, "reason": row.reason},
            inputs={"claimed_at": row.claimed_at.isoformat()},
            run_id=run_id,
        )
        for row in rows
    )
    return len(rows)


def _messages_of(rows: list[AlarmDelivery]) -> dict[str, UUID]:
    applications = {row.application_id for row in rows if row.application_id}
    # Opened by hand, a delivery lacks it; the alarm, or what is left of it, knows whose it is.
    if strays := [row.alarm_id for row in rows if row.application_id is None]:
        for model in (Alarm, DeletedAlarm):
            applications |= set(model._default_manager.filter(pk__in=strays).values_list("application_id", flat=True))
    return messages_under([row.idempotency_key for row in rows], applications)


def messages_under(keys: Iterable[str], applications: Iterable[UUID]) -> dict[str, UUID]:
    found = Message.objects.filter(application_id__in=applications, idempotency_key__in=keys)
    return {str(key): pk for key, pk in found.values_list("idempotency_key", "pk")}
