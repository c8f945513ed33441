"""Messages from pending to successful beside the bare statements that write the same rows, and what a POST costs beside
an empty view. `BENCH_ROWS=10000000` measures at ten million stored messages."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from messaging.models import Application, Message, Subscription
from messaging.providers import reset_providers
from messaging.services import Draft, SubscriptionSpec, enqueue_messages, upsert_subscriptions
from messaging.services.dispatching import dispatch

SENT = 20_000
BATCH = 500
ROUNDS = 8
POSTS = 400
# No-op jobs per second on this kind of machine, each engine with the settings named (research, engine-anchors §1).
OTHERS = {
    "graphile-worker, default": 3_580,
    "pg-boss, batch 1": 87,
    "Celery + Redis": 1_060,
    "procrastinate": 485,
}

# The rows a dispatcher writes, by bare statements with our triggers off: the lease and the open attempt, committed
# before a provider may be called; then the result on message and attempt, and the event.
FLOOR_CLAIM = """
    WITH due AS MATERIALIZED (
        SELECT id FROM messages WHERE status = 'pending' AND hold_reason IS NULL AND subscription_type = 'AndroidPush'
         ORDER BY priority DESC, COALESCE(next_attempt_at, scheduled_at, created_at) LIMIT %(limit)s
           FOR UPDATE SKIP LOCKED),
    taken AS (
        UPDATE messages m SET lease_id = %(lease)s, leased_until = %(now)s, attempt_count = attempt_count + 1
          FROM due WHERE m.id = due.id RETURNING m.id, attempt_count)
    INSERT INTO message_attempts (message_id, attempt_no, started_at, provider)
    SELECT id, attempt_count, %(now)s, 'null' FROM taken RETURNING message_id
"""
FLOOR_RECORD = """
    WITH answer AS MATERIALIZED (SELECT unnest(%(ids)s::uuid[]) AS id),
    ended AS (
        UPDATE message_attempts a
           SET ended_at = %(now)s, outcome = 'accepted', provider_message_id = r.id, latency_ms = 0
          FROM answer r WHERE a.message_id = r.id AND a.ended_at IS NULL),
    sent AS (
        UPDATE messages m SET status = 'successful', sent_at = %(now)s, provider_message_id = r.id, lease_id = NULL,
                              leased_until = NULL, version = 1, version_history = %(history)s
          FROM answer r WHERE m.id = r.id RETURNING m.id)
    INSERT INTO message_events (message_id, event_type, occurred_at, metadata)
    SELECT id, 'sent', %(now)s, '{}' FROM sent
