"""100,000 due alarms of 20,000 users drained by two workers, beside the same row changes as bare SQL."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from statistics import median

from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext

from messaging.models import Application, Message
from messaging.providers import reset_providers
from messaging.services import SubscriptionSpec, upsert_subscriptions
from reminders.models import Alarm, AlarmDelivery, Page, UserInfo
from reminders.services import send_batch

ALARMS, USERS, WORKERS, BATCH = 100_000, 20_000, 2, 100
NOW = datetime(2026, 3, 4, 3, 0, tzinfo=UTC)  # noon in Seoul: nobody sleeps
TARGET = 0.40
ROUNDS = 3


def _world() -> Application:
    settings.PROVIDERS = {"AndroidPush": "null"}
    reset_providers()
    application = Application.objects.create(slug="bench-reminders")
    users = [f"user-{n}" for n in range(USERS)]
    for start in range(0, USERS, 1000):
        specs = [SubscriptionSpec("AndroidPush", f"token-{user}", user_id=user) for user in users[start : start + 1000]]
        upsert_subscriptions(application, specs, now=NOW)
    UserInfo.objects.bulk_create([UserInfo(application=application, user_id=user) for user in users], batch_size=5000)
    return application


def _alarms(application: Application) -> None:
    """Fresh rows for each round, so that neither works on the other's dead ones."""
    with connection.cursor() as cursor:
        for table in (Message, AlarmDelivery, Alarm, Page):
            name = table._meta.db_table
            cursor.execute(f"ALTER TABLE {name} DISABLE TRIGGER USER")
            cursor.execute(f"TRUNCATE {name} CASCADE" if table is not Message else "DELETE FROM messages")
            cursor.execute(f"ALTER TABLE {name} ENABLE TRIGGER USER")
        cursor.execute(
            "INSERT INTO pages (id, application_id, user_id, title, body) SELECT 'page-' || n, %s, 'user-' || n %% %s,"
            " 'Page ' || n, '<p>Something to think of again: <b>no. ' || n || '</b></p>' FROM generate_series(1, %s) n",
            [application.pk, USERS, ALARMS],
        )
        cursor.execute(
            "INSERT INTO alarm (page_id, application_id, user_id, next_alarm_time) SELECT id, application_id, user_id,"
            " %s - random() * interval '1 day' FROM pages",
            [NOW],
        )
        cursor.execute("VACUUM FULL messages")
        cursor.execute("VACUUM ANALYZE pages, alarm, alarm_delivery, messages")


FLOOR = (
    """
    WITH ripe AS MATERIALIZED (
        SELECT id FROM alarm WHERE next_alarm_time <= %(now)s AND processed_at IS NULL
         ORDER BY next_alarm_time NULLS FIRST, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE alarm SET processed_at = %(now)s FROM ripe WHERE alarm.id = ripe.id
        RETURNING alarm.id, alarm.application_id, alarm.occurrence
    ), opened AS (
        INSERT INTO alarm_delivery (id, alarm_id, application_id, occurrence, idempotency_key)
        SELECT gen_random_uuid(), id, application_id, occurrence, 'reminder:' || id || ':' || occurrence FROM taken
        RETURNING alarm_id
    )
    SELECT array_agg(alarm_id) FROM opened
    """,
    """
    WITH made AS (
        INSERT INTO messages (id, application_id, subscription_id, subscription_type, user_id, channel_type, title,
                              body, data, idempotency_key, fingerprint, created_at)
        SELECT gen_random_uuid(), alarm.application_id, subscription.id, subscription.type, alarm.user_id, 'push',
               page.title, page.body, jsonb_build_object('alarm_id', alarm.id, 'page_id', page.id),
               'reminder:' || alarm.id || ':' || alarm.occurrence, '', %(now)s
          FROM alarm JOIN pages AS page ON page.id = alarm.page_id
          JOIN subscriptions AS subscription
            ON subscription.application_id = alarm.application_id AND subscription.user_id = alarm.user_id
         WHERE alarm.id = ANY (%(ids)s)
        RETURNING id, idempotency_key
    )
    SELECT array_agg(id), array_agg(idempotency_key) FROM made
    """,
    """
    WITH sent AS (
        UPDATE alarm_delivery SET state = 'sent', message_id = made.id, ended_at = %(now)s
          FROM unnest(%(messages)s::uuid[], %(keys)s::text[]) AS made (id, key)
         WHERE alarm_delivery.idempotency_key = made.key
        RETURNING alarm_delivery.alarm_id, made.id AS message_id
    )
    UPDATE alarm SET next_alarm_time = date_trunc('hour', %(now)s + interval '1 day'), sent_count = sent_count + 1,
           occurrence = occurrence + 1, last_notification_id = sent.message_id, title = page.title, body = page.body,
           processed_at = NULL
      FROM sent, pages AS page WHERE alarm.id = sent.alarm_id AND page.id = alarm.page_id
    """,
)


