"""What the providers answered, written down for a whole batch at once and only by whoever still holds the lease."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import DatabaseError, connection, transaction
from django.db.models import Q

from config.decisions import decide, record
from config.sweeping import nudge
from messaging.models import Channel, HoldReason, Message, Subscription
from messaging.providers import Answer
from messaging.services import circuits, retries
from messaging.services.claiming import Batch, Due
from messaging.services.creating import Draft, enqueue_messages
from messaging.services.suppressions import suppress

log = structlog.get_logger("messaging.recording")
RESOLVE = "messaging.resolve_unknown_attempts"


@dataclass(frozen=True)
class Verdict:
    """What an answer makes of its message."""

    status: str
    sent_at: datetime | None = None
    failed_at: datetime | None = None
    error_reason: str | None = None
    error_details: dict[str, Any] | None = None
    failure_type: str | None = None
    next_attempt_at: datetime | None = None
    hold_reason: str | None = None


def judge(row: Due, answer: Answer, *, now: datetime, probe_at: datetime | None) -> Verdict:
    """An answer that is not an acceptance."""
    if answer.outcome == "unknown":
        # May have been heard: neither sent again nor given up before the table of unknown outcomes has been asked.
        return Verdict("pending", hold_reason=HoldReason.OUTCOME_UNKNOWN, next_attempt_at=now)
    if answer.outcome == "rejected":
        return failed(answer, answer.error_reason or "rejected", now)
    if answer.outcome == "config":
        return _errored(answer, "config", now, probe_at or now + settings.CIRCUIT_OPEN)
    failure_type = answer.failure_type if answer.failure_type in retries.SECONDS else "outage"
    used = getattr(row, f"{failure_type}_retries")
    again = retries.next_attempt(failure_type, used, now, answer.retry_after)
    if again is None:
        return failed(answer, "retries_exhausted", now)
    return _errored(answer, failure_type, now, again)


def failed(answer: Answer, reason: str, now: datetime) -> Verdict:
    failure_type = answer.failure_type or "permanent"
    return Verdict(
        "failed", failed_at=now, error_reason=reason[:255], error_details=_details(answer), failure_type=failure_type
    )


def _errored(answer: Answer, failure_type: str, now: datetime, again: datetime) -> Verdict:
    details = {**_details(answer), "errored_at": now.isoformat()}
    reason = answer.error_reason[:255] or failure_type
    return Verdict(
        "errored", error_reason=reason, error_details=details, failure_type=failure_type, next_attempt_at=again
    )


def _details(answer: Answer) -> dict[str, Any]:
    found = {"code": clean(answer.code, 100), "scope": answer.scope, "retry_after": answer.retry_after}
    return {name: value for name, value in found.items() if value not in ("", None)}


def clean(text: str, length: int) -> str | None:
    return text.replace("\x00", "")[:length] or None


# The version is written here as the trigger would write it row by row, at a fifth of the price.
NEXT_VERSION = """
           version = m.version + 1, version_history = m.version_history || jsonb_build_object((m.version + 1)::text,
               jsonb_build_object('at', %s::timestamptz, 'transition', 'send', 'from', 'pending', 'to', 'successful'))
"""
# By the key and nothing else: were the state or the lease spelt plainly, the planner would read all leased or pending
# rows for each answer. A lease that was lost changes nothing: somebody else has decided since.
OURS = "m.id = r.id AND (m.lease_id = %s AND m.attempt_count = r.attempt_no AND m.status = 'pending') IS TRUE"

ACCEPTED = f"""
    WITH answer AS MATERIALIZED (
        SELECT * FROM unnest(%s::uuid[], %s::int[], %s::text[], %s::text[], %s::text[], %s::int[])
            AS r (id, attempt_no, provider_message_id, code, raw, latency_ms)),
    ended AS (
        UPDATE message_attempts a
           SET ended_at = %s, outcome = 'accepted', provider_message_id = r.provider_message_id, code = r.code,
               raw = r.raw, latency_ms = r.latency_ms
          FROM answer r WHERE a.message_id = r.id AND a.attempt_no = r.attempt_no AND a.ended_at IS NULL)
    UPDATE messages m
       SET status = 'successful', sent_at = %s, error_reason = NULL, error_details = '{{}}', failure_type = NULL,
           next_attempt_at = NULL, provider_message_id = COALESCE(r.provider_message_id, m.provider_message_id),
           lease_id = NULL, leased_until = NULL, {NEXT_VERSION}
      FROM answer r WHERE {OURS}
    RETURNING m.id
