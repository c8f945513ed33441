"""Write down what became of a batch: only where the claim is still ours."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection, transaction

from config.decisions import decide, record
from reminders.models import Alarm, AlarmDelivery
from reminders.services.claiming import Claim, Owner, zones_of
from reminders.services.reporting import report
from reminders.services.settling import SUPERSEDED
from reminders.services.texts import Words
from reminders.services.times import Random, after_sleep, next_time, resolve_alarm_time_conflict, retry_time

State = AlarmDelivery.State
DEADLOCK = "40P01"
TRIES = 5


@dataclass(frozen=True)
class Result:
    """What became of a claim: deferred, sent (a message), unknown, or else refused for a reason."""

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


def record_results(results: Sequence[Result], now: datetime, random: Random, run_id: UUID | None) -> dict[str, int]:
    """A batch somebody else's locks got in the way of is written again; lost, it would wait six hours for rescue."""
    for attempt in range(1, TRIES + 1):
        try:
            return _record(results, now, random, run_id)
        except DatabaseError as error:
            deadlock = getattr(error.__cause__, "sqlstate", "") == DEADLOCK
            if not deadlock or attempt == TRIES:
                report("batch_update_failed", error=type(error).__name__, alarms=len(results))
                raise
    raise AssertionError("unreachable")


@transaction.atomic
def _record(results: Sequence[Result], now: datetime, random: Random, run_id: UUID | None) -> dict[str, int]:
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
    WITH result AS (
        SELECT * FROM unnest(%s::uuid[], %s::int[], %s::timestamptz[], %s::uuid[], %s::text[], %s::text[], %s::int[],
                             %s::timestamptz[])
            AS result (id, occurrence, next_alarm_time, message_id, title, body, refusals, retry_at)
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
    columns = zip(*(_changes(result, times, now) for result in results), strict=True)
    if not results:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(UPDATE, [*map(list, columns), now])
        return {pk for (pk,) in cursor.fetchall()}


def _changes(result: Result, times: dict[UUID, datetime], now: datetime) -> tuple[Any, ...]:
    """Occurrence claimed, next time, message, title, body, refusals in a row, time of the next try."""
    claim, words = result.claim, result.words if result.message_id else None
    refusals, retry_at = 0, None
    if result.outcome == "failed":
        refusals, retry_at = claim.refusals + 1, retry_time(claim.refusals + 1, now)
    elif result.deferred:
        refusals = claim.refusals
    return (
        claim.alarm_id,
        claim.occurrence,
        times.get(claim.alarm_id),
        result.message_id,
        words.title if words else None,
        words.body if words else None,
        refusals,
        retry_at,
    )


def close_deliveries(results: Sequence[Result], held: set[UUID], now: datetime) -> None:
    """Sent is sent, also where the alarm was lost meanwhile. A deferred zombie's old delivery may have arrived."""
    rows = [
        _ending(result, result.claim.alarm_id in held)
        for result in results
        if not result.deferred or result.claim.dead_claim
    ]
    if not rows:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            """
            UPDATE alarm_delivery AS delivery
               SET state = ending.state, message_id = ending.message_id, reason = ending.reason, ended_at = %s
              FROM unnest(%s::text[], %s::text[], %s::uuid[], %s::text[]) AS ending (key, state, message_id, reason)
             WHERE delivery.idempotency_key = ending.key AND delivery.state = 'claimed'
            """,
            [now, *(list(column) for column in zip(*rows, strict=True))],
        )


def _ending(result: Result, held: bool) -> tuple[str, str, UUID | None, str]:
    key = result.claim.key
    if result.message_id:
        return key, State.SENT, result.message_id, ""
    if result.unknown or result.deferred:
        return key, State.UNKNOWN, None, result.reason
    return key, State.FAILED, None, result.reason if held else SUPERSEDED


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
