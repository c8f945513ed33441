"""Senders: whoever is switched off or deleted leaves its enrollments to somebody, or tells who is affected."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Count, Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution, Sender, Sequence
from campaigns.services.completion import settle, skip_stale_of
from campaigns.services.rows import Ledger, lock_sequences
from config.errors import Conflict, Invalid, Missing
from config.sweeping import nudge
from messaging.models import Application
from messaging.services.content import address_problem

SAMPLE = 20


def create_sender(application: Application, fields: Mapping[str, Any]) -> Sender:
    check_address(str(fields["channel"]), str(fields["address"]))
    return Sender.objects.create(application=application, **fields)


def check_address(channel: str, address: str) -> None:
    """A KakaoTalk sender is a channel's profile, not a number."""
    problem = None if channel == "kakao_talk" else address_problem(channel, address)
    if problem:
        raise Invalid(problem, attr="address")


def locked_sender(sender_id: UUID, successor_id: UUID | None = None) -> Sender:
    """With its successor, in id order: two senders cannot leave their leads to each other and both be gone."""
    rows = Sender.objects.select_for_update(no_key=True).filter(pk__in={sender_id, successor_id or sender_id})
    for row in rows.order_by("pk"):
        if str(row.pk) == str(sender_id):
            return row
    raise Missing(_("There is no such sender."))


def existing(row: Sender) -> Sender:
    if row.deleted_at is not None:
        raise Conflict(_("The sender is deleted."), code="deleted")
    return row


@transaction.atomic
def change_sender(sender_id: UUID, changes: Mapping[str, Any]) -> Sender:
    row = existing(locked_sender(sender_id))
    for name, value in changes.items():
        setattr(row, name, value)
    check_address(row.channel, row.address)
    row.save(update_fields=list(changes))
    return row


@transaction.atomic
def activate_sender(sender_id: UUID, now: datetime) -> Sender:
    """Recovered: what became stale while it was away is not sent."""
    row = existing(locked_sender(sender_id))
    row.activate()
    row.save(update_fields=["status", "last_error"])
    mine = Execution.objects.filter(enrollment__sender=row, enrollment__sequence__status="active")
    owners = mine.stale(now).values_list("enrollment__sequence_id", flat=True)
    locked = [sequence.pk for sequence in lock_sequences(set(owners))]
    ledger = Ledger(now)
    skip_stale_of(mine.of(locked).filter(enrollment__status="active"), now, ledger, "sender_recovered")
    settle(locked, now, ledger)
    nudge("campaigns.send_due_steps")
    return row


@transaction.atomic
def suspend_sender(sender_id: UUID, *, reassign_to: UUID | None = None) -> Sender:
    row = existing(locked_sender(sender_id, reassign_to))
    row.suspend()
    row.save(update_fields=["status"])
    reassign(row, reassign_to)
    return row


@transaction.atomic
def deactivate_sender(sender_id: UUID, *, reassign_to: UUID | None = None) -> Sender:
    row = existing(locked_sender(sender_id, reassign_to))
    row.deactivate()
    row.save(update_fields=["status"])
    reassign(row, reassign_to)
    return row


@transaction.atomic
def delete_sender(sender_id: UUID, *, reassign_to: UUID | None = None) -> None:
    row = locked_sender(sender_id, reassign_to)
    if row.deleted_at is None:
        Sender.objects.filter(pk=row.pk).update(deleted_at=Now())
    reassign(row, reassign_to)


def reassign(row: Sender, successor_id: UUID | None) -> int:
    """Hand over every live enrollment, and the place in the pools it does not have yet."""
    if successor_id is None:
        return 0
    successor = Sender.objects.filter(pk=successor_id, application=row.application_id).first()
    if successor is None or successor.pk == row.pk:
        raise Invalid(_("There is no such sender."), code="does_not_exist", attr="reassign_to")
    if successor.channel != row.channel or not successor.healthy:
        raise Conflict(
            _("The successor must be healthy and of the same channel."), code="unfit_sender", attr="reassign_to"
        )
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_enrollments SET sender_id = CASE WHEN sender_id = %(old)s THEN %(new)s ELSE sender_id END,"
            " senders = senders || jsonb_build_object(%(channel)s::text, %(new)s::text)"
            " WHERE status IN ('active', 'paused')"
            "   AND (sender_id = %(old)s OR senders ->> %(channel)s = %(old)s::text)",
            {"old": row.pk, "new": successor.pk, "channel": row.channel},
        )
        moved = cursor.rowcount
        cursor.execute(
            "INSERT INTO sequence_senders (sequence_id, sender_id, position)"
            " SELECT sequence_id, %(new)s, position FROM sequence_senders WHERE sender_id = %(old)s"
            " ON CONFLICT (sequence_id, sender_id) DO NOTHING",
            {"old": row.pk, "new": successor.pk},
        )
    return moved


def impact(row: Sender) -> dict[str, Any]:
    """Who is affected when this sender goes, now or at a later step, and who could take over."""
    live = Enrollment.objects.live().filter(
        Q(sender=row) | Q(**{f"senders__{row.channel}": str(row.pk)}), sequence__application=row.application_id
    )
    sequences = Sequence.objects.filter(pk__in=live.values("sequence_id")).order_by("pk")
    counts = dict(live.order_by().values_list("sequence_id").annotate(n=Count("pk")))
    waiting = Execution.objects.filter(
        enrollment__in=Enrollment.objects.live().filter(sender=row), status__in=Execution.WAITING
    )
    others = Sender.objects.healthy().filter(application=row.application_id, channel=row.channel).exclude(pk=row.pk)
    return {
        "enrollments": sum(counts.values()),
        "waiting_executions": waiting.count(),
        "sequences": [
            {"id": sequence.pk, "name": sequence.name, "status": sequence.status, "enrollments": counts[sequence.pk]}
            for sequence in sequences[:SAMPLE]
        ],
        "sequences_count": len(counts),
        "candidates": [
            {"id": sender.pk, "address": sender.address, "display_name": sender.display_name}
            for sender in others.order_by("pk")[:SAMPLE]
        ],
    }
