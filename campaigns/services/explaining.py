"""Why a lead has not been written to: the gates in the order they are passed, each with the value that decides."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.utils.translation import gettext as _

from campaigns.models import Enrollment, Execution, Sender
from campaigns.services.enrolling import suppressed_leads
from campaigns.services.sending import usage
from campaigns.services.texts import missing
from campaigns.services.windows import FURTHEST, Allowance, allowance, opening, pace, slots, spaced, turn_at
from messaging.models import Subscription

ORDER = [
    "sequence_status",
    "enrollment",
    "suppression",
    "window",
    "sender_health",
    "allowance",
    "queue_position",
    "eta",
]


@dataclass(frozen=True)
class Gate:
    name: str
    ok: bool
    value: Any
    detail: str = ""


@dataclass(frozen=True)
class Explanation:
    execution_id: UUID | None
    gates: list[Gate]
    decides: str | None
    eta: datetime | None


def explain(enrollment: Enrollment, now: datetime) -> Explanation:
    execution = (
        Execution.objects.filter(enrollment=enrollment, status__in=Execution.WAITING)
        .select_related("step")
        .order_by("scheduled_at", "pk")
        .first()
    )
    sender = enrollment.sender
    allowed = allowance(sender, now, *usage([sender], now)[sender.pk]) if sender else None
    ahead = _ahead(execution, enrollment, now) if execution else 0
    suppression = _suppression_gate(enrollment, execution)
    eta = _eta(enrollment, execution, allowed, ahead, now) if suppression.ok else None
    gates = [
        _sequence_gate(enrollment),
        _enrollment_gate(enrollment, execution),
        suppression,
        *_passed(execution, _window_gate(enrollment, now), _sender_gate(sender), _allowance_gate(allowed)),
        _queue_gate(execution, allowed, ahead, now),
        _eta_gate(execution, eta, now),
    ]
    decides = next((gate.name for gate in gates if not gate.ok), None)
    return Explanation(execution.pk if execution else None, gates, decides, eta)


def _passed(execution: Execution | None, *gates: Gate) -> list[Gate]:
    """What messaging has is held by none of the sender's gates any more."""
    if execution is None or execution.status != "processing":
        return list(gates)
    return [replace(gate, ok=True, detail=_("Handed over to messaging.")) for gate in gates]


def _sequence_gate(enrollment: Enrollment) -> Gate:
    status = enrollment.sequence.status
    return Gate("sequence_status", status == "active", status, _("Only an active sequence sends."))


def _enrollment_gate(enrollment: Enrollment, execution: Execution | None) -> Gate:
    if enrollment.status == "paused":
        until = _("until %(at)s") % {"at": _told(enrollment.resume_at)} if enrollment.resume_at else _("without a date")
        return Gate("enrollment", False, "paused", f"{until}: {enrollment.pause_reason}")
    if enrollment.status != "active":
        return Gate("enrollment", False, enrollment.status, _("The enrollment has ended."))
    if execution is None:
        return Gate("enrollment", False, "idle", _("No step is waiting."))
    if execution.status == "awaiting_enrichment":
        lacks = ", ".join(missing(execution.step, enrollment.lead)) or "–"
        return Gate("enrollment", False, "awaiting_enrichment", _("The lead lacks: %(what)s") % {"what": lacks})
    return Gate("enrollment", True, enrollment.status)


def _suppression_gate(enrollment: Enrollment, execution: Execution | None) -> Gate:
    channel = execution.step.channel if execution else "email"
    if suppressed_leads([enrollment.lead], channel):
        return Gate("suppression", False, "suppressed", _("The address must not be written to."))
    agreed = Subscription.objects.filter(pk=enrollment.lead.subscription_id(channel), marketing_consent=True)
    if execution and enrollment.sequence.kind == "marketing" and not agreed.exists():
        return Gate("suppression", False, "no_consent", _("The recipient has not consented to marketing."))
    return Gate("suppression", True, None)


