"""Attempts of which nobody knows whether they arrived: a call without an answer, or a dispatcher that died.

| channel | what is done |
|---|---|
| push | repeated once with the same ids: the device shows it once |
| sms, kakao_talk | the provider is asked by our id, then decided |
| email, transactional | repeated once with the same Message-ID |
| email, other kinds | held for an operator, never sent again by itself |
| in_app | repeated: the row is the delivery |

What stays unknown is held (`outcome_unknown`) and fails as such after 24 h.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, Max, Q

from config.decisions import decide, record
from config.errors import Conflict
from config.sweeping import nudge
from messaging.models import Channel, HoldReason, Kind, Message, MessageAttempt
from messaging.models.addresses import InvalidToken
from messaging.providers import Answer, Outgoing, provider_for
from messaging.services.claiming import outgoing_of
from messaging.services.creating import DISPATCH
from messaging.services.recording import clean, failed, punish


class Policy(Enum):
    REPEAT_ONCE = "repeat once with the same ids"
    ASK = "ask the provider"
    HOLD = "hold for an operator"


POLICIES: dict[str, Policy] = {
    Channel.PUSH: Policy.REPEAT_ONCE,
    Channel.SMS: Policy.ASK,
    Channel.KAKAO_TALK: Policy.ASK,
    Channel.IN_APP: Policy.REPEAT_ONCE,
}
# NHN's word for a key it has seen: the message was taken, though its lists may not show it yet.
TAKEN = "-1005"
ASKED_AT_ONCE = 10
PAGE = 200
# Providers' lists lag behind what they took in: so soon after an attempt, only what they do list proves anything.
LIST_LAG = timedelta(minutes=1)
NEXT_QUESTION, LATER_QUESTION, SOON = timedelta(minutes=5), timedelta(hours=1), timedelta(minutes=30)


def policy_for(channel: str, kind: str) -> Policy:
    if channel == Channel.EMAIL:
        return Policy.REPEAT_ONCE if kind == Kind.TRANSACTIONAL else Policy.HOLD
    return POLICIES[channel]


CLOSE = """
    WITH lost AS MATERIALIZED (
        SELECT a.id, a.message_id, a.attempt_no FROM message_attempts a JOIN messages m ON m.id = a.message_id
         WHERE a.ended_at IS NULL
           AND (m.leased_until <= %(now)s OR (m.lease_id IS NULL AND a.started_at <= %(begun)s))
         ORDER BY a.message_id LIMIT %(limit)s FOR UPDATE OF m SKIP LOCKED),
    closed AS (
        UPDATE message_attempts a SET ended_at = %(now)s, outcome = 'unknown', code = 'no_result'
          FROM lost WHERE a.id = lost.id)
    UPDATE messages m
       SET lease_id = NULL, leased_until = NULL, hold_reason = 'outcome_unknown', next_attempt_at = %(now)s,
           attempt_count = GREATEST(m.attempt_count, lost.attempt_no)
      FROM lost WHERE m.id = lost.message_id AND m.status = 'pending'
