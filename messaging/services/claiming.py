"""A dispatcher's claim: due messages of one type, looked at once more, leased, with an attempt each; then committed."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django.conf import settings
from django.db import connection, transaction

from messaging.models import Message
from messaging.models.addresses import InvalidToken, decrypt
from messaging.providers import Outgoing
from messaging.services import circuits, gates
from messaging.services.ending import fail_unsent
from messaging.services.links import Sender, prepare_email, store_links


class Due(NamedTuple):
    """A locked message with what the gate and the provider need to know of its recipient."""

    id: UUID
    application_id: UUID
    subscription_id: UUID
    user_id: str | None
    subscription_type: str
    channel_type: str
    kind: str
    title: str
    body: str
    data: Any
    template_code: str
    template_parameters: Any
    created_at: datetime
    network_retries: int
    outage_retries: int
    rate_limited_retries: int
    priority: int
    campaign: str | None
    from_address: str
    token_encrypted: str
    status: int
    time_zone: str
    locale: str
    marketing_consent: bool
    night_consent: bool
    application_active: bool
    application_settings: Any
    suppressed: bool


OF_MESSAGE = Due._fields[: Due._fields.index("token_encrypted")]

# Highest priority first, then longest due; one index scan per priority, so a million scheduled for later cost nothing.
# SKIP LOCKED: dispatchers never wait for each other. The ORM has neither LATERAL nor a locking CTE. The deadline is
# spelt so that its own index does not fit, or the planner would take that one and sort.
CLAIM = f"""
    WITH due AS MATERIALIZED (
        SELECT found.* FROM generate_series(9, 0, -1) AS level CROSS JOIN LATERAL (
            SELECT {", ".join(OF_MESSAGE)}, COALESCE(next_attempt_at, scheduled_at, created_at) AS due_at FROM messages
             WHERE status = 'pending' AND hold_reason IS NULL
               AND (lease_id IS NULL OR (COALESCE(leased_until, %(now)s) <= %(now)s AND NOT EXISTS (
                       SELECT FROM message_attempts a WHERE a.message_id = messages.id AND a.ended_at IS NULL)))
               AND subscription_type = %(type)s AND priority = level
               AND COALESCE(next_attempt_at, scheduled_at, created_at) <= %(now)s
               AND (created_at > %(born_after)s OR scheduled_at > %(born_after)s)
             ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS found
         LIMIT %(limit)s)
    SELECT {", ".join(f"due.{name}" for name in OF_MESSAGE)},
           s.token_encrypted, s.status, s.time_zone, s.locale, s.marketing_consent, s.night_consent,
           a.active, a.settings,
           EXISTS (SELECT 1 FROM suppressions x WHERE x.application_id = due.application_id
                      AND x.channel_type = due.channel_type AND x.address_hash = s.token_hash AND x.lifted_at IS NULL)
      FROM due JOIN subscriptions s ON s.id = due.subscription_id JOIN applications a ON a.id = due.application_id
     ORDER BY due.priority DESC, due.due_at
"""

LEASE = """
    WITH taken AS (
        UPDATE messages SET lease_id = %s, leased_until = %s, attempt_count = attempt_count + 1
         WHERE id = ANY(%s) RETURNING id, attempt_count)
    INSERT INTO message_attempts (message_id, attempt_no, started_at, provider)
    SELECT id, attempt_count, %s, %s FROM taken
    ON CONFLICT (message_id, attempt_no) DO NOTHING RETURNING message_id, attempt_no
"""

# Attempts that somebody wrote by hand: the count goes on from them, and an open one leaves its outcome unknown.
CATCH_UP = """
    UPDATE messages m
       SET attempt_count = written.last, lease_id = CASE WHEN written.is_open THEN lease_id END,
           leased_until = CASE WHEN written.is_open THEN %s::timestamptz END
      FROM (SELECT message_id, max(attempt_no) AS last, bool_or(ended_at IS NULL) AS is_open
              FROM message_attempts WHERE message_id = ANY(%s) GROUP BY message_id) AS written
     WHERE m.id = written.message_id
"""


# The row is the delivery, or nothing is delivered: no address is read, hence none decrypted.
ADDRESSLESS = {"in_app", "null"}


@dataclass
class Batch:
    """What one claim took: the messages to send with their lease, and what became of the others."""

    provider: str
    breaker: str
    lease_id: UUID
    due: dict[UUID, Due] = field(default_factory=dict)
    outgoing: list[Outgoing] = field(default_factory=list)
    probe: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    # Whose address cannot be read any more: their attempt ends without a call.
    unreadable: list[UUID] = field(default_factory=list)
    attempts: dict[UUID, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.attempts and not self.counts


@transaction.atomic
def claim_batch(subscription_type: str, provider: str, limit: int, *, now: datetime, breaker: str = "") -> Batch:
    batch = Batch(provider, breaker or provider, uuid4())
    probe = circuits.take_probe(batch.breaker, now=now)
    if probe is False:
        return batch
    batch.probe = bool(probe)
    rows = _due(subscription_type, 1 if probe else limit, now)
    sendable = _gate(rows, batch, now)
    if sendable:
        _lease(sendable, batch, now)
    elif probe:
        circuits.return_probe(batch.breaker, now=now)
    return batch


def _due(subscription_type: str, limit: int, now: datetime) -> list[Due]:
    with connection.cursor() as cursor:
        cursor.execute(
            CLAIM,
            {"type": subscription_type, "now": now, "born_after": now - settings.MESSAGE_LIFE, "limit": limit},
        )
        return [Due._make(row) for row in cursor.fetchall()]


def _gate(rows: list[Due], batch: Batch, now: datetime) -> list[Due]:
    sendable, refused, later = [], {}, {}
    for row in rows:
        if reason := gates.refusal(row.kind, row.status, row.suppressed, row.marketing_consent):
            refused[row.id] = reason
        elif not row.application_active:
            later[row.id] = now + gates.SWITCHED_OFF_WAIT
        elif morning := _morning(row, now):
            later[row.id] = morning
        else:
            sendable.append(row)
    fail_unsent(refused, now=now)
    _postpone(later)
    batch.counts.update(refused=len(refused), postponed=len(later))
    batch.counts += Counter()  # drops zeros
    return sendable


def _morning(row: Due, now: datetime) -> datetime | None:
    if row.kind != "marketing" or row.night_consent:
        return None
    return gates.quiet_until(now, gates.zone(row.time_zone, _token(row) or ""))


def _token(row: Due) -> str | None:
    try:
        return decrypt(row.token_encrypted)
    except InvalidToken:
        return None


def _postpone(times: dict[UUID, datetime]) -> None:
    if times:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE messages SET next_attempt_at = r.at FROM unnest(%s::uuid[], %s::timestamptz[]) AS r (id, at)"
                " WHERE messages.id = r.id",
                [list(times), list(times.values())],
            )


def _lease(rows: list[Due], batch: Batch, now: datetime) -> None:
    with connection.cursor() as cursor:
        until = now + settings.MESSAGE_LEASE
        cursor.execute(LEASE, [batch.lease_id, until, [row.id for row in rows], now, batch.provider])
        batch.attempts = dict(cursor.fetchall())
        if len(batch.attempts) < len(rows):
            written = [row.id for row in rows if row.id not in batch.attempts]
            cursor.execute(CATCH_UP, [now, written])
            batch.counts["written_by_hand"] += len(written)
            rows = [row for row in rows if row.id in batch.attempts]
    batch.due = {row.id: row for row in rows}
    batch.outgoing = list(_outgoing(rows, batch))
    # In the claim's transaction: a mail whose links cannot be stored is not claimed.
    _prepare_emails(batch)


def _outgoing(rows: Iterable[Due], batch: Batch) -> Iterable[Outgoing]:
    for row in rows:
        token = "" if batch.provider in ADDRESSLESS else _token(row)
        if token is None:
            batch.unreadable.append(row.id)
            continue
        yield Outgoing(
            message_id=row.id,
            attempt_no=batch.attempts[row.id],
            channel_type=row.channel_type,
            subscription_type=row.subscription_type,
            token=token,
            kind=row.kind,
            title=row.title,
            body=row.body,
            data=_object(row.data),
            template_code=row.template_code,
            template_parameters=_object(row.template_parameters),
            from_=row.from_address,
            created_at=row.created_at,
            locale=row.locale,
        )


def _prepare_emails(batch: Batch) -> None:
    links: dict[UUID, tuple[UUID, str]] = {}
    for place, sent in enumerate(batch.outgoing):
        if sent.channel_type == "email":
            row = batch.due[sent.message_id]
            prepared = prepare_email(row, Sender(row.application_id, _object(row.application_settings)))
            batch.outgoing[place] = replace(sent, body=prepared.html, headers={**sent.headers, **prepared.headers})
            links |= {key: (row.application_id, url) for key, url in prepared.links.items()}
    store_links(links)


def _object(value: Any) -> dict[str, Any]:
    """A cursor hands jsonb over as text; something other than an object, or deeper than Python can follow, written by
    SQL, must stop nobody."""
    if value == "{}":
        return {}
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def outgoing_of(messages: Iterable[Message]) -> dict[UUID, Outgoing]:
    """As they were sent, for asking a provider what became of them. Messages with their subscription."""
    return {
        message.pk: Outgoing(
            message_id=message.pk,
            attempt_no=message.attempt_count,
            channel_type=message.channel_type,
            subscription_type=message.subscription_type,
            token=message.subscription.token,
            kind=message.kind,
            title=message.title,
            body=message.body,
            data=_object(message.data),
            template_code=message.template_code,
            template_parameters=_object(message.template_parameters),
            from_=message.from_address,
            created_at=message.created_at,
        )
        for message in messages
    }
