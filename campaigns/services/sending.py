"""Due steps become messages: as many as each sender may send now, fair between sequences, never twice.

Claim, message and mark are one transaction: after a crash at any line there is either nothing or all of it. What a
sender cannot send now is deferred to when it can, in one statement, so that a throttled row never looks forgotten.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from campaigns.models import Execution, Sender, Sequence
from campaigns.models.sequences import STALE_AFTER
from campaigns.services.completion import settle
from campaigns.services.drafts import Drafts
from campaigns.services.following import end_failed, finish
from campaigns.services.leads import look_again
from campaigns.services.rows import Ledger, grouped, lock_sequences, skip_and_stop
from campaigns.services.windows import (
    EARLY,
    FURTHEST,
    TICK,
    Allowance,
    allowance,
    longest_gap,
    opening,
    pace,
    periods,
    slots,
    spaced,
)
from messaging.services import Outcome, enqueue_messages

# Rows of one sender in one transaction; the sweep comes round again as long as there is time.
BATCH = 500
# What is stale is neither sent nor deferred (that would make it fresh): the reconciler skips it.
DUE = f"""
    FROM sequence_step_executions x
    JOIN sequence_enrollments e ON e.id = x.enrollment_id AND e.status = 'active'
    JOIN sequences s ON s.id = e.sequence_id AND s.status = 'active'
    JOIN sequence_steps p ON p.id = x.step_id
    JOIN leads l ON l.id = e.lead_id
   WHERE x.status IN ('pending', 'deferred') AND coalesce(x.deferred_until, x.scheduled_at) <= %(now)s
     AND e.sender_id = ANY(%(senders)s::uuid[]) AND (%(only)s::uuid[] IS NULL OR x.id = ANY(%(only)s::uuid[]))
     AND (p.stale_policy = 'send_late' OR coalesce(x.deferred_until, x.scheduled_at) >= %(now)s - {STALE_AFTER})
"""
BARRED = {"suppressed", "unsubscribed", "not_sendable", "no_consent"}
# Not the step's fault and not for good: it waits.
LATER = {"quota_exceeded", "channel_not_configured", "application_inactive"}
PATIENCE = timedelta(hours=1)
Usage = tuple[int, int, datetime | None]
# What may become of a due step that had its turn.
TAKEN = ("claimed", "parked", "barred", "later", "broken")


def with_due_steps(now: datetime) -> Any:
    """Healthy senders that have something to send."""
    due = Execution.objects.due(now).values("enrollment__sender_id")
    return Sender.objects.healthy().filter(pk__in=due)


@dataclass(frozen=True)
class Round:
    """What all the steps of one transaction share. `only`: of these rows, to find the one that spoils the others."""

    now: datetime
    ledger: Ledger
    only: list[UUID] | None = None

    def of(self, senders: Collection[UUID]) -> dict[str, Any]:
        """The parameters of DUE."""
        return {"now": self.now, "senders": list(senders), "only": self.only}


@dataclass
class Turn:
    """What one sender may do in this tick."""

    sender: Sender
    allowance: Allowance
    moments: list[datetime] = field(default_factory=list)
    claimed: int = 0

    @property
    def exhausted(self) -> bool:
        return self.allowance.left is not None and self.claimed >= self.allowance.left

    @property
    def last_at(self) -> datetime | None:
        return self.moments[self.claimed - 1] if self.claimed else self.allowance.last_at


def send_due(
    sender_ids: Collection[UUID], now: datetime, run_id: UUID | None = None, only: list[UUID] | None = None
) -> Counter[str]:
    """One transaction for these senders. A sender another worker is at is left to it."""
    with transaction.atomic():
        rows = Sender.objects.healthy().filter(pk__in=list(sender_ids)).order_by("pk")
        senders = {row.pk: row for row in rows.select_for_update(no_key=True, skip_locked=True)}
        if not senders:
            return Counter()
        this = Round(now, Ledger(now, run_id), only)
        done: Counter[str] = Counter(deferred=defer_closed(senders, this))
        turns = {pk: take_turn(senders[pk], used, now) for pk, used in usage(senders.values(), now).items()}
        done.update(claim(turns, this))
        done["deferred"] += defer_rest(turns, this)
        this.ledger.write()
    return +done


def take_turn(sender: Sender, used: Usage, now: datetime) -> Turn:
    """`moments`: when each of this tick's messages may go; as many as allowance, gap and batch permit."""
    turn = Turn(sender, allowance(sender, now, *used))
    most = BATCH if turn.allowance.left is None else min(BATCH, turn.allowance.left)
    if spaced(sender):
        ahead = takewhile(lambda at: at < now + TICK, slots(sender, now, turn.allowance.last_at))
        turn.moments = [at for at, _place in zip(ahead, range(most), strict=False)]
        # Before its gap has passed a sender claims nothing, however soon that will be.
        if turn.moments and turn.moments[0] >= now + EARLY:
            turn.moments = []
    else:
        turn.moments = [now] * most
    return turn