def _window_gate(enrollment: Enrollment, now: datetime) -> Gate:
    if enrollment.sender is None:
        return Gate("window", True, None)
    opens = opening(enrollment.sender, enrollment.lead.time_zone, now)
    if opens == now:
        return Gate("window", True, "open")
    return Gate("window", False, opens.isoformat(), _("The sending window opens then."))


def _sender_gate(sender: Sender | None) -> Gate:
    if sender is None:
        return Gate("sender_health", False, None, _("No sender is assigned."))
    if sender.deleted_at is not None:
        return Gate("sender_health", False, "deleted", _("The sender is deleted."))
    return Gate("sender_health", sender.healthy, sender.status, sender.last_error)


def _allowance_gate(allowed: Allowance | None) -> Gate:
    if allowed is None or allowed.left is None:
        return Gate("allowance", True, None, _("No limit."))
    detail = _("%(today)s of %(daily)s today, %(hour)s of %(hourly)s this hour") % {
        "today": allowed.used_today,
        "daily": "∞" if allowed.daily is None else allowed.daily,
        "hour": allowed.used_this_hour,
        "hourly": "∞" if allowed.hourly is None else allowed.hourly,
    }
    return Gate("allowance", allowed.left > 0, allowed.left, detail)


def _queue_gate(execution: Execution | None, allowed: Allowance | None, ahead: int, now: datetime) -> Gate:
    if execution is None:
        return Gate("queue_position", True, None)
    if execution.status == "processing":
        return Gate("queue_position", True, 0, _("Handed over to messaging."))
    due = execution.effective_due_at <= now
    fits = not due or allowed is None or allowed.left is None or ahead < max(allowed.left, 1)
    return Gate("queue_position", fits, ahead + 1, _("%(count)s are due before it.") % {"count": ahead})


def _eta_gate(execution: Execution | None, eta: datetime | None, now: datetime) -> Gate:
    if execution is None or execution.status == "processing":
        return Gate("eta", True, None)
    due = execution.effective_due_at
    value = eta.isoformat() if eta else None
    detail = _("Due at %(at)s.") % {"at": _told(due)}
    return Gate("eta", due <= now and (eta is None or eta <= now), value, detail)


def _ahead(execution: Execution, enrollment: Enrollment, now: datetime) -> int:
    """Rows of the same sender that are due and older, or deferred to the same moment and planned before it."""
    due, planned = execution.effective_due_at, execution.scheduled_at
    rows = Execution.objects.due(max(due, now)).filter(enrollment__sender=enrollment.sender_id)
    first = Q(scheduled_at__lt=planned) | Q(scheduled_at=planned, pk__lt=execution.pk)
    return rows.filter(Q(effective_due__lt=due, effective_due__lte=now) | Q(first, effective_due=due)).count()


def _eta(
    enrollment: Enrollment, execution: Execution | None, allowed: Allowance | None, ahead: int, now: datetime
) -> datetime | None:
    """A forecast; None where a person must act first."""
    sender = enrollment.sender
    if execution is None or execution.status in ("processing", "awaiting_enrichment"):
        return None
    if enrollment.sequence.status != "active" or not enrollment.is_live or sender is None or not sender.healthy:
        return None
    if enrollment.status == "paused" and enrollment.resume_at is None:
        return None
    at = max(now, execution.effective_due_at)
    if enrollment.resume_at is not None:
        # The automatic resume moves what waits by the length of the pause.
        paused_for = enrollment.resume_at - (enrollment.paused_at or enrollment.resume_at)
        at = max(now, enrollment.resume_at, execution.effective_due_at + paused_for)
    turn = turn_at(allowed, at, ahead) if allowed else at
    if turn is None:
        return None
    if spaced(sender):
        waits = min(ahead * pace(sender), FURTHEST) if turn == at else timedelta()
        turn = next(slots(sender, turn, allowed.last_at if allowed else None)) + waits
    return opening(sender, enrollment.lead.time_zone, turn)


def _told(at: datetime | None) -> str:
    return at.isoformat(timespec="minutes") if at else "–"
