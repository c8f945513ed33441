"""has_pending_work and the counters: the triggers against the predicate."""

import json

import pytest
from django.db import IntegrityError, connection, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from campaigns.models import Enrollment, Execution, Lead, Sequence, Step
from campaigns.triggers import COUNTED
from config.statemachine import graph
from messaging.models import Application
from tests.campaigns.factories import (
    DAY,
    NOW,
    EnrollmentFactory,
    ExecutionFactory,
    SequenceFactory,
    StepFactory,
    work,
)
from tests.campaigns.test_reconciling import many

pytestmark = pytest.mark.django_db


def truth(sequence):
    """Said again in other words than the product's."""
    live = [e.pk for e in sequence.enrollments.all() if e.status in ("active", "paused")]
    rows = list(Execution.objects.filter(enrollment__sequence=sequence).values_list("enrollment_id", "status"))
    waiting = ("pending", "processing", "deferred", "awaiting_enrichment")
    counts = {
        "total": len(rows),
        "sent": sum(status == "sent" for _e, status in rows),
        "failed": sum(status == "failed" for _e, status in rows),
        "skipped": sum(status == "skipped" for _e, status in rows),
        "waiting": sum(status in waiting for _e, status in rows),
        "enrollments": sequence.enrollments.count(),
    }
    return any(e in live and s in ("pending", "processing", "deferred") for e, s in rows), counts


def assert_right():
    for sequence in Sequence.objects.all():
        assert (sequence.has_pending_work, sequence.counters) == truth(sequence)
        counters = sequence.counters
        assert sum(counters[name] for name in COUNTED if name != "total") == counters["total"]
    assert not Sequence.objects.miscounted().exists()
    assert not Sequence.objects.with_work().exclude(work=models_f()).exists()


def models_f():
    from django.db.models import F

    return F("has_pending_work")


class Signal(RuleBasedStateMachine):
    """Any sequence of inserts, updates, deletes and moves, single and in bulk, through SQL."""

    @initialize()
    def rows(self):
        Execution.objects.all().delete()
        Enrollment.objects.all().delete()
        Sequence.objects.all().delete()
        application, _new = Application.objects.get_or_create(slug="shop")
        self.sequences = SequenceFactory.create_batch(3, application=application)
        self.steps = [StepFactory(sequence=self.sequences[0]) for _n in range(6)]
        self.count = 0

    @rule(sequence=st.integers(0, 2), status=st.sampled_from(["active", "paused", "stopped", "failed"]))
    def enroll(self, sequence, status):
        EnrollmentFactory(sequence=self.sequences[sequence], status=status)

    @precondition(lambda self: Enrollment.objects.exists())
    @rule(data=st.data(), status=st.sampled_from(Execution.Status.values))
    def insert(self, data, status):
        enrollment = data.draw(st.sampled_from(list(Enrollment.objects.order_by("pk"))))
        taken = set(enrollment.executions.values_list("step_id", flat=True))
        free = [step for step in self.steps if step.pk not in taken]
        if free:
            ExecutionFactory(enrollment=enrollment, step=free[0], status=status)

    @precondition(lambda self: Execution.objects.exists())
    @rule(data=st.data())
    def change(self, data):
        row = data.draw(st.sampled_from(list(Execution.objects.order_by("pk"))))
        targets = graph(Execution, "status").targets(row.status)
        if targets:
            to = data.draw(st.sampled_from(targets))
            Execution.objects.filter(pk=row.pk).update(status=to, **tied(to))

    @rule(start=st.sampled_from(["pending", "deferred", "processing"]), to=st.sampled_from(["skipped", "pending"]))
    def change_many(self, start, to):
        if to in graph(Execution, "status").targets(start):
            Execution.objects.filter(status=start).update(status=to, **tied(to))

    @precondition(lambda self: Enrollment.objects.exists())
    @rule(data=st.data())
    def change_enrollment(self, data):
        row = data.draw(st.sampled_from(list(Enrollment.objects.order_by("pk"))))
        targets = graph(Enrollment, "status").targets(row.status)
        if targets:
            Enrollment.objects.filter(pk=row.pk).update(status=data.draw(st.sampled_from(targets)))

    @precondition(lambda self: Enrollment.objects.exists())
    @rule(data=st.data(), sequence=st.integers(0, 2))
    def move_enrollment(self, data, sequence):
        row = data.draw(st.sampled_from(list(Enrollment.objects.order_by("pk"))))
        Enrollment.objects.filter(pk=row.pk).update(sequence=self.sequences[sequence])

    @rule(sequence=st.integers(0, 2))
    def move_all_enrollments(self, sequence):
        Enrollment.objects.update(sequence=self.sequences[sequence])

    @precondition(lambda self: Execution.objects.exists() and Enrollment.objects.count() > 1)
    @rule(data=st.data())
    def move_execution(self, data):
        row = data.draw(st.sampled_from(list(Execution.objects.order_by("pk"))))
        to = data.draw(st.sampled_from(list(Enrollment.objects.order_by("pk"))))
        if not Execution.objects.filter(enrollment=to, step=row.step).exists():
            Execution.objects.filter(pk=row.pk).update(enrollment=to)

    @precondition(lambda self: Execution.objects.exists())
    @rule(data=st.data())
    def delete(self, data):
        data.draw(st.sampled_from(list(Execution.objects.order_by("pk")))).delete()

    @precondition(lambda self: Enrollment.objects.exists())
    @rule(data=st.data())
    def delete_enrollment_before_its_executions(self, data):
        row = data.draw(st.sampled_from(list(Enrollment.objects.order_by("pk"))))
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM sequence_enrollments WHERE id = %s", [row.pk])
            cursor.execute("DELETE FROM sequence_step_executions WHERE enrollment_id = %s", [row.pk])

    @rule()
    def delete_all(self):
        Execution.objects.filter(status__in=["sent", "pending"]).delete()

    @invariant()
    def column_and_counters_are_right(self):
        assert_right()