"""


def close_lost_attempts(*, now: datetime) -> int:
    """Open attempts whose lease ran out, or that nobody holds: who began them is gone, and what it did is unknown."""
    with connection.cursor() as cursor:
        cursor.execute(CLOSE, {"now": now, "begun": now - settings.MESSAGE_LEASE, "limit": PAGE})
        return cursor.rowcount


def resolve_page(*, now: datetime) -> Counter[str]:
    """Decide about a page of unknown outcomes; the provider is asked with no transaction open."""
    with transaction.atomic():
        rows = list(_page(now))
        attempts = _attempts(rows)
        asked = [row for row in rows if policy_for(row.channel_type, row.kind) is Policy.ASK]
        counts = _decide([row for row in rows if row not in asked], attempts, now)
        lease_id = uuid4()
        Message.objects.filter(pk__in=[row.pk for row in asked]).update(
            lease_id=lease_id, leased_until=now + settings.MESSAGE_LEASE
        )
        sent = _as_sent(asked)
    answers = _ask(asked, attempts, sent)
    return counts + _record_answers(asked, answers, attempts, lease_id, now)


def _page(now: datetime) -> Any:
    due = (
        Message.objects.unresolved(now)
        .order_by("next_attempt_at", "pk")
        .select_for_update(skip_locked=True, of=("self",))
    )
    return due.select_related("subscription")[:PAGE]


def _attempts(rows: Sequence[Message]) -> dict[UUID, dict[str, Any]]:
    """Of each message: attempts that ended unknown, when the last one began, how many the provider called a repeat."""
    found = (
        MessageAttempt.objects.filter(message__in=[row.pk for row in rows])
        .values("message_id")
        .annotate(
            unknown=Count("pk", filter=Q(outcome="unknown")),
            last_started=Max("started_at"),
            taken=Count("pk", filter=Q(code=TAKEN)),
        )
    )
    # Somebody may have held a message by hand that was never tried.
    untried = {row.pk: {"unknown": 0, "last_started": row.created_at, "taken": 0} for row in rows}
    return untried | {row["message_id"]: dict(row) for row in found}


def _decide(rows: Sequence[Message], attempts: dict[UUID, dict[str, Any]], now: datetime) -> Counter[str]:
    repeated: list[Message] = []
    held: list[Message] = []
    for row in rows:
        once = policy_for(row.channel_type, row.kind) is Policy.REPEAT_ONCE and attempts[row.pk]["unknown"] <= 1
        (repeated if once else held).append(row)
    let_go(repeated, "repeat_unknown")
    Message.objects.filter(pk__in=[row.pk for row in held]).update(next_attempt_at=None)
    record(
        decide("hold_unknown", row, before={}, after={"hold_reason": HoldReason.OUTCOME_UNKNOWN}, inputs=_evidence(row))
        for row in held
    )
    return Counter(repeated=len(repeated), held=len(held))


def _evidence(row: Message) -> dict[str, Any]:
    return {"channel": row.channel_type, "kind": row.kind, "attempts": row.attempt_count}


def let_go(rows: Sequence[Message], rule: str) -> None:
    """Back to the dispatchers."""
    if not rows:
        return
    Message.objects.filter(pk__in=[row.pk for row in rows], status=Message.Status.PENDING).update(
        hold_reason=None, next_attempt_at=None, lease_id=None, leased_until=None
    )
    record(
        decide(rule, row, before={"hold_reason": HoldReason.OUTCOME_UNKNOWN}, after={}, inputs=_evidence(row))
        for row in rows
    )
    nudge(DISPATCH)


def _ask(
    rows: Sequence[Message], attempts: dict[UUID, dict[str, Any]], sent: dict[UUID, Outgoing]
) -> dict[UUID, Answer | None]:
    if not rows:
        return {}

    def ask(row: Message) -> Answer | None:
        provider = provider_for(row.subscription_type)
        if provider is None:
            return None
        started = attempts[row.pk]["last_started"]
        return provider.query(row.pk, row.provider_message_id or "", started, sent.get(row.pk))

    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="question") as pool:
        calls = {row.pk: pool.submit(ask, row) for row in rows}
    # A provider does not raise; should one, it could not tell, and the other answers are recorded all the same.
    return {pk: None if call.exception() else call.result() for pk, call in calls.items()}


def _as_sent(rows: Sequence[Message]) -> dict[UUID, Outgoing]:
    """What the provider is asked about; where it knows no id of ours, another message's is told apart by its own."""
    if not rows:
        return {}
    others: dict[UUID, set[str]] = {}
    siblings = Message.objects.filter(
        subscription__in=[row.subscription_id for row in rows],
        created_at__gt=min(row.created_at for row in rows) - settings.MESSAGE_LIFE,
        provider_message_id__isnull=False,
    )
    for subscription_id, taken in siblings.values_list("subscription_id", "provider_message_id"):
        others.setdefault(subscription_id, set()).add(str(taken))
    found: dict[UUID, Outgoing] = {}
    for row in rows:
        try:
            found |= outgoing_of([row])
        except InvalidToken:
            continue
        found[row.pk] = replace(found[row.pk], others=frozenset(others.get(row.subscription_id, ())))
    return found


