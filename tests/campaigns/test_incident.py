"""The production incident, built as it was found, and what one batch makes of it."""

import pytest
from django.db import connection

from campaigns.models import Enrollment, Execution, Sequence
from campaigns.triggers import COUNTED
from config import integrity
from config.models import Decision
from messaging.models import Message
from tests.campaigns.factories import DAY, HOUR, MINUTE, NOW, ApplicationFactory, SenderFactory
from tests.campaigns.test_reconciling import LIMIT

SEQUENCES, THROTTLED = 1476, 46_399

BUILD = """
    INSERT INTO sequences (id, application_id, name, status, activated_at, completed_at)
    SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, %(app)s, 'sequence ' || n,
           CASE WHEN n < 10 OR n = 13 THEN 'active' ELSE 'completed' END, %(now)s - interval '90 days',
           %(now)s - interval '45 days'
      FROM generate_series(1, %(sequences)s) n;
    INSERT INTO sequence_steps (id, sequence_id, position, channel, subject, body)
    SELECT ('00000000-0000-7000-8001-' || lpad(n::text, 12, '0'))::uuid, s.id, 1, 'email', 'Hello', 'Hello'
      FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM sequences) s;
    INSERT INTO sequence_senders (sequence_id, sender_id) SELECT id, %(sender)s FROM sequences;
    INSERT INTO leads (id, application_id, name, email)
    SELECT ('00000000-0000-7000-8002-' || lpad(n::text, 12, '0'))::uuid, %(app)s, 'Lead ' || n, n || '@example.com'
      FROM generate_series(1, %(leads)s) n;
"""
# (sequence number of row n, enrollment status, execution status, due) of each part of the incident.
PARTS = """
    CREATE TEMP TABLE part AS
    SELECT n, 1 + n %% 9 AS sequence, 'active' AS enrollment, 'pending' AS status,
           %(now)s - interval '1 hour' - n * interval '10 seconds' AS due FROM generate_series(1, %(throttled)s) n
    UNION ALL SELECT n + 50000, 10, 'active', 'pending', %(now)s - interval '49 days' FROM generate_series(1, 63) n
    UNION ALL SELECT n + 50100, 11, 'active', 'pending', %(now)s - interval '48 days' FROM generate_series(1, 21) n
    UNION ALL SELECT 50200, 12, 'stopped', 'deferred', %(now)s - interval '1 day'
    UNION ALL SELECT n + 50300, 13, 'active', 'processing', %(now)s - interval '2 hours' FROM generate_series(1, 7) n;
    INSERT INTO sequence_enrollments (id, sequence_id, lead_id, status, sender_id, current_step_id)
    SELECT ('00000000-0000-7000-8003-' || lpad(n::text, 12, '0'))::uuid,
           ('00000000-0000-7000-8000-' || lpad(sequence::text, 12, '0'))::uuid,
           ('00000000-0000-7000-8002-' || lpad(n::text, 12, '0'))::uuid, enrollment, %(sender)s,
           ('00000000-0000-7000-8001-' || lpad(sequence::text, 12, '0'))::uuid FROM part;
    INSERT INTO sequence_step_executions (id, enrollment_id, step_id, status, scheduled_at, deferred_until,
                                          processing_started_at)
    SELECT ('00000000-0000-7000-8004-' || lpad(n::text, 12, '0'))::uuid,
           ('00000000-0000-7000-8003-' || lpad(n::text, 12, '0'))::uuid,
           ('00000000-0000-7000-8001-' || lpad(sequence::text, 12, '0'))::uuid, status, due,
           CASE WHEN status = 'deferred' THEN due END, CASE WHEN status = 'processing' THEN due END FROM part;
    DROP TABLE part;
    ANALYZE sequences, sequence_enrollments, sequence_step_executions;
"""