def tied(status):
    return {
        "skip_reason": "stopped" if status == "skipped" else None,
        **({"executed_at": NOW} if status in ("sent", "failed") else {}),
        **({"deferred_until": NOW} if status == "deferred" else {}),
        **({"processing_started_at": NOW} if status == "processing" else {}),
    }


def test_the_column_follows_any_sequence_of_writes(db):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Signal,
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def run(sql, *params):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


@pytest.mark.django_db(transaction=True)
def test_truncate_clears_the_signal_and_the_counters():
    work()
    run("TRUNCATE sequence_step_executions")
    assert_right()
    assert not Sequence.objects.get().has_pending_work
    run("TRUNCATE sequence_enrollments CASCADE")
    assert_right()
    assert Sequence.objects.get().counters["enrollments"] == 0


def test_executions_may_come_before_their_enrollment_in_one_transaction():
    row = EnrollmentFactory()
    step = StepFactory(sequence=row.sequence)
    Enrollment.objects.filter(pk=row.pk).delete()
    Execution(enrollment=row, step=step, scheduled_at=NOW).save()
    row.save(force_insert=True)
    assert_right()
    assert Sequence.objects.get().has_pending_work


def test_a_write_that_changes_nothing_for_the_sequence_leaves_its_row_alone():
    row = work()
    before = version(row)
    Execution.objects.filter(pk=row.pk).update(status="processing", processing_started_at=NOW)
    Execution.objects.filter(pk=row.pk).update(scheduled_at=NOW)
    Enrollment.objects.filter(pk=row.enrollment_id).update(status="paused")
    assert version(row) == before


def version(row):
    with connection.cursor() as cursor:
        cursor.execute("SELECT ctid::text FROM sequences WHERE id = %s", [row.enrollment.sequence_id])
        return cursor.fetchone()[0]


def test_the_time_of_the_last_change_is_written_only_when_the_value_changes():
    row = work()
    at = Sequence.objects.get().pending_work_changed_at
    ExecutionFactory(enrollment=row.enrollment, step=StepFactory(sequence=row.enrollment.sequence), status="sent")
    assert Sequence.objects.get().pending_work_changed_at == at
    Execution.objects.filter(pk=row.pk).update(status="skipped", skip_reason="stopped")
    assert Sequence.objects.get().pending_work_changed_at > at


def test_many_sequences_in_one_statement_cost_no_statement_each(django_assert_num_queries):
    application = Application.objects.create(slug="shop")
    sequences = Sequence.objects.bulk_create(
        Sequence(application=application, name=str(n), status="active", activated_at=NOW) for n in range(300)
    )
    lead = Lead.objects.create(application=application, email="a@example.com")
    step = Step.objects.create(sequence=sequences[0], position=1, channel="email")
    enrollments = Enrollment.objects.bulk_create(Enrollment(sequence=row, lead=lead) for row in sequences)
    Execution.objects.bulk_create(Execution(enrollment=row, step=step, scheduled_at=NOW) for row in enrollments)
    assert Sequence.objects.filter(has_pending_work=True).count() == 300
    with django_assert_num_queries(1):
        Execution.objects.update(status="skipped", skip_reason="stopped")
    assert_right()


