"""What people do to single messages: cancel one, send a failed one anew."""

from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.utils.translation import gettext as _

from config.errors import Conflict, Invalid, TooMany
from messaging.models import Message
from messaging.services.creating import CONFLICTS, QUOTA_EXCEEDED, Draft, Outcome, enqueue_messages
from messaging.services.ending import cancel_messages


@transaction.atomic
def cancel_message(pk: UUID, *, now: datetime) -> Message:
    row = Message.objects.select_for_update(of=("self",)).get(pk=pk)
    if row.status == Message.Status.FAILED and row.error_reason == "cancelled":
        return row
    if row.status == Message.Status.PENDING and row.lease_id is not None:
        raise Conflict(_("The message is being sent at this moment."), code="in_flight")
    if row.pk not in cancel_messages([row.pk], now=now):
        detail = _("A message that is %(status)s cannot be cancelled.") % {"status": row.status}
        raise Conflict(detail, code="illegal_transition")
    return Message.objects.get(pk=pk)


@transaction.atomic
def retry_message(pk: UUID, *, now: datetime) -> tuple[Message, bool]:
    """A new message with the failed one's content, and whether it is new: a second retry gives the first one's."""
    old = Message.objects.select_for_update(of=("self",)).get(pk=pk)
    if old.status != Message.Status.FAILED:
        raise Conflict(_("Only a failed message can be sent anew."), code="illegal_transition")
    if earlier := Message.objects.filter(retry_of=old).first():
        return earlier, False
    if old.archived_at is not None:
        raise Conflict(_("The message's content has been cleared."), code="archived")
    outcome = enqueue_messages([draft_again(old)], now=now)[0]
    raise_refusal(outcome)
    return Message.objects.get(retry_of=old), True


def draft_again(old: Message) -> Draft:
    return Draft(
        application_id=old.application_id,
        subscription_id=old.subscription_id,
        title=old.title,
        body=old.body,
        data=old.data,
        kind=old.kind,
        campaign=old.campaign or "",
        from_address=old.from_address,
        priority=old.priority,
        template_id=old.template_id,
        template_version=old.template_version,
        template_code=old.template_code,
        template_parameters=old.template_parameters,
        retry_of=old.pk,
    )


def raise_refusal(outcome: Outcome) -> None:
    """A single draft's refusal as the error it is: the draft's own fault, a conflict, or the quota."""
    if outcome.code is None:
        return
    if outcome.code == QUOTA_EXCEEDED:
        raise TooMany(outcome.detail, code=outcome.code, retry_after=outcome.retry_after)
    kind = Conflict if outcome.code in CONFLICTS else Invalid
    raise kind(outcome.detail, code=outcome.code, attr=outcome.attr, extra=dict(outcome.extra))