"""

RECORD = f"""
    WITH answer AS MATERIALIZED (
        SELECT * FROM unnest(%s::uuid[], %s::int[], %s::text[], %s::text[], %s::text[], %s::text[], %s::int[],
                             %s::text[], %s::timestamptz[], %s::timestamptz[], %s::text[], %s::text[], %s::text[],
                             %s::timestamptz[], %s::text[])
            AS r (id, attempt_no, outcome, provider_message_id, code, raw, latency_ms,
                  status, sent_at, failed_at, error_reason, error_details, failure_type, next_attempt_at, hold_reason)),
    ended AS (
        UPDATE message_attempts a
           SET ended_at = %s, outcome = r.outcome, provider_message_id = r.provider_message_id, code = r.code,
               raw = r.raw, latency_ms = r.latency_ms
          FROM answer r WHERE a.message_id = r.id AND a.attempt_no = r.attempt_no AND a.ended_at IS NULL)
    UPDATE messages m
       SET status = r.status, sent_at = r.sent_at, failed_at = r.failed_at, error_reason = r.error_reason,
           error_details = COALESCE(r.error_details, '{{}}')::jsonb, failure_type = r.failure_type,
           next_attempt_at = r.next_attempt_at, hold_reason = r.hold_reason,
           provider_message_id = COALESCE(r.provider_message_id, m.provider_message_id),
           lease_id = NULL, leased_until = NULL
      FROM answer r WHERE {OURS}
    RETURNING m.id
