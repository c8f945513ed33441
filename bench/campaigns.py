"""What campaigns cost beside bare SQL: an idle reconcile tick, a tick with work, the trigger, enrolling.

1,476 sequences, 200,000 enrollments, 1,000,000 executions, 46,399 of them overdue behind a sender's allowance.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from campaigns.models import Lead, Sender, Sequence
from campaigns.services import reconciling
from campaigns.services.enrolling import enroll_leads
from campaigns.services.leads import subscribe
from config import sweeping
from messaging.models import Application

NOW = datetime(2026, 3, 4, 10, tzinfo=UTC)
SEQUENCES, ENROLLMENTS, EXECUTIONS, OVERDUE = 1476, 200_000, 1_000_000, 46_399

BUILD = [
    """INSERT INTO sequences (application_id, name, status, activated_at, completed_at)
       SELECT %(app)s, 'sequence ' || n,
              CASE WHEN n <= 9 THEN 'active' WHEN n % 3 = 0 THEN 'paused' ELSE 'completed' END,
              %(now)s - interval '90 days', %(now)s FROM generate_series(1, %(sequences)s) n""",
    """INSERT INTO sequence_steps (sequence_id, position, channel, subject, body)
       SELECT s.id, p, 'email', 'Hello', 'Hello' FROM sequences s, generate_series(1, 5) p""",
    "CREATE TEMP TABLE numbered AS SELECT id, row_number() OVER (ORDER BY status, id) - 1 AS n FROM sequences",
    """CREATE TEMP TABLE steps AS
       SELECT n.n AS sequence, s.position, s.id FROM sequence_steps s JOIN numbered n ON n.id = s.sequence_id""",
    """INSERT INTO leads (application_id, name, email)
       SELECT %(app)s, 'Lead ' || n, n || '@example.com' FROM generate_series(1, %(enrollments)s) n""",
    """INSERT INTO sequence_enrollments (sequence_id, lead_id, status, sender_id)
       SELECT q.id, l.id, CASE WHEN l.n <= %(overdue)s THEN 'active' ELSE 'completed' END, %(sender)s
         FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM leads) l
         JOIN numbered q ON q.n = CASE WHEN l.n <= %(overdue)s THEN l.n % 9 ELSE 9 + l.n % (%(sequences)s - 9) END""",
    """INSERT INTO sequence_step_executions (enrollment_id, step_id, status, scheduled_at, executed_at)
       SELECT e.id, s.id, CASE WHEN e.status = 'active' AND s.position = 5 THEN 'pending' ELSE 'sent' END,
              %(now)s - interval '2 hours', %(now)s - interval '3 hours'
         FROM sequence_enrollments e JOIN numbered q ON q.id = e.sequence_id JOIN steps s ON s.sequence = q.n""",
    "ANALYZE",
]


def _build() -> Sender:
    application = Application.objects.create(slug="bench")
    sender = Sender.objects.create(application=application, channel="email", address="a@example.com", daily_limit=100)
    values = {
        "app": application.pk,
        "sender": sender.pk,
        "now": NOW,
        "sequences": SEQUENCES,
        "enrollments": ENROLLMENTS,
        "overdue": OVERDUE,
    }
    with connection.cursor() as cursor:
        for statement in BUILD:
            text = statement.replace("%", "%%").replace("%%(", "%(")
            cursor.execute(text, {key: value for key, value in values.items() if f"%({key})s" in text} or None)
    return sender


def _best(work: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _n in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def _bare_predicates() -> None:
    """The questions a tick must ask, as plain SQL: nothing else."""
    with connection.cursor() as cursor:
        for statement, params in _questions():
            cursor.execute(statement, params)
            cursor.fetchall()


def _questions() -> list[tuple[str, Any]]:
    return [
        rule.candidates(NOW).order_by("pk").values_list("pk", flat=True)[:500].query.sql_with_params()
        for rule in reconciling.RULES
    ]


def _tick() -> None:
    ran = sweeping.run("campaigns.reconcile_sequences", now=NOW)
    assert ran and not ran["error"], ran


def _skip_all_of(sequence: Any) -> str:
    return (
        "UPDATE sequence_step_executions x SET status = 'skipped', skip_reason = 'stopped' FROM sequence_enrollments e"
        f" WHERE e.id = x.enrollment_id AND e.sequence_id = '{sequence}' AND x.status = 'pending'"
    )


def _with_and_without(statement: str) -> tuple[float, float]:
    """The best of five each, in turn, so that a busy machine is busy for both."""
    times = [(_timed_update(statement, triggers=False), _timed_update(statement, triggers=True)) for _n in range(5)]
    return min(without for without, _with in times), min(with_it for _without, with_it in times)


def _timed_update(statement: str, *, triggers: bool) -> float:
    """Rolled back, so each run finds the same rows."""
    with transaction.atomic(), connection.cursor() as cursor:
        if not triggers:
            cursor.execute(_drop("sequence_step_executions", "update"))
        started = time.perf_counter()
        cursor.execute(statement)
        took = time.perf_counter() - started
        transaction.set_rollback(True)
    return took


def _drop(table: str, name: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND tgname LIKE %s",
            [table, f"pgtrigger_signal_{name}_%"],
        )
        return f'ALTER TABLE {table} DISABLE TRIGGER "{cursor.fetchone()[0]}"'


def _fill(count: int) -> Any:
    """One sequence with `count` live enrollments and a pending execution each."""
    application = Application.objects.get(slug="bench")
    row = Sequence.objects.create(application=application, name="big", status="active", activated_at=NOW)
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH s AS (INSERT INTO sequence_steps (sequence_id, position, channel) VALUES (%s, 1, 'email')"
            " RETURNING id), e AS (INSERT INTO sequence_enrollments (sequence_id, lead_id)"
            " SELECT %s, id FROM leads ORDER BY id LIMIT %s RETURNING id)"
            " INSERT INTO sequence_step_executions (enrollment_id, step_id, scheduled_at)"
            " SELECT e.id, s.id, %s FROM e, s",
            [row.pk, row.pk, count, NOW + timedelta(days=1)],
        )
        cursor.execute("ANALYZE sequence_step_executions, sequence_enrollments, sequences")
    return row.pk


def _spread(count: int) -> None:
    """`count` sequences with one live enrollment and one pending execution each."""
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH q AS (INSERT INTO sequences (application_id, name, status, activated_at)"
            " SELECT (SELECT id FROM applications WHERE slug = 'bench'), 'spread', 'active', %s"
            " FROM generate_series(1, %s) RETURNING id),"
            " s AS (SELECT id FROM sequence_steps LIMIT 1), l AS (SELECT id FROM leads LIMIT 1),"
            " e AS (INSERT INTO sequence_enrollments (sequence_id, lead_id) SELECT q.id, l.id FROM q, l RETURNING id)"
            " INSERT INTO sequence_step_executions (enrollment_id, step_id, scheduled_at)"
            " SELECT e.id, s.id, %s FROM e, s",
            [NOW, count, NOW + timedelta(days=1)],
        )
        cursor.execute("ANALYZE sequence_step_executions, sequence_enrollments, sequences")


def _stale(count: int) -> None:
    """Make `count` of the throttled rows stale, so that a tick has that much to do."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sequence_step_executions SET scheduled_at = %s WHERE id IN"
            " (SELECT x.id FROM sequence_step_executions x JOIN sequence_enrollments e ON e.id = x.enrollment_id"
            " WHERE x.status = 'pending' AND x.scheduled_at < %s AND e.sequence_id ="
            " (SELECT min(sequence_id::text)::uuid FROM sequence_enrollments WHERE status = 'active') LIMIT %s)",
            [NOW - timedelta(days=30), NOW - timedelta(hours=1), count],
        )