"""
HISTORY = '{"1": {"at": "2026-01-01T00:00:00Z", "transition": "send", "from": "pending", "to": "successful"}}'


def run() -> None:
    settings.PROVIDERS = {"AndroidPush": "null"}
    settings.API_RATE = (10_000_000, 60)
    settings.ALLOWED_HOSTS = ["*"]
    reset_providers()
    subscription = _subscription()
    _say(f"messaging: {SENT:,} messages, pending to successful, {BATCH} a batch")
    floor, ours, share = _compare(subscription)
    _say(f"  bare SQL writes the rows      {floor:10,.0f} /s")
    _say(f"  dispatcher, null provider     {ours:10,.0f} /s   {share:.2f} of the floor (0.50 wanted)")
    for name, jobs in OTHERS.items():
        _say(f"    {name:28}{jobs:10,} no-op jobs/s   ours is {ours / jobs:.1f} times that")
    _creating(subscription)
    _posting(subscription)
    _growing(subscription)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _subscription() -> Subscription:
    application, _created = Application.objects.get_or_create(slug="bench")
    return upsert_subscriptions(application, [SubscriptionSpec("AndroidPush", "token", user_id="u")])[0]


def _drafts(subscription: Subscription, count: int) -> list[Draft]:
    text = {"title": "Your order", "body": "It is on its way to you.", "data": {"order": "1234"}}
    return [Draft(subscription.application_id, subscription.pk, **text) for _ in range(count)]  # type: ignore[arg-type]


def _enqueue(subscription: Subscription, count: int) -> None:
    for _page in range(count // BATCH):
        enqueue_messages(_drafts(subscription, BATCH), now=timezone.now())
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE messages")


def _rate(subscription: Subscription, work: Callable[[], Any], count: int = SENT) -> float:
    _enqueue(subscription, count)
    started = time.perf_counter()
    work()
    taken = time.perf_counter() - started
    left = Message.objects.filter(status="pending").count()
    assert not left, left
    return count / taken


def _compare(subscription: Subscription) -> tuple[float, float, float]:
    """Side by side in short rounds, and the median of their shares: other work on the machine hits both alike."""
    _rate(subscription, _ours, SENT // ROUNDS)
    pairs = [
        (_rate(subscription, _floor, SENT // ROUNDS), _rate(subscription, _ours, SENT // ROUNDS))
        for _round in range(ROUNDS)
    ]
    floors, ours = zip(*pairs, strict=True)
    return median(floors), median(ours), median(own / floor for floor, own in pairs)


def _ours() -> None:
    dispatch(timezone.now, lambda: True, _raised)


def _raised(_lane: str, error: Exception) -> None:
    raise error


def _floor() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE messages DISABLE TRIGGER USER")
        ids: list[Any] = [None]
        while ids:
            now = timezone.now()
            cursor.execute(FLOOR_CLAIM, {"limit": BATCH, "now": now, "lease": uuid4()})
            ids = [pk for (pk,) in cursor.fetchall()]
            cursor.execute(FLOOR_RECORD, {"ids": ids, "now": now, "history": HISTORY})
        cursor.execute("ALTER TABLE messages ENABLE TRIGGER USER")


def _creating(subscription: Subscription) -> None:
    drafts = _drafts(subscription, BATCH)
    with CaptureQueriesContext(connection) as queries:
        enqueue_messages(drafts, now=timezone.now())
    started = time.perf_counter()
    for _page in range(10):
        enqueue_messages(drafts, now=timezone.now())
    rate = 10 * BATCH / (time.perf_counter() - started)
    _say(f"  created in bulk               {rate:10,.0f} /s   {len(queries)} queries for {BATCH} (20 allowed)")


def _posting(subscription: Subscription) -> None:
    from django.contrib.auth.models import Group, User
    from knox.models import AuthToken
    from rest_framework.response import Response
    from rest_framework.test import APIClient
    from rest_framework.views import APIView

    import messaging.api

    class Empty(APIView):
        required_permissions = {"post": "messaging.add_message"}

        def post(self, request: Any) -> Response:
            return Response({})

    from django.urls import clear_url_caches, path

    messaging.api.urlpatterns.append(path("api/v1/bench-empty/", Empty.as_view()))
    clear_url_caches()
    user, _created = User.objects.get_or_create(username="bench")
    user.groups.set(Group.objects.filter(name="message-sender"))
    subscription.application.members.add(user)
    client = APIClient(headers={"Authorization": f"Token {AuthToken.objects.create(user)[1]}"})
    body = {"subscription_id": str(subscription.pk), "title": "Your order", "body": "On its way.", "data": {"n": 1}}

    def post(url: str, wanted: int) -> float:
        started = time.perf_counter()
        for _post in range(POSTS // ROUNDS):
            assert client.post(url, body, format="json").status_code == wanted
        return POSTS // ROUNDS / (time.perf_counter() - started)

    pairs = [(post("/api/v1/bench-empty/", 200), post("/api/v1/messages/", 201)) for _round in range(ROUNDS + 1)][1:]
    empty, ours = (median(rates) for rates in zip(*pairs, strict=True))
    share = median(own / bare for bare, own in pairs)
    _say(f"  POST to an empty view         {empty:10,.0f} /s")
    _say(f"  POST /messages/               {ours:10,.0f} /s   {share:.2f} of the empty view (0.60 wanted)")


def _growing(subscription: Subscription) -> None:
    """Cost per message with more and more stored."""
    _ours()
    for rows in (10_000, 100_000, int(os.environ.get("BENCH_ROWS", "1000000"))):
        _store(subscription, rows - Message.objects.count())
        rate = _rate(subscription, _ours, 5_000)
        started = time.perf_counter()
        page = list(Message.objects.filter(application=subscription.application_id).order_by("-created_at", "-pk")[:50])
        listed = 1000 * (time.perf_counter() - started)
        assert len(page) == 50
        _say(f"  at {rows:12,} stored         {rate:10,.0f} /s   first page of the list {listed:.1f} ms")


def _store(subscription: Subscription, count: int) -> None:
    if count <= 0:
        return
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE messages DISABLE TRIGGER USER")
        cursor.execute(
            """
            INSERT INTO messages (id, application_id, subscription_id, subscription_type, user_id, channel_type, title,
                                  body, status, created_at, sent_at, attempt_count, provider_message_id)
            SELECT gen_random_uuid(), %s, %s, 'AndroidPush', 'u', 'push', 'Your order', 'It is on its way to you.',
                   'successful', at, at, 1, n::text
              FROM (SELECT n, %s::timestamptz - n * interval '1 ms' AS at FROM generate_series(1, %s) AS n) AS made
            """,
            [subscription.application_id, subscription.pk, timezone.now() - timedelta(hours=1), count],
        )
        cursor.execute("ALTER TABLE messages ENABLE TRIGGER USER")
        cursor.execute("VACUUM ANALYZE messages")