def usage(senders: Collection[Sender], now: datetime) -> dict[UUID, Usage]:
    """How many each has claimed in its calendar day and hour, and for when the last one.

    Rows claimed elsewhere count for the enrollment's sender, rows written by hand from when they were executed.
    """
    when = {sender.pk: periods(sender, now) for sender in senders}
    earliest = [min(when[sender.pk].day_start, now - longest_gap(sender)) for sender in senders]
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT v.sender, count(*) FILTER (WHERE x.at >= v.day_start AND x.at < v.day_end),
                   count(*) FILTER (WHERE x.at >= v.hour_start AND x.at < v.hour_end), max(x.at)
              FROM unnest(%(senders)s::uuid[], %(d1)s::timestamptz[], %(d2)s::timestamptz[], %(h1)s::timestamptz[],
                          %(h2)s::timestamptz[]) v(sender, day_start, day_end, hour_start, hour_end)
              JOIN (SELECT coalesce(x.processing_started_at, x.executed_at) AS at,
                           coalesce(x.sender_id, e.sender_id) AS sender
                      FROM sequence_step_executions x JOIN sequence_enrollments e ON e.id = x.enrollment_id
                     WHERE coalesce(x.processing_started_at, x.executed_at) >= %(earliest)s) x ON x.sender = v.sender
             GROUP BY v.sender
            """,
            {
                "senders": list(when),
                "d1": [period.day_start for period in when.values()],
                "d2": [period.day_end for period in when.values()],
                "h1": [period.hour_start for period in when.values()],
                "h2": [period.hour_end for period in when.values()],
                "earliest": min(earliest),
            },
        )
        found = {pk: (today, hour, last) for pk, today, hour, last in cursor.fetchall()}
    return {pk: found.get(pk, (0, 0, None)) for pk in when}


def due_zones(senders: Collection[UUID], this: Round) -> list[tuple[UUID, str]]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT DISTINCT e.sender_id, l.time_zone {DUE}", this.of(senders))
        return list(cursor.fetchall())


def defer_closed(senders: dict[UUID, Sender], this: Round) -> int:
    """Outside the window nothing is allowed: what is due waits for the opening in the lead's (or sender's) zone."""
    found = {(pk, zone): opening(senders[pk], zone, this.now) for pk, zone in due_zones(senders, this)}
    return defer({key: at for key, at in found.items() if at > this.now}, this, "send.window_closed")


# How many rows of which sequence an UPDATE named `moved` deferred, and between which ids.
TOLD = "SELECT sequence_id, count(*), min(id::text), max(id::text) FROM moved GROUP BY sequence_id ORDER BY sequence_id"


def tell_deferred(cursor: Any, ledger: Ledger, rule: str) -> int:
    rows = cursor.fetchall()
    ledger.counted(rule, rows, before={"status": "due"}, after={"status": "deferred"})
    return sum(count for _sequence, count, _first, _last in rows)


def defer(openings: dict[tuple[UUID, str], datetime], this: Round, rule: str) -> int:
    """Every due row of a (sender, lead's zone) to its moment. One statement, however many rows."""
    if not openings:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH ripe AS MATERIALIZED (
                SELECT x.id, e.sequence_id, v.at {
                DUE.replace(
                    "WHERE",
                    '''
                  JOIN unnest(%(owners)s::uuid[], %(zones)s::text[], %(moments)s::timestamptz[]) v(sender, zone, at)
                    ON v.sender = e.sender_id AND v.zone = l.time_zone WHERE''',
                )
            }
                   FOR UPDATE OF x SKIP LOCKED),
            moved AS (
                UPDATE sequence_step_executions x SET status = 'deferred', deferred_until = ripe.at
                  FROM ripe WHERE x.id = ripe.id RETURNING x.id, ripe.sequence_id)
            {TOLD}
            """,
            {
                **this.of({pk for pk, _zone in openings}),
                "owners": [pk for pk, _zone in openings],
                "zones": [zone for _pk, zone in openings],
                "moments": list(openings.values()),
            },
        )
        return tell_deferred(cursor, this.ledger, rule)


def claim(turns: dict[UUID, Turn], this: Round) -> Counter[str]:
    now, ledger = this.now, this.ledger
    places = candidates({pk: len(turn.moments) for pk, turn in turns.items()}, this)
    if not places:
        return Counter()
    # A sequence is paused, completed or edited under this lock: after it nobody's message comes from an old state. One
    # that somebody holds has its turn later; to wait for it would stop the others, and deferred rows are ours already.
    free = lock_sequences({sequence for _pk, _sender, sequence in places}, skip_locked=True)
    rows = {
        row.pk: row
        for row in Execution.objects.due(now)
        .of([sequence.pk for sequence in free])
        .filter(pk__in=[pk for pk, _sender, _sequence in places])
        .select_related("step", "enrollment__lead", "enrollment__sequence", "enrollment__sender")
        .select_for_update(of=("self",), skip_locked=True)
    }
    mine = [rows[pk] for pk, sender, _sequence in places if pk in rows and rows[pk].enrollment.sender_id == sender]
    drafts = Drafts(mine, now)
    park(drafts.incomplete, ledger)
    planned = []
    for row in drafts.complete:
        turn = turns[row.enrollment.sender_id]  # type: ignore[index]
        planned.append((row, turn.moments[turn.claimed]))
        turn.claimed += 1
    start(planned)
    outcomes = enqueue_messages([drafts.of(row, at, now) for row, at in planned], now=now)
    done = settle_outcomes([(row, outcome) for (row, _at), outcome in zip(planned, outcomes, strict=True)], now, ledger)
    for (row, _at), outcome in zip(planned, outcomes, strict=True):
        # Nobody was written to: the allowance is still there, for the next round of this tick.
        turns[row.enrollment.sender_id].claimed -= outcome.code in BARRED | LATER  # type: ignore[index]
    done["parked"] = len(drafts.incomplete)
    settle({row.enrollment.sequence_id for row in mine}, now, ledger)
    return done


def candidates(most: dict[UUID, int], this: Round) -> list[tuple[UUID, UUID, UUID]]:
    """(execution, sender, sequence), in the order they go: each sequence in turn, the oldest due of each first."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            SELECT id, sender_id, sequence_id
              FROM (SELECT *, row_number() OVER (PARTITION BY sender_id ORDER BY turn, due, id) AS place
                      FROM (SELECT x.id, e.sender_id, e.sequence_id, coalesce(x.deferred_until, x.scheduled_at) AS due,
                                   row_number() OVER (PARTITION BY e.sender_id, e.sequence_id
                                                      ORDER BY coalesce(x.deferred_until, x.scheduled_at),
                                                               x.scheduled_at, x.id) AS turn
                              {DUE}) each_sequence) each_sender
              JOIN unnest(%(senders)s::uuid[], %(most)s::int[]) v(sender, most) ON v.sender = sender_id
             WHERE place <= v.most
             ORDER BY place, id
            """,
            {**this.of(most), "most": list(most.values())},
        )
        return list(cursor.fetchall())


def park(rows: list[Execution], ledger: Ledger) -> None:
    """What the lead lacks by now it may get later; nobody but whoever completes the lead moves it again."""
    Execution.objects.filter(pk__in=[row.pk for row in rows]).update(status="awaiting_enrichment")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row in rows)
    ledger.bulk("send.parked", keys, before={"status": "due"}, after={"status": "awaiting_enrichment"})
    look_again(rows)


def start(planned: list[tuple[Execution, datetime]]) -> None:
    """Each from the moment it may go: what the next gap is counted from."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_step_executions x"
            "   SET status = 'processing', processing_started_at = v.at, sender_id = v.sender"
            " FROM unnest(%s::uuid[], %s::uuid[], %s::timestamptz[]) v(id, sender, at) WHERE x.id = v.id",
            [
                [row.pk for row, _at in planned],
                [row.enrollment.sender_id for row, _at in planned],
                [at for _row, at in planned],
            ],
        )


