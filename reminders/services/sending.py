"""Claim, hand over to messaging, record: one batch of due alarms, with no transaction open in between."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from random import random as system_random
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection, transaction
from django.db.models import Min

from messaging.models import Application, Channel, Subscription
from messaging.providers import provider_for
from messaging.services import Draft, Outcome, SubscriptionSpec, enqueue_messages, upsert_subscriptions
from messaging.services.content import PUSH_BYTES, address_problem, push_bytes
from reminders.models import Alarm
from reminders.services.claiming import Claim, Owner, claim_alarms, despite_deadlocks, read_words
from reminders.services.recording import Result, record_results
from reminders.services.reporting import log, report
from reminders.services.settling import messages_under
from reminders.services.texts import Words
from reminders.services.times import Random

BATCH = 100
SUBJECT_LENGTH = 78
# First to last choice.
CHANNELS = (Channel.PUSH, Channel.IN_APP, Channel.EMAIL)
LOST = "lost"
TYPES = ("iOSPush", "AndroidPush", "InAppMessage", "Email")


def send_batch(
    now: datetime, limit: int = BATCH, *, random: Random = system_random, run_id: UUID | None = None
) -> dict[str, int]:
    """Send what is due. claimed = sent + failed + deferred + skipped; skipped claims were lost meanwhile."""
    started = time.monotonic()
    try:
        sending, deferred = despite_deadlocks(lambda: claim_alarms(now, limit, run_id))
        results = [*deliver(sending, now), *(Result(claim, deferred=True) for claim in deferred)]
    except DatabaseError as error:
        report("database_error", error=type(error).__name__)
        raise
    done = Counter(claimed=len(results), sent=0, failed=0, deferred=0, skipped=0)
    if results:
        done.update(record_results(results, now, random, run_id))
        log.info("batch", **done, processing_time_ms=round((time.monotonic() - started) * 1000))
    if done["skipped"]:
        report("past_bookings_skipped", count=done["skipped"])
    return dict(done)


def schedule(now: datetime) -> dict[str, Any]:
    """What there is to do, without doing it. Claims of the living are neither due nor next."""
    free = Alarm.objects.free(now)
    return {
        "next_alarm_time": free.aggregate(first=Min("next_alarm_time"))["first"],
        "due": Alarm.objects.takeable(now).count(),
        "processing": Alarm.objects.processing(now).count(),
        "zombies": Alarm.objects.zombies(now).count(),
    }


def deliver(claims: Sequence[Claim], now: datetime) -> list[Result]:
    """One that cannot even be handed over is found by halving; the keys make it safe to hand the others over again.

    The batch would fail with it at each rescue, as its alarms come back together.
    """
    if not claims:
        return []
    try:
        return hand_over(claims, now)
    except DatabaseError:
        raise
    except Exception as error:
        report("send_error", error=type(error).__name__, alarms=len(claims))
    if len(claims) == 1:
        return unless_sent([Result(claims[0], reason="error")])
    middle = len(claims) // 2
    return [*deliver(claims[:middle], now), *deliver(claims[middle:], now)]


def hand_over(claims: Sequence[Claim], now: datetime) -> list[Result]:
    """All to messaging in one call. What it would not take is refused, each by itself."""
    words = read_words(claims)
    recipients = despite_deadlocks(lambda: recipients_of({claim.owner for claim in claims}, now))
    refused: list[Result] = []
    ready: list[tuple[Claim, Words, Subscription]] = []
    for claim in claims:
        said, recipient = words.get(claim.page_id), recipients.get(claim.owner)
        if said and recipient and not refusal_of(recipient):
            ready.append((claim, said, recipient))
        else:
            refused.append(Result(claim, reason=refusal_of(recipient) if said else "empty"))
    outcomes = enqueue([compose(*parts) for parts in ready], [recipient for _claim, _said, recipient in ready], now)
    results = unless_sent(refused)
    for (claim, said, _recipient), outcome in zip(ready, outcomes, strict=True):
        unknown = outcome.code == LOST
        results.append(Result(claim, said, outcome.message_id, outcome.code or "", unknown=unknown))
    return results


def unless_sent(refused: list[Result]) -> list[Result]:
    """What a worker sent before it died was sent, even if it would be refused by now."""
    if not refused:
        return []
    claims = [result.claim for result in refused]
    sent = messages_under([claim.key for claim in claims], {claim.application_id for claim in claims})
    return [replace(result, message_id=sent.get(result.claim.key)) for result in refused]


def recipients_of(owners: set[Owner], now: datetime) -> dict[Owner, Subscription]:
    """Where each user is reached. Who has no address we could use gets an inbox: the app reads it for its user."""
    found = best_addresses(owners)
    strangers = owners - found.keys()
    if strangers:
        introduce(strangers, now)
        found |= best_addresses(strangers)
    return found


def best_addresses(owners: set[Owner]) -> dict[Owner, Subscription]:
    """The best channel that works, on it the address used last: of equals `min` takes the first."""
    known: dict[Owner, list[Subscription]] = {}
    for row in Subscription.objects.reaching(owners, [kind for kind in TYPES if provider_for(kind)]):
        known.setdefault((row.application_id, str(row.user_id)), []).append(row)
    return {
        owner: min(rows, key=lambda row: (bool(refusal_of(row)), CHANNELS.index(Channel(row.channel_type))))
        for owner, rows in known.items()
    }


def refusal_of(row: Subscription | None) -> str:
    if row is None:
        return "invalid_address"
    if row.status == Subscription.OPTED_OUT:
        return "unsubscribed"
    return "suppressed" if row.suppressed_for else "" if row.sendable else "not_sendable"  # type: ignore[attr-defined]


def introduce(strangers: set[Owner], now: datetime) -> None:
    specs: dict[UUID, list[SubscriptionSpec]] = {}
    for application_id, user_id in strangers:
        if not address_problem(Channel.IN_APP, user_id):
            specs.setdefault(application_id, []).append(SubscriptionSpec("InAppMessage", user_id, user_id=user_id))
    for application in Application.objects.filter(pk__in=specs):
        upsert_subscriptions(application, specs[application.pk], now=now)


def compose(claim: Claim, words: Words, recipient: Subscription) -> Draft:
    title, body = words.title, words.body
    data: dict[str, Any] = {"alarm_id": str(claim.alarm_id), "page_id": claim.page_id}
    if recipient.channel_type == Channel.PUSH:
        title, body = fit_push(title, body, data)
    elif recipient.channel_type == Channel.IN_APP:
        data["layout_type"] = "banner"
    else:
        title, body = title or " ".join(body.split())[:SUBJECT_LENGTH], escape(body or title)
    return Draft(claim.application_id, recipient.pk, title, body, data, kind="notice", idempotency_key=claim.key)


def fit_push(title: str, body: str, data: dict[str, Any]) -> tuple[str, str]:
    """As much of the body, and if need be of the title, as the payload has room for."""
    if push_bytes(title, body, data) <= PUSH_BYTES:
        return title, body
    if push_bytes(title, "", data) <= PUSH_BYTES:
        room = bisect_right(range(len(body)), PUSH_BYTES, key=lambda n: push_bytes(title, body[:n], data)) - 1
        return title, body[:room]
    room = bisect_right(range(len(title)), PUSH_BYTES, key=lambda n: push_bytes(title[:n], "", data)) - 1
    return title[:room], ""


def enqueue(drafts: list[Draft], recipients: list[Subscription], now: datetime) -> list[Outcome]:
    """A draft the database cannot take is found by halving; the keys make it safe to hand the others over again."""
    if not drafts:
        return []
    try:
        with transaction.atomic():
            return enqueue_messages(drafts, now=now, recipients=recipients)
    except DatabaseError as error:
        report("send_error", error=type(error).__name__, alarms=len(drafts))
    if not connection.is_usable():
        # The answer is lost, perhaps after the commit: the claim stays, and its rescue asks with the same key.
        connection.close()
        return [Outcome(None, False, LOST)] * len(drafts)
    if len(drafts) == 1:
        return [Outcome(None, False, "database_error")]
    middle = len(drafts) // 2
    return [
        *enqueue(drafts[:middle], recipients[:middle], now),
        *enqueue(drafts[middle:], recipients[middle:], now),
    ]
