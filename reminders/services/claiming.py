"""Take due alarms, so that nobody else does, and open a delivery for each that will be sent."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Left, Length
from uuid_utils.compat import uuid7

from config.decisions import decide, record
from reminders.models import Alarm, Page, zone_of
from reminders.services.settling import messages_under
from reminders.services.texts import Words, plain_body, plain_start, plain_title
from reminders.services.times import is_night

# Of a long page only so much is read at first: a thousand pages must not bring a gigabyte into memory.
BEGINNING = 20_000
DEADLOCK, TRIES = "40P01", 4
T = TypeVar("T")

Owner = tuple[UUID, str]


@dataclass(frozen=True)
class Claim:
    """An alarm that is ours until it is recorded; its columns as they were when it was taken."""

    alarm_id: UUID
    application_id: UUID
    user_id: str
    page_id: str
    due: datetime | None
    sent_count: int
    occurrence: int
    refusals: int
    dead_claim: datetime | None

    @property
    def key(self) -> str:
        return f"reminder:{self.alarm_id}:{self.occurrence}"

    @property
    def owner(self) -> Owner:
        return self.application_id, self.user_id


COLUMNS = (
    "pk", "application_id", "user_id", "page_id", "next_alarm_time", "sent_count", "occurrence", "refusals",
    "processed_at",
)  # fmt: skip


@transaction.atomic
def claim_alarms(now: datetime, limit: int, run_id: UUID | None = None) -> tuple[list[Claim], list[Claim]]:
    """Those to send, each with an open delivery, and those the night defers."""
    claims = lock_due(now, limit)
    Alarm.objects.filter(pk__any=[claim.alarm_id for claim in claims]).update(processed_at=now)
    zones = zones_of({claim.owner for claim in claims if claim.sent_count > 1})
    sending: list[Claim] = []
    deferred: list[Claim] = []
    for claim in claims:
        night = claim.owner in zones and sleeps(claim, zones[claim.owner], now)
        (deferred if night else sending).append(claim)
    sending = open_deliveries(sending, now)
    tell_rescues(claims, now, run_id)
    return sending, deferred


def sleeps(claim: Claim, zone: ZoneInfo, now: datetime) -> bool:
    """The night belongs to the user, but for the first time: then they have just asked."""
    return claim.sent_count > 1 and is_night(now, zone)


def lock_due(now: datetime, limit: int) -> list[Claim]:
    rows = Alarm.objects.takeable(now).select_for_update(skip_locked=True).values_list(*COLUMNS)
    by_time = rows.filter(next_alarm_time__lte=now).order_by(F("next_alarm_time").asc(nulls_first=True), "pk")
    claims = [Claim(*row) for row in by_time[:limit]]
    if len(claims) < limit:
        # Apart, because one query for both would walk the index through all times to come.
        claims += [Claim(*row) for row in rows.filter(next_alarm_time=None)[: limit - len(claims)]]
    return claims


def zones_of(owners: Iterable[Owner], lock: bool = False) -> dict[Owner, ZoneInfo]:
    """The users' zones; with `lock`, nobody else chooses times for them until the transaction ends.

    By pairs, which the ORM cannot ask for; in the order of the keys, so two batches cannot block each other for good.
    """
    wanted = dict.fromkeys(owners)
    if not wanted:
        return {}
    applications, users = (list(values) for values in zip(*wanted, strict=True))
    with connection.cursor() as cursor:
        cursor.execute(LOCK_USERS if lock else READ_USERS, [applications, users])
        rows = cursor.fetchall()
        if lock and len(rows) < len(wanted):
            cursor.execute(MAKE_MISSING_USERS, [applications, users])
            # Read again: a register may have made the user meanwhile, in a zone of its own.
            cursor.execute(LOCK_USERS, [applications, users])
            rows = cursor.fetchall()
    known = {(application, user): name for application, user, name in rows}
    return {owner: zone_of(known.get(owner)) for owner in wanted}


READ_USERS = """
    SELECT application_id, user_id, timezone FROM user_info
     WHERE (application_id, user_id) IN (SELECT * FROM unnest(%s::uuid[], %s::text[]))
