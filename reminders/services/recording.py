"""Write down what became of a batch: only where the claim is still ours."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import DatabaseError, OperationalError, connection, transaction

from config.decisions import decide, record
from reminders.models import Alarm, AlarmDelivery
from reminders.services.claiming import Claim, Owner, despite_deadlocks, zones_of
from reminders.services.reporting import report
from reminders.services.settling import SUPERSEDED
from reminders.services.texts import Words
from reminders.services.times import Random, after_sleep, next_time, resolve_alarm_time_conflict, retry_time

State = AlarmDelivery.State


@dataclass(frozen=True)
class Result:
    """What became of a claim: deferred, sent (a message), unknown, or else refused for a reason.

    Without words a message is one that a dead worker sent.
    """

    claim: Claim
    words: Words | None = None
    message_id: UUID | None = None
    reason: str = ""
    deferred: bool = False
    unknown: bool = False

    @property
    def outcome(self) -> str:
        if self.deferred:
            return "deferred"
        return "sent" if self.message_id else "failed"


def record_results(results: Sequence[Result], now: datetime, random: Random, run_id: UUID | None) -> Counter[str]:
    """One the database cannot take is found by halving: it keeps its claim, as if its answer were lost."""
    try:
        return despite_deadlocks(lambda: _record(results, now, random, run_id))
    except DatabaseError as error:
        report("batch_update_failed", error=type(error).__name__, alarms=len(results))
        # No row's fault: a lost connection, a timeout.
        if isinstance(error, OperationalError):
            raise
    if len(results) == 1:
        return Counter(failed=1)
    middle = len(results) // 2
    parts = (record_results(part, now, random, run_id) for part in (results[:middle], results[middle:]))
    return sum(parts, Counter())


@transaction.atomic
def _record(results: Sequence[Result], now: datetime, random: Random, run_id: UUID | None) -> Counter[str]:
    times = choose_times([result for result in results if result.deferred or result.message_id], now, random)
    held = update_alarms([result for result in results if not result.unknown], times, now)
    close_deliveries(results, held, now)
    tell_deferrals([result.claim for result in results if result.deferred], held, times, run_id)
    return Counter(
        result.outcome if result.unknown or result.claim.alarm_id in held else "skipped" for result in results
    )


def choose_times(results: Sequence[Result], now: datetime, random: Random) -> dict[UUID, datetime]:
    """No two alarms of a user at one time: the users are locked, so what others chose for them is seen."""
    zones = zones_of([result.claim.owner for result in results], lock=True)
    taken = taken_times(zones, now)
    times: dict[UUID, datetime] = {}
    for result in results:
        claim, zone = result.claim, zones[result.claim.owner]
        wanted = after_sleep(now, zone) if result.deferred else next_time(claim.due, claim.sent_count, now, zone)
        at = resolve_alarm_time_conflict(wanted, taken[claim.owner], zone, random)
        taken[claim.owner].add(at)
        times[claim.alarm_id] = at
    return times


def taken_times(owners: Iterable[Owner], now: datetime) -> dict[Owner, set[datetime]]:
    """The users' times to come; by pairs, which the ORM cannot ask for."""
    taken: dict[Owner, set[datetime]] = {owner: set() for owner in owners}
    if not taken:
        return {}
    applications, users = (list(values) for values in zip(*taken, strict=True))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT alarm.application_id, alarm.user_id, next_alarm_time"
            " FROM unnest(%s::uuid[], %s::text[]) AS owner (application_id, user_id)"
            " JOIN alarm ON (alarm.application_id, alarm.user_id) = (owner.application_id, owner.user_id)"
            " WHERE next_alarm_time > %s",
            [applications, users, now],
        )
        for application, user, at in cursor.fetchall():
            taken[application, user].add(at)
    return taken


