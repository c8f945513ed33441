"""Deliveries nobody will come back to: the alarm has moved on or is gone."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from config.decisions import decide, record
from messaging.models import Message
from reminders.models import Alarm, AlarmDelivery

State = AlarmDelivery.State


def supersede(alarm: Alarm, now: datetime) -> None:
    """End the delivery of the occurrence the alarm is about to leave, unless somebody may be sending it right now."""
    if alarm.processed_at and alarm.processed_at >= now - settings.ALARM_CLAIM_KEPT:
        return
    current = AlarmDelivery.objects.filter(alarm_id=alarm.pk, occurrence=alarm.occurrence)
    settle_deliveries(current.exclude(state=State.SENT).values_list("pk", flat=True), now)


@transaction.atomic
def settle_deliveries(ids: Sequence[UUID] | object, now: datetime, run_id: UUID | None = None) -> dict[str, int]:
    """What messaging holds was sent, whoever failed to write it down; the rest is given up."""
    found = AlarmDelivery.objects.filter(pk__in=ids).exclude(state=State.SENT).select_for_update(skip_locked=True)
    rows = {delivery.idempotency_key: delivery for delivery in found}
    messages = dict(Message.objects.filter(idempotency_key__in=rows).values_list("idempotency_key", "pk"))
    # The graph knows no way from failed or unknown but through a claim.
    AlarmDelivery.objects.filter(pk__in=[row.pk for row in rows.values()]).exclude(state=State.CLAIMED).update(
        state=State.CLAIMED
    )
    return {}