def settle_outcomes(pairs: list[tuple[Execution, Outcome]], now: datetime, ledger: Ledger) -> Counter[str]:
    """What messaging said to each: a message, a barred recipient, not now, or a step that cannot be sent."""
    sorted_out: dict[str, list[tuple[Execution, Outcome]]] = defaultdict(list)
    for row, outcome in pairs:
        code = outcome.code
        kind = "claimed" if code is None else "barred" if code in BARRED else "later" if code in LATER else "broken"
        sorted_out[kind].append((row, outcome))
    link(sorted_out["claimed"], ledger)
    bar([row for row, _outcome in sorted_out["barred"]], now, ledger)
    postpone(sorted_out["later"], now, ledger)
    break_off(sorted_out["broken"], now, ledger)
    return Counter({kind: len(found) for kind, found in sorted_out.items()})


def link(pairs: list[tuple[Execution, Outcome]], ledger: Ledger) -> None:
    if not pairs:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_step_executions x SET message_id = v.message"
            "  FROM unnest(%s::uuid[], %s::uuid[]) v(id, message) WHERE x.id = v.id",
            [[row.pk for row, _outcome in pairs], [outcome.message_id for _row, outcome in pairs]],
        )
    keys = grouped((row.enrollment.sequence_id, row.pk) for row, _outcome in pairs)
    ledger.bulk("send.claimed", keys, before={"status": "due"}, after={"status": "processing"})