UPDATE = """
    WITH result AS MATERIALIZED (
        SELECT * FROM json_to_recordset(%s::json)
            AS result (id uuid, occurrence int, next_alarm_time timestamptz, message_id uuid, title text, body text,
                       refusals int, retry_at timestamptz)
    ), held AS MATERIALIZED (
        SELECT alarm.id FROM alarm JOIN result USING (id)
         WHERE alarm.processed_at = %s AND alarm.occurrence = result.occurrence
         ORDER BY alarm.id FOR NO KEY UPDATE OF alarm
    )
    UPDATE alarm
       SET next_alarm_time = coalesce(result.next_alarm_time, alarm.next_alarm_time),
           sent_count = alarm.sent_count + (result.message_id IS NOT NULL)::int,
           occurrence = alarm.occurrence + (result.message_id IS NOT NULL)::int,
           last_notification_id = coalesce(result.message_id, alarm.last_notification_id),
           title = coalesce(result.title, alarm.title), body = coalesce(result.body, alarm.body),
           refusals = result.refusals, retry_at = result.retry_at, processed_at = NULL
      FROM result JOIN held USING (id) WHERE alarm.id = result.id
    RETURNING alarm.id
"""


def update_alarms(results: Sequence[Result], times: dict[UUID, datetime], now: datetime) -> set[UUID]:
    """One statement for all, guarded by claim and occurrence; locked in order, so a pages' sync cannot deadlock with
    it. Answers with the alarms that were still ours."""
    if not results:
        return set()
    rows = [_changes(result, times, now) for result in results]
    with connection.cursor() as cursor:
        cursor.execute(UPDATE, [json.dumps(rows, default=str), now])
        return {pk for (pk,) in cursor.fetchall()}


def _changes(result: Result, times: dict[UUID, datetime], now: datetime) -> dict[str, Any]:
    """What to write; what is left out stays as it is."""
    claim = result.claim
    row: dict[str, Any] = {"id": claim.alarm_id, "occurrence": claim.occurrence, "refusals": 0}
    if result.outcome == "failed":
        refusals = claim.refusals + 1
        return {**row, "refusals": refusals, "retry_at": retry_time(refusals, now)}
    row["next_alarm_time"] = times[claim.alarm_id]
    if result.deferred:
        return {**row, "refusals": claim.refusals}
    row["message_id"] = result.message_id
    return {**row, "title": result.words.title, "body": result.words.body} if result.words else row


def close_deliveries(results: Sequence[Result], held: set[UUID], now: datetime) -> None:
    """Sent is sent, also where the alarm was lost meanwhile. A deferred zombie's old delivery may have arrived."""
    rows = [
        _ending(result, result.claim.alarm_id in held)
        for result in results
        if not result.deferred or result.claim.dead_claim
    ]
    if not rows:
        return
    reopen([result.claim.key for result in results if result.message_id and result.claim.alarm_id not in held])
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE alarm_delivery AS delivery
               SET state = ending.state, message_id = ending.message_id, reason = ending.reason, ended_at = %s
              FROM json_to_recordset(%s::json) AS ending (key text, state text, message_id uuid, reason text)
             WHERE delivery.idempotency_key = ending.key AND delivery.state = 'claimed'
            """,
            [now, json.dumps(rows, default=str)],
        )


def reopen(keys: Sequence[str]) -> None:
    """Who took a slow worker for dead may have given up a delivery that was sent after all."""
    if keys:
        given_up = AlarmDelivery.objects.filter(idempotency_key__in=keys, state__in=[State.FAILED, State.UNKNOWN])
        given_up.update(state=State.CLAIMED)


def _ending(result: Result, held: bool) -> dict[str, Any]:
    key = result.claim.key
    if result.message_id:
        return {"key": key, "state": State.SENT, "message_id": result.message_id, "reason": ""}
    if result.unknown or result.deferred:
        return {"key": key, "state": State.UNKNOWN, "reason": result.reason}
    return {"key": key, "state": State.FAILED, "reason": result.reason if held else SUPERSEDED}


def tell_deferrals(claims: Sequence[Claim], held: set[UUID], times: dict[UUID, datetime], run_id: UUID | None) -> None:
    deferred = [
        decide(
            "defer_to_morning",
            Alarm(pk=claim.alarm_id),
            before={"next_alarm_time": claim.due.isoformat() if claim.due else None},
            after={"next_alarm_time": times[claim.alarm_id].isoformat()},
            run_id=run_id,
            won=claim.alarm_id in held,
        )
        for claim in claims
    ]
    if deferred:
        record(deferred)