def _say(line: str) -> None:
    print(line)  # noqa: T201


def run() -> None:
    _build()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM sequence_step_executions")
        _say(f"campaigns: {SEQUENCES:,} sequences, {ENROLLMENTS:,} enrollments, {cursor.fetchone()[0]:,} executions")
    _tick()
    floor, ours = _best(_bare_predicates), _best(_tick)
    _say(f"  bare predicate queries      {floor * 1000:8.0f} ms")
    _say(f"  reconcile, nothing to do    {ours * 1000:8.0f} ms   {ours / floor:.2f} of the floor (at most 2)")
    for count in (1, 100, 500):
        _stale(count)
        started = time.perf_counter()
        _tick()
        _say(f"  reconcile, {count:4} rows to do  {(time.perf_counter() - started) * 1000:8.0f} ms")
    sequence = _fill(10_000)
    statement = _skip_all_of(sequence)
    without, with_trigger = _with_and_without(statement)
    ratio = with_trigger / without
    _say(f"  10,000 executions of one    {without * 1000:8.0f} ms without the trigger")
    _say(f"                              {with_trigger * 1000:8.0f} ms with it   {ratio:.2f} (at most 1.5)")
    _spread(10_000)
    wide = (
        "UPDATE sequence_step_executions x SET status = 'skipped', skip_reason = 'stopped' FROM sequence_enrollments e"
        " JOIN sequences s ON s.id = e.sequence_id WHERE e.id = x.enrollment_id AND s.name = 'spread'"
    )
    without, with_trigger = _with_and_without(wide)
    _say(f"  10,000 sequences at once    {without * 1000:8.0f} ms without the trigger")
    _say(f"                              {with_trigger * 1000:8.0f} ms with it, in one statement")
    _enroll()


def _enroll() -> None:
    application = Application.objects.get(slug="bench")
    sequence = Sequence.objects.filter(application=application, status="active").order_by("created_at", "pk").first()
    assert sequence is not None
    leads = Lead.objects.bulk_create(
        Lead(application=application, name="x", email=f"enroll{n}@example.com") for n in range(1000)
    )
    subscribe(leads, NOW)
    with CaptureQueriesContext(connection) as queries:
        started = time.perf_counter()
        enroll_leads(sequence.pk, [lead.pk for lead in leads], NOW)
        took = time.perf_counter() - started
    _say(f"  enroll 1,000 leads          {took * 1000:8.0f} ms in {len(queries)} queries (at most 20)")