def _bare() -> None:
    """Three statements a batch, each its own transaction; texts, nights and collisions are not looked at."""
    with connection.cursor() as cursor:
        # The tables begin empty: without statistics the planner would read them whole, which is no fair floor.
        cursor.execute("SET enable_seqscan = off")
        while True:
            cursor.execute(FLOOR[0], {"now": NOW, "batch": BATCH})
            ids = cursor.fetchone()[0]
            if not ids:
                return
            cursor.execute(FLOOR[1], {"now": NOW, "ids": ids})
            messages, keys = cursor.fetchone()
            cursor.execute(FLOOR[2], {"now": NOW, "messages": messages, "keys": keys})


def _ours() -> None:
    while send_batch(NOW, BATCH)["claimed"]:
        pass


def _memory_of(work: Callable[[], None], told: "multiprocessing.Queue[int]") -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    told.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _drain(application: Application, work: Callable[[], None]) -> tuple[float, int]:
    """Alarms per second, and the worst growth of a worker in KB."""
    _alarms(application)
    connection.close()
    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_memory_of, args=(work, told)) for _worker in range(WORKERS)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    growth = [told.get() for _worker in workers]
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    assert Alarm.objects.filter(sent_count=2, processed_at=None).count() == ALARMS
    assert Message.objects.count() == AlarmDelivery.objects.filter(state="sent").count() == ALARMS
    return ALARMS / seconds, max(growth)


def _queries(application: Application, size: int) -> int:
    Alarm.objects.filter(pk__in=Alarm.objects.values("pk")[:size]).update(next_alarm_time=NOW - timedelta(days=1))
    with CaptureQueriesContext(connection) as caught:
        assert send_batch(NOW, 1000)["sent"] == size
    return len(caught)


def run() -> None:
    import logging

    logging.getLogger("alarm").setLevel(logging.WARNING)
    application = _world()
    # Side by side, and the median of their shares: other work on the machine hits both alike.
    pairs = [(_drain(application, _bare)[0], *_drain(application, _ours)) for _round in range(ROUNDS)]
    floor, ours, growth = (median(values) for values in zip(*pairs, strict=True))
    share = median(own / bare for bare, own, _growth in pairs)
    twins = Alarm.objects.same_time().count()
    print(f"reminders: {ALARMS:,} due alarms of {USERS:,} users, {WORKERS} workers, {BATCH} a batch")  # noqa: T201
    print(f"  bare SQL                  {floor:10,.0f} alarms/s")  # noqa: T201
    print(f"  send_due_alarms           {ours:10,.0f} alarms/s   {share:.2f} of the floor (target {TARGET})")  # noqa: T201
    print(f"  two at one time           {twins:10,}   growth of a worker {growth / 1024:.0f} MB")  # noqa: T201
    print(f"  queries of a batch        {_queries(application, 10)} for 10, {_queries(application, 1000)} for 1000")  # noqa: T201