@pytest.fixture
def incident(db):
    sender = SenderFactory(daily_limit=100)
    values = {
        "app": ApplicationFactory().pk,
        "sender": sender.pk,
        "now": NOW,
        "sequences": SEQUENCES,
        "leads": 50_400,
        "throttled": THROTTLED,
    }
    with connection.cursor() as cursor:
        for script in (BUILD, PARTS):
            for statement in script.split(";\n"):
                if statement.strip():
                    cursor.execute(statement, values)
    return sender


def number(sequence):
    return Sequence.objects.get(pk=f"00000000-0000-7000-8000-{sequence:012}")


def readings():
    return {found.name.split(".")[1]: found.count for found in integrity.report(NOW) if "campaigns" in found.name}


def snapshot():
    rows = Execution.objects.order_by("pk").values_list("pk", "status", "deferred_until", "message_id")
    return list(rows), list(Sequence.objects.order_by("pk").values_list("pk", "status", "has_pending_work"))


def test_one_batch_ends_the_incident(incident, sweep):
    assert readings() == {
        "stuck_completion": 0,
        "signal_drift": 0,
        "orphans": 1,
        "completed_with_work": 2,
        "overdue": THROTTLED,
        "stuck_processing": 7,
        "counters": 0,
    }
    row = number(10)
    assert row.counters["waiting"] == row.counters["total"] == 63
    assert sum(row.counters[name] for name in COUNTED if name != "total") == row.total_count
    counts = sweep("reconcile_sequences", NOW)
    assert counts == {"stale": 84, "cleared": 2, "orphaned": 1, "stuck_pending": 7}

    stale = Execution.objects.filter(skip_reason="stale")
    assert stale.count() == 84
    assert set(Enrollment.objects.filter(executions__in=stale).values_list("status", flat=True)) == {"stopped"}
    assert [(number(n).status, number(n).has_pending_work) for n in (10, 11)] == [("completed", False)] * 2
    assert Execution.objects.get(skip_reason="orphaned").enrollment.status == "stopped"
    assert Execution.objects.filter(enrollment__sequence=number(13), status="pending").count() == 7
    throttled = Execution.objects.filter(enrollment__sequence__in=[number(n).pk for n in range(1, 10)])
    assert throttled.filter(status="pending", deferred_until=None).count() == THROTTLED
    assert not Message.objects.exists()

    told = {decision.rule: decision.affected for decision in Decision.objects.filter(object_id=number(10).pk)}
    assert told == {"reverse.stale": 63, "reverse.stopped": 63}
    assert Decision.objects.get(rule="orphans.orphaned").affected == 1
    assert Decision.objects.get(rule="stuck.pending").affected == 7
    after = readings()
    assert {name: count for name, count in after.items() if count} == {"overdue": THROTTLED + 7}

    before, decisions = snapshot(), Decision.objects.count()
    assert sweep("reconcile_sequences", NOW + 5 * MINUTE) == {}
    assert snapshot() == before
    assert Decision.objects.count() == decisions


def test_sending_goes_on_in_turn_and_nothing_stale_is_written(incident, sweep):
    sweep("reconcile_sequences", NOW)
    counts = sweep("send_due_steps", NOW)
    assert counts["claimed"] == 100
    assert counts["deferred"] == THROTTLED + 7 - 100
    taken = Execution.objects.filter(status="processing")
    assert {row.effective_due_at > NOW - LIMIT for row in taken} == {True}
    per_sequence = {n: taken.filter(enrollment__sequence=number(n)).count() for n in range(1, 10)}
    assert set(per_sequence.values()) <= {10, 11}
    for sequence in (1, 9):
        sent = set(taken.filter(enrollment__sequence=number(sequence)).values_list("pk", flat=True))
        oldest = Execution.objects.filter(enrollment__sequence=number(sequence)).order_by("scheduled_at", "pk")
        assert sent == {row.pk for row in oldest[: len(sent)]}
    assert Message.objects.count() == 100
    # Twelve days on: throttled all the while, and still nobody looks forgotten.
    for day in (6, 12):
        sweep("send_due_steps", NOW + day * DAY)
    sweep("reconcile_sequences", NOW + 12 * DAY + HOUR)
    assert Execution.objects.filter(skip_reason="stale").count() == 84