"""


def record_batch(batch: Batch, answers: Sequence[tuple[UUID, Answer]], *, now: datetime) -> dict[str, int]:
    """Counts by what became of them. A poison answer is left to the unknown-outcome table, the rest is recorded."""
    try:
        with transaction.atomic():
            return _record(batch, answers, now)
    except (DatabaseError, ValueError) as error:  # ValueError: text that no column can hold
        if not connection.is_usable():
            raise
        if len(answers) == 1:
            # PostgreSQL's second line is the row: content and address of the message.
            told = str(error).partition("\n")[0]
            log.error("answer_not_recordable", message_id=str(answers[0][0]), error=told)
            return {"error": 1}
    middle = len(answers) // 2
    halves = (record_batch(batch, half, now=now) for half in (answers[:middle], answers[middle:]))
    return _sum(*halves)


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for name in {name for part in parts for name in part}}


def _record(batch: Batch, answers: Sequence[tuple[UUID, Answer]], now: datetime) -> dict[str, int]:
    said = [(pk, answer) for pk, answer in answers if pk not in batch.unreadable] if batch.unreadable else answers
    probe_at = circuits.note_answers(batch.breaker, said, probe=batch.probe, now=now)
    accepted = [(pk, answer) for pk, answer in answers if answer.outcome == "accepted"]
    others = [(pk, answer) for pk, answer in answers if answer.outcome != "accepted"]
    counts = {"successful": len(accepted)} if accepted else {}
    lost = len(accepted) - len(_write_accepted(batch, accepted, now))
    if others:
        verdicts = {pk: judge(batch.due[pk], answer, now=now, probe_at=probe_at) for pk, answer in others}
        won = _write(batch, others, verdicts, now)
        lost += len(others) - len(won)
        counts |= _counts(verdicts)
        punish([(batch.due[pk], answer) for pk, answer in others if pk in won], now=now)
        if any(verdict.hold_reason for verdict in verdicts.values()):
            nudge(RESOLVE)
    if lost:
        log.warning("lease_lost", provider=batch.provider, messages=lost)
        counts["lease_lost"] = lost
    return counts


def _write_accepted(batch: Batch, answers: Sequence[tuple[UUID, Answer]], now: datetime) -> set[UUID]:
    """What nearly all answers are: fewer values to carry over."""
    if not answers:
        return set()
    rows = (
        (
            pk,
            batch.attempts[pk],
            clean(a.provider_message_id, 255),
            clean(a.code, 100),
            clean(a.raw, 2000),
            a.latency_ms,
        )
        for pk, a in answers
    )
    with connection.cursor() as cursor:
        cursor.execute(ACCEPTED, [*map(list, zip(*rows, strict=True)), now, now, now, batch.lease_id])
        return {pk for (pk,) in cursor.fetchall()}


def _write(
    batch: Batch, answers: Sequence[tuple[UUID, Answer]], verdicts: dict[UUID, Verdict], now: datetime
) -> set[UUID]:
    rows = (_values(pk, batch.attempts[pk], answer, verdicts[pk]) for pk, answer in answers)
    with connection.cursor() as cursor:
        cursor.execute(RECORD, [*map(list, zip(*rows, strict=True)), now, batch.lease_id])
        return {pk for (pk,) in cursor.fetchall()}


def _values(pk: UUID, attempt_no: int, answer: Answer, verdict: Verdict) -> Iterator[Any]:
    yield from (pk, attempt_no, answer.outcome, clean(answer.provider_message_id, 255), clean(answer.code, 100))
    yield from (clean(answer.raw, 2000), answer.latency_ms, verdict.status, verdict.sent_at, verdict.failed_at)
    yield from (verdict.error_reason, json.dumps(verdict.error_details) if verdict.error_details else None)
    yield from (verdict.failure_type, verdict.next_attempt_at, verdict.hold_reason)


def _counts(verdicts: dict[UUID, Verdict]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for verdict in verdicts.values():
        word = "unknown" if verdict.hold_reason else verdict.status
        counts[word] = counts.get(word, 0) + 1
    return counts


# --- what a rejection means beyond its message -------------------------------------------------------------------


def punish(results: Sequence[tuple[Any, Answer]], *, now: datetime) -> None:
    """Only what is the recipient's own and for good touches the subscription, the address, or asks for another way.

    `results` are messages, or rows with a message's fields, and the answers that ended them.
    """
    final = [(row, a) for row, a in results if a.outcome == "rejected"]
    of_recipient = [(row, answer) for row, answer in final if answer.scope == "recipient"]
    mark_subscriptions([(r.subscription_id, a) for r, a in of_recipient if a.subscription_status is not None], now=now)
    _suppress([(row, answer) for row, answer in of_recipient if answer.suppress_reason], now)
    fail_over([row for row, answer in final if answer.failover], now=now)


def mark_subscriptions(found: Sequence[tuple[UUID, Answer]], *, now: datetime) -> None:
    """Unless opted out, or registered again since the provider says the address died."""
    if not found:
        return
    answers = dict(found)
    # Without the key: new messages hold their subscriptions' keys in an order of their own.
    dead = Subscription.objects.sendable().filter(pk__in=answers).order_by("pk")
    rows = list(dead.select_for_update(of=("self",), no_key=True))
    rows = [row for row in rows if not _registered_since(row, answers[row.pk])]
    decisions = []
    for row in rows:
        answer, before = answers[row.pk], row.status
        row.status, row.status_reason, row.updated_at = answer.subscription_status or 0, answer.code[:100], now
        decisions.append(
            decide(
                "provider_rejected_address",
                row,
                before={"status": before},
                after={"status": row.status},
                inputs={"code": answer.code},
            )
        )
    Subscription.objects.bulk_update(rows, ["status", "status_reason", "updated_at"])
    record(decisions)


def _registered_since(row: Subscription, answer: Answer) -> bool:
    return answer.since is not None and row.last_active_at is not None and row.last_active_at > answer.since


def _suppress(results: Sequence[tuple[Any, Answer]], now: datetime) -> None:
    by_application: dict[UUID, list[tuple[Any, Answer]]] = {}
    for row, answer in results:
        by_application.setdefault(row.application_id, []).append((row, answer))
    tokens = (
        {
            row.pk: row.token
            for row in Subscription.objects.filter(pk__in=[row.subscription_id for row, _answer in results])
        }
        if results
        else {}
    )
    for application_id, found in sorted(by_application.items()):
        entries = [
            (
                str(row.channel_type),
                tokens[row.subscription_id],
                answer.suppress_reason,
                {"message_id": str(row.id), "code": answer.code},
            )
            for row, answer in found
        ]
        suppress(application_id, entries, now=now)


def fail_over(rows: Sequence[Any], *, now: datetime) -> None:
    """KakaoTalk did not reach them: the same text as an SMS to the same user, who must have a number to send to."""
    wanted = [row for row in rows if row.channel_type == Channel.KAKAO_TALK and row.user_id]
    if not wanted:
        return
    numbers = _numbers(wanted)
    drafts = [
        Draft(
            application_id=row.application_id,
            subscription_id=numbers[row.application_id, row.user_id],
            body=row.body,
            kind=row.kind,
            campaign=row.campaign or "",
            priority=row.priority,
            failover_of=row.id,
        )
        for row in wanted
        if (row.application_id, row.user_id) in numbers
    ]
    enqueue_messages(drafts, now=now)


def _numbers(rows: Sequence[Any]) -> dict[tuple[UUID, str], UUID]:
    owners = Q()
    for row in rows:
        owners |= Q(application_id=row.application_id, user_id=row.user_id)
    found = Subscription.objects.sendable().filter(owners, channel_type=Channel.SMS).recently_active_first()
    numbers: dict[tuple[UUID, str], UUID] = {}
    for pk, application_id, user_id in found.values_list("pk", "application_id", "user_id"):
        numbers.setdefault((application_id, str(user_id)), pk)
    return numbers


@transaction.atomic
def fail_accepted(results: Sequence[tuple[UUID, Answer]], *, now: datetime) -> set[UUID]:
    """A provider's later word that messages it had accepted were not delivered. Those it changed."""
    answers = dict(results)
    rows = list(
        Message.objects.filter(pk__in=answers, status=Message.Status.SUCCESSFUL)
        .order_by("pk")
        .select_for_update(of=("self",))
    )
    for row in rows:
        verdict = failed(answers[row.pk], answers[row.pk].error_reason or "rejected", now)
        row.fail(now, str(verdict.error_reason))
        row.error_details, row.failure_type = verdict.error_details or {}, verdict.failure_type
    Message.objects.bulk_update(rows, ["status", "failed_at", "error_reason", "error_details", "failure_type"])
    punish([(row, answers[row.pk]) for row in rows], now=now)
    return {row.pk for row in rows}