def bar(rows: list[Execution], now: datetime, ledger: Ledger) -> None:
    """Never counted as claimed: nobody was written to."""
    if not rows:
        return
    found = Execution.objects.filter(pk__in=[row.pk for row in rows])
    skip_and_stop(found, "suppressed", now, ledger, "send")
    found.update(processing_started_at=None, sender_id=None)


def skip_suppressed(sequence_ids: Collection[UUID], now: datetime, run_id: UUID | None = None) -> Counter[str]:
    """Due steps to people who must not be written to, whatever their sender may send."""
    with transaction.atomic():
        locked = [row.pk for row in lock_sequences(sequence_ids, skip_locked=True)]
        ledger = Ledger(now, run_id)
        rows = Execution.objects.due(now).of(locked).to_suppressed()
        skipped = skip_and_stop(rows, "suppressed", now, ledger, "send", wait=False)
        settle(locked, now, ledger)
    return +Counter(suppressed=skipped)


def postpone(pairs: list[tuple[Execution, Outcome]], now: datetime, ledger: Ledger) -> None:
    if not pairs:
        return
    waits = [now + (timedelta(seconds=o.retry_after) if o.retry_after else PATIENCE) for _row, o in pairs]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_step_executions x SET status = 'pending', processing_started_at = NULL, sender_id = NULL,"
            " deferred_until = v.at FROM unnest(%s::uuid[], %s::timestamptz[]) v(id, at) WHERE x.id = v.id",
            [[row.pk for row, _outcome in pairs], waits],
        )
    keys = grouped((row.enrollment.sequence_id, row.pk) for row, _outcome in pairs)
    inputs = {"codes": sorted({str(outcome.code) for _row, outcome in pairs})}
    ledger.bulk("send.postponed", keys, before={"status": "due"}, after={"status": "pending"}, inputs=inputs)
    for detail in {outcome.detail for _row, outcome in pairs if outcome.code == "channel_not_configured"}:
        told = [row.enrollment.sender_id for row, outcome in pairs if outcome.detail == detail]
        Sender.objects.filter(pk__in=[pk for pk in told if pk]).update(last_error=detail)