def read_from_front_to_end(*tables):
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(seq_scan) FROM pg_stat_xact_user_tables WHERE relname = ANY(%s)", [list(tables)])
        return cursor.fetchone()[0]


def test_the_triggers_find_their_rows_by_index_however_small_the_tables_are():
    """The plan stays for the connection's life: made over a handful of rows it must serve a million."""
    row, other = work(), SequenceFactory()
    statements = [
        ("UPDATE sequence_step_executions SET status = 'awaiting_enrichment'", "sequence_enrollments"),
        ("UPDATE sequence_enrollments SET status = 'stopped'", "sequence_step_executions"),
        (f"UPDATE sequence_enrollments SET sequence_id = '{other.pk}'", "sequence_step_executions"),
        ("DELETE FROM sequence_step_executions", "sequence_enrollments"),
        ("DELETE FROM sequence_enrollments", "sequence_step_executions"),
    ]
    for statement, others in statements:
        before = read_from_front_to_end(others, "sequences")
        run(statement)
        assert read_from_front_to_end(others, "sequences") == before, statement
    assert_right()
    assert not Enrollment.objects.filter(pk=row.enrollment_id).exists()


def more_like(first, count):
    """As many live enrollments of the same sequence, each with a pending execution of the same step."""
    run("INSERT INTO leads (application_id, email) SELECT application_id, n || '@x.example' FROM leads,"
        " generate_series(1, %s) n", count)  # fmt: skip
    run("INSERT INTO sequence_enrollments (sequence_id, lead_id) SELECT %s, id FROM leads WHERE id <> %s",
        first.enrollment.sequence_id, first.enrollment.lead_id)  # fmt: skip
    run("INSERT INTO sequence_step_executions (enrollment_id, step_id, scheduled_at) SELECT id, %s, now()"
        " FROM sequence_enrollments WHERE id <> %s", first.step_id, first.enrollment_id)  # fmt: skip


def share_of_triggers(statement):
    """How many times what the statement costs by itself; the best of three."""
    found = []
    for _n in range(3):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
            (told,) = cursor.fetchone()[0]
            spent = sum(t["Time"] for t in told["Triggers"] if "signal" in t["Trigger Name"])
            found.append(spent / (told["Execution Time"] - spent))
            transaction.set_rollback(True)
    return min(found)


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("sequence_step_executions", "status = 'skipped', skip_reason = 'stopped'"),
        ("sequence_enrollments", "status = 'stopped'"),
        ("sequence_enrollments", "pause_reason = 'x'"),
    ],
)
def test_the_triggers_compare_no_row_with_each_of_the_others(table, change):
    """Which cost 15 times the update. Also not where the connection has planned them for one row of small tables."""
    first = work()
    run(f"UPDATE {table} SET {change}")
    more_like(first, 4000)
    assert share_of_triggers(f"UPDATE {table} SET {change}") < 5


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_the_triggers_leave_the_planner_as_its_owner_set_it(chosen):
    row = work()
    run(f"SET LOCAL enable_seqscan = {chosen}; SET LOCAL enable_nestloop = {chosen}")
    run("UPDATE sequence_step_executions SET status = 'awaiting_enrichment'")
    run("UPDATE sequence_step_executions SET scheduled_at = scheduled_at")
    with pytest.raises(IntegrityError), transaction.atomic():
        ExecutionFactory(enrollment=row.enrollment, step=row.step)
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('enable_seqscan'), current_setting('enable_nestloop')")
        assert cursor.fetchone() == (chosen, chosen)


def test_a_sequence_without_enrollments_is_not_sought_in_those_of_all_others():
    """A few sequences with most enrollments once made each look at any other one read the whole table."""
    full = SequenceFactory.create_batch(2)
    for sequence in full:
        many(sequence, 1000, due=lambda n: NOW + DAY)
    SequenceFactory.create_batch(60, status="completed")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE sequences, sequence_enrollments, sequence_step_executions")
    for rows in (Sequence.objects.drifted(), Sequence.objects.with_display(NOW)):
        (plan,) = json.loads(rows.order_by("pk").explain(analyze=True, format="json"))
        assert [node for node in nodes(plan["Plan"]) if read_whole(node) > 3] == []


def nodes(node):
    yield node
    for part in node.get("Plans", []):
        yield from nodes(part)


def read_whole(node):
    """How often the enrollments were read from front to end."""
    whole = node["Node Type"] == "Seq Scan" and node["Relation Name"] == "sequence_enrollments"
    return node["Actual Loops"] if whole else 0
