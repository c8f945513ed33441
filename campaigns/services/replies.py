"""Replies: whose they are, of what kind, and what they change. The same reply twice changes nothing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution, Reply
from campaigns.services.absence import Absence, plain, read_absence
from campaigns.services.classifying import classify
from campaigns.services.completion import settle
from campaigns.services.enrollments import finish_enrollments, locked_enrollment
from campaigns.services.rows import Ledger, Moved
from campaigns.services.windows import zone
from config.decisions import decide
from config.errors import Invalid, Missing
from messaging.models import Message
from messaging.services import cancel_messages, suppress

AHEAD = timedelta(minutes=5)
AGAIN = timedelta(minutes=5)
# Our Message-ID is <messages.id@…>; nobody else's id has a UUID of ours before the @.
OUR_ID = re.compile(r"(?<![\w.+@-])([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?=@|\s*>|\s*$)", re.IGNORECASE)

ENDS = {"human": "replied", "bounce": "bounced", "unsubscribe": "unsubscribed"}
SUPPRESSIONS = {"bounce": "hard_bounce", "unsubscribe": "unsubscribed"}


@dataclass(frozen=True)
class Incoming:
    enrollment_id: UUID | None = None
    message_id: UUID | None = None
    in_reply_to: str = ""
    references: str = ""
    kind: str | None = None
    text: str = ""
    subject: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    received_at: datetime | None = None
    ooo_until: datetime | None = None
    external_id: str | None = None


def record_reply(incoming: Incoming, visible: Any, now: datetime) -> tuple[Reply, bool]:
    """The reply and whether it is new. `visible` are the enrollments this client may see."""
    if incoming.received_at is not None and incoming.received_at > now + AHEAD:
        raise Invalid(_("A reply cannot come from the future."), attr="received_at")
    with transaction.atomic():
        answered = find_execution(incoming, visible)
        row = locked_enrollment(answered.enrollment_id if answered else find_enrollment(incoming, visible))
        if (earlier := find_earlier(incoming, row, now)) is not None:
            return earlier, False
        reply = _store(incoming, row, now)
        _apply(reply, row, now, answered)
        return reply, True


def find_enrollment(incoming: Incoming, visible: Any) -> UUID:
    if incoming.enrollment_id is None:
        raise Missing(_("No message of ours is answered by this reply."))
    found = visible.filter(pk=incoming.enrollment_id).values_list("pk", flat=True).first()
    if found is None:
        raise Invalid(_("There is no such enrollment."), code="does_not_exist", attr="enrollment_id")
    return found


def find_execution(incoming: Incoming, visible: Any) -> Execution | None:
    """The step whose message is answered; an enrollment that is named decides alone."""
    if incoming.enrollment_id is not None:
        return None
    for messages in _message_ids(incoming):
        executions = Execution.objects.filter(message__in=messages, enrollment__in=visible).select_related("step")
        if (found := executions.order_by("-pk").first()) is not None:
            return found
    return None


def _message_ids(incoming: Incoming) -> Iterable[list[UUID]]:
    if incoming.message_id is not None:
        yield [incoming.message_id]
    for text in (incoming.in_reply_to, incoming.references):
        if ids := [UUID(found) for found in OUR_ID.findall(text)]:
            yield ids


def find_earlier(incoming: Incoming, row: Enrollment, now: datetime) -> Reply | None:
    if incoming.external_id is not None:
        own = Reply.objects.filter(enrollment__sequence__application=row.sequence.application_id)
        return own.filter(external_id=incoming.external_id).first()
    same = Reply.objects.filter(enrollment=row, external_id=None, text=incoming.text)
    if incoming.received_at is not None:
        return same.filter(received_at=incoming.received_at).first()
    # Without a time of its own, what was just said in the same words is the same call made again.
    given = {"kind": incoming.kind, "ooo_until": incoming.ooo_until}
    told = {name: value for name, value in given.items() if value is not None}
    return same.filter(received_at__gt=now - AGAIN, subject=incoming.subject, **told).order_by("-received_at").first()


def _store(incoming: Incoming, row: Enrollment, now: datetime) -> Reply:
    kind, evidence = incoming.kind, {"rule": "given"}
    if kind is None:
        kind, evidence = classify(incoming.subject, incoming.text, incoming.headers, _our_subjects(row))
        if kind == "human" and incoming.ooo_until is not None:
            kind, evidence = "ooo", {"rule": "return_given"}
    received_at = incoming.received_at or now
    until = None
    if kind == "ooo":
        absence = _absence(incoming, row, received_at)
        until, evidence = absence.until, {**evidence, **plain(absence)}
    return Reply.objects.create(
        enrollment=row,
        received_at=received_at,
        kind=kind,
        subject=incoming.subject,
        text=incoming.text,
        evidence=evidence,
        ooo_until=until,
        external_id=incoming.external_id,
    )


def _our_subjects(row: Enrollment) -> set[str]:
    messages = row.executions.filter(message__isnull=False).values("message_id")
    return set(Message.objects.filter(pk__in=messages).values_list("title", flat=True))


def _absence(incoming: Incoming, row: Enrollment, received_at: datetime) -> Absence:
    if incoming.ooo_until is not None:
        return Absence(incoming.ooo_until, "given")
    place = zone(row.lead.time_zone)
    found = read_absence(incoming.text, received_at, place)
    # "[부재중] 11/25 복귀" and nothing else: some write it above the message only.
    return found if found.rule != "default" else read_absence(incoming.subject, received_at, place)


def _apply(reply: Reply, row: Enrollment, now: datetime, answered: Execution | None) -> None:
    ledger = Ledger(now)
    if reply.kind == "ooo":
        _pause_until(reply, row, now, ledger)
        ledger.write()
    else:
        end = ENDS[reply.kind]
        if reply.kind in SUPPRESSIONS:
            _suppress(reply, row, now, answered or _last_sent(row))
        if reply.kind == "human":
            _cancel_unsent(row, now, ledger)
        if row.is_live:
            finish_enrollments([row.pk], end, end, now, ledger, f"reply.{reply.kind}")
        settle([row.sequence_id], now, ledger)


def _pause_until(reply: Reply, row: Enrollment, now: datetime, ledger: Ledger) -> None:
    """A later absence only moves the return forward; who was paused by hand without a date stays so."""
    until = reply.ooo_until
    before = {"status": row.status, "resume_at": _iso(row.resume_at)}
    if row.status == "paused" and row.resume_at is not None and until is not None and until > row.resume_at:
        row.resume_at = until
        row.save(update_fields=["resume_at"])
    elif row.status == "active":
        row.pause()
        row.paused_at, row.resume_at, row.pause_reason = now, until, "ooo"
        row.save(update_fields=["status", "paused_at", "resume_at", "pause_reason"])
    after = {"status": row.status, "resume_at": _iso(row.resume_at)}
    if after != before:
        inputs = {"reply_id": str(reply.pk), **reply.evidence}
        ledger.add(decide("reply.ooo", row, before=before, after=after, inputs=inputs))


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def _last_sent(row: Enrollment) -> Execution | None:
    begun = row.executions.select_related("step").filter(processing_started_at__isnull=False)
    return begun.order_by("-processing_started_at", "-pk").first()


def _suppress(reply: Reply, row: Enrollment, now: datetime, answered: Execution | None) -> None:
    """The address that was written to: by the channel of the step that is answered, not of the one to come."""
    step = answered.step if answered else row.current_step
    channel = step.channel if step else "email"
    if address := row.lead.address(channel):
        evidence = {"reply_id": str(reply.pk), "enrollment_id": str(row.pk)}
        suppress(row.sequence.application_id, [(channel, address, SUPPRESSIONS[reply.kind], evidence)], now=now)


def _cancel_unsent(row: Enrollment, now: datetime, ledger: Ledger) -> None:
    """A step on its way that nobody has begun to send is taken back."""
    processing = dict(
        Execution.objects.filter(enrollment=row, status="processing", message__isnull=False)
        .select_for_update()
        .values_list("message_id", "pk")
    )
    taken_back = [processing[pk] for pk in cancel_messages(processing, now=now, reason="cancelled")]
    Execution.objects.filter(pk__in=taken_back).update(status="skipped", skip_reason="replied")
    told = [Moved(pk, row.pk, row.sequence_id, "processing") for pk in taken_back]
    ledger.skipped("reply.human", told, "replied", cancelled=True)