"""
LOCK_USERS = READ_USERS + " ORDER BY application_id, user_id FOR NO KEY UPDATE"
MAKE_MISSING_USERS = """
    INSERT INTO user_info (application_id, user_id)
    SELECT * FROM unnest(%s::uuid[], %s::text[]) AS wanted (application_id, user_id)
     WHERE NOT EXISTS (SELECT FROM user_info AS known
                        WHERE (known.application_id, known.user_id) = (wanted.application_id, wanted.user_id))
     ORDER BY application_id, user_id
    ON CONFLICT DO NOTHING
"""


def open_deliveries(claims: list[Claim], now: datetime) -> list[Claim]:
    """One per occurrence: a retry or a rescue opens the same one again.

    What was sent is not opened. Where messaging holds the message, all that is missing is its record; where it does
    not, a person wrote it down, and the next occurrence is due.
    """
    opened = _open(claims, now)
    used = {claim.key: claim for claim in claims if claim.key not in opened}
    if not used:
        return claims
    known = messages_under(used, {claim.application_id for claim in used.values()})
    moved = {
        claim.alarm_id: replace(claim, occurrence=claim.occurrence + 1)
        for claim in used.values()
        if claim.key not in known
    }
    Alarm.objects.filter(pk__in=moved).update(occurrence=F("occurrence") + 1)
    _open(moved.values(), now)
    return [moved.get(claim.alarm_id, claim) for claim in claims]


def _open(claims: Collection[Claim], now: datetime) -> set[str]:
    """The keys of those that are open now. The ORM's upsert knows no WHERE."""
    if not claims:
        return set()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO alarm_delivery AS old (id, alarm_id, application_id, occurrence, idempotency_key, claimed_at)
            SELECT id, alarm_id, application_id, occurrence, key, %s FROM json_to_recordset(%s::json)
                AS claim (id uuid, alarm_id uuid, application_id uuid, occurrence int, key text)
            ON CONFLICT (idempotency_key) DO UPDATE
               SET state = 'claimed', application_id = EXCLUDED.application_id, claimed_at = EXCLUDED.claimed_at,
                   ended_at = NULL
             WHERE old.state <> 'sent'
            RETURNING idempotency_key
            """,
            [now, json.dumps([_opening(claim) for claim in claims], default=str)],
        )
        return {key for (key,) in cursor.fetchall()}


def _opening(claim: Claim) -> dict[str, Any]:
    return {
        "id": uuid7(),
        "alarm_id": claim.alarm_id,
        "application_id": claim.application_id,
        "occurrence": claim.occurrence,
        "key": claim.key,
    }


def tell_rescues(claims: Sequence[Claim], now: datetime, run_id: UUID | None) -> None:
    rescued = [
        decide(
            "rescue_claimed_alarm",
            Alarm(pk=claim.alarm_id),
            before={"processed_at": claim.dead_claim.isoformat()},
            after={"processed_at": now.isoformat()},
            inputs={"idempotency_key": claim.key},
            run_id=run_id,
        )
        for claim in claims
        if claim.dead_claim
    ]
    if rescued:
        record(rescued)


def despite_deadlocks(work: Callable[[], T]) -> T:
    """Do it again when it was chosen to break a circle of locks: a batch given up would wait six hours for rescue."""
    for _try in range(TRIES):
        try:
            return work()
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", "") != DEADLOCK:
                raise
    return work()


def read_words(claims: Sequence[Claim]) -> dict[str, Words]:
    """Each page's title and body as plain words. A deleted page has none."""
    pages = Page.objects.filter(pk__any=[claim.page_id for claim in claims], deleted_at=None)
    rows = pages.annotate(length=Length("body"), beginning=Left("body", BEGINNING))
    found: dict[str, Words] = {}
    unsure: dict[str, str] = {}
    for key, title, beginning, length in rows.values_list("pk", "title", "beginning", "length"):
        body = plain_body(beginning) if length <= BEGINNING else plain_start(beginning)
        if body is None:
            unsure[key] = plain_title(title)
        else:
            found[key] = Words(plain_title(title), body)
    for key, body in pages.filter(pk__in=unsure).values_list("pk", "body").iterator(chunk_size=1) if unsure else ():
        found[key] = Words(unsure[key], plain_body(body))
    return found