@transaction.atomic
def _record_answers(
    rows: Sequence[Message],
    answers: dict[UUID, Answer | None],
    attempts: dict[UUID, dict[str, Any]],
    lease_id: UUID,
    now: datetime,
) -> Counter[str]:
    still = Message.objects.filter(pk__in=[row.pk for row in rows], lease_id=lease_id, status=Message.Status.PENDING)
    ours = {row.pk: row for row in still.order_by("pk").select_for_update(of=("self",))}
    counts: Counter[str] = Counter()
    again, unanswered = [], []
    adopted: set[tuple[UUID, str, str]] = set()
    for pk, row in ours.items():
        answer = answers[pk]
        found = (row.subscription_id, row.body, answer.provider_message_id if answer else "")
        if found in adopted:
            # Two with the same words, found by them: one of the two was taken. The other is asked after once more.
            unanswered.append(row)
        elif answer is not None and answer.outcome in ("accepted", "rejected"):
            settle(row, answer, now=now)
            counts[answer.outcome] += 1
            if answer.provider_message_id:
                adopted.add(found)
        elif answer is not None and answer.code == "not_found" and _never_taken(attempts[pk], now):
            again.append(row)
        else:
            unanswered.append(row)
    let_go(again, "send_again_not_found")
    _ask_later(unanswered, attempts, now)
    return counts + Counter(repeated=len(again), asked_later=len(unanswered))


def _never_taken(attempt: dict[str, Any], now: datetime) -> bool:
    """That it is not listed proves something only when the list has had its time and nobody called it a repeat."""
    return attempt["last_started"] <= now - LIST_LAG and not attempt["taken"]


def _ask_later(rows: Sequence[Message], attempts: dict[UUID, dict[str, Any]], now: datetime) -> None:
    waits: dict[timedelta, list[UUID]] = {}
    for row in rows:
        age = now - attempts[row.pk]["last_started"]
        wait = LIST_LAG if age < LIST_LAG else NEXT_QUESTION if age < SOON else LATER_QUESTION
        waits.setdefault(wait, []).append(row.pk)
    for wait, found in waits.items():
        Message.objects.filter(pk__in=found).update(next_attempt_at=now + wait, lease_id=None, leased_until=None)


def settle(row: Message, answer: Answer, *, now: datetime) -> None:
    """The outcome is known now: the locked message and its last attempt say so."""
    if answer.outcome == "accepted":
        row.send(now)
    else:
        verdict = failed(answer, answer.error_reason or "rejected", now)
        row.fail(now, str(verdict.error_reason))
        row.error_details, row.failure_type = verdict.error_details or {}, verdict.failure_type
    row.hold_reason = row.next_attempt_at = row.lease_id = row.leased_until = None
    row.provider_message_id = clean(answer.provider_message_id, 255) or row.provider_message_id
    row.save(
        update_fields=[
            "status", "sent_at", "failed_at", "error_reason", "error_details", "failure_type", "hold_reason",
            "next_attempt_at", "lease_id", "leased_until", "provider_message_id",
        ]
    )  # fmt: skip
    MessageAttempt.objects.filter(message=row, attempt_no=row.attempt_count, outcome="unknown").update(
        outcome=answer.outcome, code=clean(answer.code, 100), provider_message_id=row.provider_message_id
    )
    record([decide("resolve_unknown", row, before={}, after={"status": row.status}, inputs={"code": answer.code})])
    if answer.outcome == "rejected":
        punish([(row, answer)], now=now)


OPERATOR = {
    "accepted": Answer("accepted", code="operator"),
    "rejected": Answer("rejected", "permanent", "message", "operator", error_reason="rejected"),
}


@transaction.atomic
def resolve_message(pk: UUID, outcome: str, *, now: datetime) -> Message:
    """An operator's word on a message whose outcome is unknown."""
    row = Message.objects.select_for_update(of=("self",)).get(pk=pk)
    if row.status != Message.Status.PENDING or row.hold_reason != HoldReason.OUTCOME_UNKNOWN:
        raise Conflict("This message's outcome is not unknown.", code="not_unknown")
    settle(row, OPERATOR[outcome], now=now)
    return row