def break_off(pairs: list[tuple[Execution, Outcome]], now: datetime, ledger: Ledger) -> None:
    if not pairs:
        return
    finish([(row.pk, now, f"{outcome.code}: {outcome.detail}"[:255]) for row, outcome in pairs], "failed")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row, _outcome in pairs)
    ledger.bulk("send.failed", keys, before={"status": "due"}, after={"status": "failed"})
    end_failed({row.enrollment_id for row, _outcome in pairs}, "failed", now, ledger, "send")


def defer_rest(turns: dict[UUID, Turn], this: Round) -> int:
    """What is due and cannot go: after a used-up allowance to the next window, behind a gap to its own slot."""
    used_up = {pk: turn for pk, turn in turns.items() if turn.exhausted}
    openings = {
        (pk, zone): opening(turns[pk].sender, zone, turns[pk].allowance.again_at)
        for pk, zone in due_zones(used_up, this)
    }
    waiting = {pk: turn for pk, turn in turns.items() if spaced(turn.sender) and not turn.exhausted}
    return defer(openings, this, "send.allowance_used_up") + queue_behind_gap(waiting, this)


def queue_behind_gap(turns: dict[UUID, Turn], this: Round) -> int:
    """Each due row to the tick that will hand out its slot, in its turn."""
    if not turns:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH due AS (
                SELECT x.id, e.sequence_id, e.sender_id, row_number() OVER (PARTITION BY e.sender_id
                       ORDER BY coalesce(x.deferred_until, x.scheduled_at), x.id) - 1 AS place {DUE}),
            placed AS (
                SELECT due.id, due.sequence_id,
                       v.first + make_interval(secs =>
                           floor(least(v.gap * due.place, %(furthest)s) / %(tick)s) * %(tick)s - %(early)s) AS at
                  FROM due
                  JOIN unnest(%(senders)s::uuid[], %(first)s::timestamptz[], %(gap)s::float[]) v(sender, first, gap)
                    ON v.sender = due.sender_id),
            ripe AS MATERIALIZED (
                SELECT x.id, placed.sequence_id, placed.at
                  FROM sequence_step_executions x JOIN placed ON placed.id = x.id
                 WHERE placed.at > %(now)s AND x.status IN ('pending', 'deferred') FOR UPDATE OF x SKIP LOCKED),
            moved AS (
                UPDATE sequence_step_executions x SET status = 'deferred', deferred_until = ripe.at
                  FROM ripe WHERE x.id = ripe.id RETURNING x.id, ripe.sequence_id)
            {TOLD}
            """,
            {
                **this.of(turns),
                "furthest": FURTHEST.total_seconds(),
                "tick": TICK.total_seconds(),
                "early": EARLY.total_seconds(),
                "first": [next(slots(turn.sender, this.now, turn.last_at)) for turn in turns.values()],
                "gap": [pace(turn.sender).total_seconds() for turn in turns.values()],
            },
        )
        return tell_deferred(cursor, this.ledger, "send.behind_gap")


def due_of(sender_id: UUID, now: datetime) -> Any:
    return Execution.objects.due(now).filter(enrollment__sender=sender_id)


def pending_sequences(now: datetime) -> Any:
    """Sequences with due steps to suppressed people. DISTINCT, or every step of every sequence would be looked at."""
    suppressed = Execution.objects.due(now).to_suppressed()
    return Sequence.objects.filter(pk__in=suppressed.values("enrollment__sequence_id").distinct())
