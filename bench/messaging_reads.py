"""Analytics and the admin's list over many stored messages. `BENCH_ROWS=10000000` measures at ten million."""

import os
import time
from collections.abc import Callable
from datetime import UTC, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from bench.messaging import _say
from config.integrity import invariants, keep_reading
from messaging.models import Application, Subscription
from messaging.services import SubscriptionSpec, upsert_subscriptions
from messaging.services.analytics import GROUPS, drifted_applications, message_figures, recompute_rollups

ROWS = int(os.environ.get("BENCH_ROWS", "1000000"))
SUBSCRIPTIONS = 1000


def _measure_all() -> None:
    for name in invariants():
        keep_reading(name, timezone.now())


def run() -> None:
    settings.ALLOWED_HOSTS = ["*"]
    application, _created = Application.objects.get_or_create(slug="bench-reads")
    _store(application)
    now = timezone.now()
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = (midnight - timedelta(days=30), midnight + timedelta(days=1))
    odd = (now - timedelta(days=29, minutes=17), now - timedelta(minutes=17))
    _say(f"messaging, reading: {ROWS:,} messages of 30 days, 20 campaigns")
    for group in GROUPS:
        whole, cut = (_best(partial(message_figures, [application.pk], *span, group, "tier")) for span in (days, odd))
        _say(f"  analytics by {group:10}      {whole:8.0f} ms whole days, {cut:8.0f} ms any times")
    _say(f"  integrity, drift             {_best(lambda: drifted_applications(now)):8.0f} ms")
    client, url = Client(), reverse("admin:messaging_message_changelist")
    client.force_login(User.objects.get_or_create(username="bench", is_staff=True, is_superuser=True)[0])
    _say(f"  integrity, all of it         {_once(_measure_all):8.0f} ms, by a sweep")
    for name in ("index", "panels"):
        first = _once(lambda n=name: client.get(reverse(f"admin:{n}")))
        best = _best(lambda n=name: client.get(reverse(f"admin:{n}")))
        word = "page" if name == "index" else "refreshed"
        _say(f"  dashboard {word:19} {best:8.0f} ms (aim: 300), the first {first:.0f} ms")
    for query in ("", "?state=failed", "?state=errored", "?campaign=c7", "?q=u-7"):
        _say(f"  admin list {query or 'newest':18} {_best(lambda q=query: client.get(url + q)):8.0f} ms")


def _best(work: Callable[[], Any]) -> float:
    return min(_once(work) for _round in range(3))


def _once(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def _store(application: Application) -> None:
    specs = [
        SubscriptionSpec("Email", f"u{n}@example.com", f"u-{n}", tags={"tier": f"t{n % 3}"})
        for n in range(SUBSCRIPTIONS)
    ]
    upsert_subscriptions(application, specs)
    keys, segments = zip(
        *Subscription.objects.filter(application=application).values_list("pk", "segment"), strict=True
    )
    with connection.cursor() as cursor:
        # Stored as they end up, with the triggers off; the roll-ups are computed afterwards, as after a restore.
        cursor.execute("ALTER TABLE messages DISABLE TRIGGER USER")
        cursor.execute(
            """
            INSERT INTO messages (id, application_id, subscription_id, subscription_type, user_id, channel_type, kind,
                                  campaign, title, body, status, created_at, sent_at, received_at, converted_at,
                                  failed_at, error_reason, attempt_count, network_retries, segment)
            SELECT gen_random_uuid(), %(application)s, (%(subscriptions)s::uuid[])[1 + n %% %(many)s], 'Email',
                   'u-' || n %% %(many)s, (ARRAY['email', 'push', 'sms'])[1 + n %% 3],
                   (ARRAY['notice', 'marketing'])[1 + n %% 2], 'c' || n %% 20, 'Your order', 'It is on its way.',
                   fate, at,
                   CASE WHEN fate <> 'failed' THEN sent END,
                   CASE WHEN fate IN ('received', 'converted') THEN sent + delay END,
                   CASE WHEN fate = 'converted' THEN sent + delay * 3 END,
                   CASE WHEN fate = 'failed' THEN sent END, CASE WHEN fate = 'failed' THEN 'rejected' END,
                   1, (n %% 50 = 0)::int, (%(segments)s::int[])[1 + n %% %(many)s]
              FROM (SELECT n, at, at + make_interval(secs => exp(random() * 5)) AS sent,
                           make_interval(secs => exp(random() * 7)) AS delay,
                           (ARRAY['successful', 'received', 'received', 'converted', 'failed'])[1 + n %% 5] AS fate
                      FROM (SELECT n, now() - interval '30 days' * (1 - n::float8 / %(rows)s) AS at
                              FROM generate_series(1, %(rows)s) AS n) AS born) AS made
            """,
            {
                "application": application.pk,
                "subscriptions": list(keys),
                "segments": list(segments),
                "many": SUBSCRIPTIONS,
                "rows": ROWS,
            },
        )
        cursor.execute("ALTER TABLE messages ENABLE TRIGGER USER")
        cursor.execute("VACUUM ANALYZE messages")
    started = time.perf_counter()
    for _day, _wrong in recompute_rollups():
        pass
    taken = time.perf_counter() - started
    _say(f"messaging, reading: roll-ups of {ROWS:,} messages computed in {taken:.0f} s")
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE message_rollups")
