"""Claim, hand over to messaging, record: one batch of due alarms, with no transaction open in between."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from random import random as system_random
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection, transaction
from django.db.models import Exists, Min, OuterRef

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
    addresses = despite_deadlocks(lambda: addresses_of({claim.owner for claim in claims}, now))
    refused: list[Result] = []
    ready: list[tuple[Claim, Words, Address]] = []
    for claim in claims:
        said, address = words.get(claim.page_id), addresses[claim.owner]
        if not said or address.refusal:
            refused.append(Result(claim, reason=address.refusal if said else "empty"))
        else:
            ready.append((claim, said, address))
    outcomes = enqueue([compose(*parts) for parts in ready], now)
    results = unless_sent(refused)
    for (claim, said, _address), outcome in zip(ready, outcomes, strict=True):
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


@dataclass(frozen=True)
class Address:
    """Where a user is reached, or why not."""

    subscription_id: UUID | None = None
    channel: str = ""
    refusal: str = ""


def addresses_of(owners: set[Owner], now: datetime) -> dict[Owner, Address]:
    usable = [kind for kind in TYPES if provider_for(kind)]
    suppressed = Subscription.objects.suppressed().filter(pk=OuterRef("pk"))
    rows = Subscription.objects.recently_active_first().filter(
        application_id__in={application for application, _user in owners},
        user_id__any={user for _application, user in owners},
        type__in=usable,
    )
    found: dict[Owner, list[Address]] = {}
    for row in rows.values_list("application_id", "user_id", "pk", "channel_type", "status", Exists(suppressed)):
        found.setdefault(row[:2], []).append(Address(row[2], row[3], refusal_of(*row[4:])))
    strangers = [owner for owner in owners if owner not in found]
    return {**{owner: first_choice(of_user) for owner, of_user in found.items()}, **introduce(strangers, now)}


def refusal_of(status: int, is_suppressed: bool) -> str:
    if status == Subscription.OPTED_OUT:
        return "unsubscribed"
    return "suppressed" if is_suppressed else "" if status > 0 else "not_sendable"


def first_choice(addresses: list[Address]) -> Address:
    """The best channel that works, on it the address used last; sorting keeps the order of equals."""
    return min(addresses, key=lambda address: (bool(address.refusal), CHANNELS.index(Channel(address.channel))))


def introduce(owners: Iterable[Owner], now: datetime) -> dict[Owner, Address]:
    """Who has no address we could use gets an inbox: the app reads it for its user."""
    by_application: dict[UUID, list[str]] = {}
    made: dict[Owner, Address] = {}
    for application_id, user_id in owners:
        if address_problem(Channel.IN_APP, user_id):
            made[application_id, user_id] = Address(refusal="invalid_address")
        else:
            by_application.setdefault(application_id, []).append(user_id)
    for application in Application.objects.filter(pk__in=by_application):
        users = by_application[application.pk]
        specs = [SubscriptionSpec("InAppMessage", token=user, user_id=user) for user in users]
        for user, row in zip(users, upsert_subscriptions(application, specs, now=now), strict=True):
            made[application.pk, user] = Address(row.pk, Channel.IN_APP, refusal_of(row.status, False))
    return made


def compose(claim: Claim, words: Words, address: Address) -> Draft:
    title, body = words.title, words.body
    data: dict[str, Any] = {"alarm_id": str(claim.alarm_id), "page_id": claim.page_id}
    if address.channel == Channel.PUSH:
        title, body = fit_push(title, body, data)
    elif address.channel == Channel.IN_APP:
        data["layout_type"] = "banner"
    else:
        title, body = title or " ".join(body.split())[:SUBJECT_LENGTH], escape(body or title)
    assert address.subscription_id
    return Draft(
        claim.application_id, address.subscription_id, title, body, data, kind="notice", idempotency_key=claim.key
    )


def fit_push(title: str, body: str, data: dict[str, Any]) -> tuple[str, str]:
    """As much of the body, and if need be of the title, as the payload has room for."""
    if push_bytes(title, body, data) <= PUSH_BYTES:
        return title, body
    if push_bytes(title, "", data) <= PUSH_BYTES:
        room = bisect_right(range(len(body)), PUSH_BYTES, key=lambda n: push_bytes(title, body[:n], data)) - 1
        return title, body[:room]
    room = bisect_right(range(len(title)), PUSH_BYTES, key=lambda n: push_bytes(title[:n], "", data)) - 1
    return title[:room], ""


def enqueue(drafts: list[Draft], now: datetime) -> list[Outcome]:
    """A draft the database cannot take is found by halving; the keys make it safe to hand the others over again."""
    if not drafts:
        return []
    try:
        with transaction.atomic():
            return enqueue_messages(drafts, now=now)
    except DatabaseError as error:
        report("send_error", error=type(error).__name__, alarms=len(drafts))
    if not connection.is_usable():
        # The answer is lost, perhaps after the commit: the claim stays, and its rescue asks with the same key.
        connection.close()
        return [Outcome(None, False, LOST)] * len(drafts)
    if len(drafts) == 1:
        return [Outcome(None, False, "database_error")]
    middle = len(drafts) // 2
    return [*enqueue(drafts[:middle], now), *enqueue(drafts[middle:], now)]
