"""Campaigns with real threads and commits: the signal at commit, no deadlocks, nobody written to twice."""

import pytest
from django.db import OperationalError, connection, transaction

from campaigns.models import Enrollment, Execution, Sequence
from campaigns.services import enrolling, enrollments, following, reconciling, replies, sending, sequences
from campaigns.services.leads import subscribe
from config import sweeping
from config.models import Decision
from messaging.models import Message
from tests.campaigns.conftest import providers  # noqa: F401  as everywhere in campaigns
from tests.campaigns.factories import (
    DAY,
    NOW,
    EnrollmentFactory,
    ExecutionFactory,
    LeadFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    pool,
    work,
)
from tests.campaigns.test_reconciling import many
from tests.campaigns.test_signal import assert_right

ROUNDS = 8


def skip(*rows):
    with transaction.atomic():
        Execution.objects.filter(pk__in=[row.pk for row in rows]).update(status="skipped", skip_reason="stopped")


def all_well(results):
    assert [result for result in results if isinstance(result, Exception)] == []
    assert_right()


def test_the_last_two_executions_end_at_the_same_time(at_once):
    for _round in range(ROUNDS):
        sequence = SequenceFactory()
        one, two = work(sequence), work(sequence)
        all_well(at_once(lambda a=one: skip(a), lambda b=two: skip(b)))
        assert not Sequence.objects.get(pk=sequence.pk).has_pending_work


def test_two_transactions_that_overlap_for_sure(at_once):
    """The second ends its execution while the first is not committed; neither sees the other's row."""
    from threading import Event

    sequence = SequenceFactory()
    one, two = work(sequence), work(sequence)
    first_has_written = Event()

    def first():
        with transaction.atomic():
            Execution.objects.filter(pk=one.pk).update(status="skipped", skip_reason="stopped")
            first_has_written.set()
            while not somebody_waits():
                pass

    def second():
        first_has_written.wait(10)
        skip(two)

    all_well(at_once(first, second))
    assert not Sequence.objects.get().has_pending_work


def somebody_waits():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
        return cursor.fetchone()[0]


def test_an_enrollment_pauses_or_stops_while_its_execution_ends(at_once):
    for status in ("paused", "stopped") * (ROUNDS // 2):
        row = work()
        all_well(
            at_once(
                lambda row=row: skip(row),
                lambda row=row, s=status: Enrollment.objects.filter(pk=row.enrollment_id).update(status=s),
            )
        )


def test_new_work_comes_while_the_last_ends(at_once):
    for _round in range(ROUNDS):
        row = work()
        step = StepFactory(sequence=row.enrollment.sequence)
        all_well(
            at_once(
                lambda row=row: skip(row),
                lambda row=row, step=step: ExecutionFactory(enrollment=row.enrollment, step=step),
            )
        )
        assert Sequence.objects.get(pk=row.enrollment.sequence_id).has_pending_work


def test_a_moved_enrollment_and_its_execution(at_once):
    for _round in range(ROUNDS):
        row, other = work(), SequenceFactory()
        all_well(
            at_once(
                lambda row=row: skip(row),
                lambda row=row, o=other: Enrollment.objects.filter(pk=row.enrollment_id).update(sequence=o),
            )
        )


@pytest.mark.parametrize("come", ["born", "moved"])
@pytest.mark.parametrize("remove", [False, True])
def test_an_enrollment_moves_while_it_gets_an_execution(at_once, come, remove):
    """The foreign key locks the enrollment at the commit, after the trigger has locked its sequence."""
    from threading import Event

    row, other = EnrollmentFactory(sequence=SequenceFactory()), SequenceFactory()
    step, written = StepFactory(sequence=row.sequence), Event()
    elsewhere = work(due=NOW) if come == "moved" else None

    def insert():
        with transaction.atomic():
            if elsewhere:
                Execution.objects.filter(pk=elsewhere.pk).update(enrollment=row)
            else:
                ExecutionFactory(enrollment=row, step=step)
            written.set()
            while not somebody_waits():
                pass

    def move():
        written.wait(10)
        mine = Enrollment.objects.filter(pk=row.pk)
        with connection.cursor() as cursor:
            if remove:
                cursor.execute("DELETE FROM sequence_enrollments WHERE id = %s", [row.pk])
            else:
                mine.update(sequence=other)

    results = at_once(insert, move)
    assert [type(result) for result in results if isinstance(result, OperationalError)] == []
    assert_right()
    assert Enrollment.objects.get(pk=row.pk).sequence_id == (row.sequence_id if remove else other.pk)


def test_bulk_statements_over_many_sequences_in_opposite_orders_do_not_deadlock(at_once):
    rows = [work() for _n in range(30)]
    halves = rows[::2], rows[1::2]
    more = [
        ExecutionFactory(enrollment=row.enrollment, step=StepFactory(sequence=row.enrollment.sequence)) for row in rows
    ]

    def toggle(some, reverse):
        ids = [row.pk for row in (reversed(some) if reverse else some)]
        with connection.cursor() as cursor:
            for _round in range(6):
                cursor.execute(
                    "UPDATE sequence_step_executions SET status = CASE status WHEN 'awaiting_enrichment' THEN 'pending'"
                    " ELSE 'awaiting_enrichment' END WHERE id = ANY(%s)",
                    [ids],
                )

    def toggle_enrollments():
        with connection.cursor() as cursor:
            for _round in range(6):
                cursor.execute("UPDATE sequence_enrollments SET pause_reason = pause_reason || 'x'")

    results = at_once(
        lambda: toggle(halves[0], False),
        lambda: toggle(halves[1], True),
        lambda: toggle(more, True),
        toggle_enrollments,
    )
    all_well(results)


def test_bulk_against_single_and_insert_against_delete(at_once):
    sequence = SequenceFactory()
    rows = many(sequence, 200, due=lambda n: NOW)

    def one_by_one():
        for row in rows[:50]:
            skip(row)

    def delete_some():
        Execution.objects.filter(pk__in=[row.pk for row in rows[150:]]).delete()

    def insert_some():
        for enrollment in Enrollment.objects.order_by("pk")[100:120]:
            ExecutionFactory(enrollment=enrollment, step=StepFactory(sequence=SequenceFactory()))

    all_well(at_once(one_by_one, lambda: skip(*rows[50:150]), delete_some, insert_some))


def test_eight_workers_create_each_message_once_and_keep_the_limit(at_once):
    sender = SenderFactory(daily_limit=150)
    for _n in range(3):
        many(SequenceFactory(), 100, due=lambda n: NOW, sender=sender)
    results = at_once(*[lambda: sending.send_due([sender.pk], NOW)] * 8)
    all_well(results)
    assert Message.objects.count() == 150
    assert Message.objects.values("idempotency_key").distinct().count() == 150
    assert Execution.objects.filter(status="processing").count() == 150


def test_eight_followers_record_each_result_once(at_once, sweep):
    sequence = SequenceFactory()
    StepFactory(sequence=sequence)
    StepFactory(sequence=sequence, delay_seconds=3600)
    sender = SenderFactory()
    many(sequence, 60, due=lambda n: NOW, sender=sender)
    sweep("send_due_steps", NOW)
    Message.objects.update(status="successful", sent_at=NOW)
    ids = list(Execution.objects.values_list("pk", flat=True))
    all_well(at_once(*[lambda: following.record_results(ids, NOW)] * 8))
    assert Execution.objects.filter(status="sent").count() == 60
    assert Execution.objects.filter(status="pending").count() == 60


def test_enrolling_the_same_leads_at_once_enrolls_them_once(at_once):
    sequence = SequenceFactory()
    StepFactory(sequence=sequence)
    pool(sequence, SenderFactory())
    leads = LeadFactory.create_batch(20)
    subscribe(leads, NOW)
    ids = [lead.pk for lead in leads]
    results = at_once(*[lambda: enrolling.enroll_leads(sequence.pk, ids, NOW)] * 6)
    all_well(results)
    assert sum(one.status == "enrolled" for result in results for one in result) == 20
    assert Enrollment.objects.count() == Execution.objects.count() == 20


def test_completion_against_new_work_never_strands_it(at_once):
    for _round in range(ROUNDS):
        sequence = SequenceFactory()
        step = StepFactory(sequence=sequence)
        done = work(sequence, status="sent", enrollment="completed")
        row = EnrollmentFactory(sequence=sequence)
        results = at_once(
            lambda s=sequence: reconciling.reconcile_sequence(s.pk, NOW),
            lambda row=row, step=step: ExecutionFactory(enrollment=row, step=step, scheduled_at=NOW + DAY),
        )
        assert not [result for result in results if isinstance(result, Exception)]
        # Whoever was later: after the next tick the two agree.
        sweeping.run("campaigns.reconcile_sequences", now=NOW, wait=True)
        found = Sequence.objects.get(pk=done.enrollment.sequence_id)
        assert (found.status, found.has_pending_work) in (("active", True), ("completed", False))
        assert_right()


def test_a_pause_commits_before_or_after_the_claim_never_between(at_once):
    for _round in range(ROUNDS):
        sender, sequence = SenderFactory(), SequenceFactory()
        many(sequence, 20, due=lambda n: NOW, sender=sender)
        results = at_once(
            lambda s=sender: sending.send_due([s.pk], NOW), lambda s=sequence: sequences.pause_sequence(s.pk)
        )
        all_well(results)
        assert Execution.objects.of([sequence.pk]).filter(status="processing").count() in (0, 20)


def test_the_same_reply_at_once_is_one_row(at_once):
    row = work(due=NOW + DAY)
    incoming = replies.Incoming(enrollment_id=row.enrollment_id, text="yes", external_id="x")
    results = at_once(*[lambda: replies.record_reply(incoming, Enrollment.objects.all(), NOW)] * 6)
    all_well(results)
    assert sum(created for _reply, created in results) == 1
    assert Decision.objects.filter(rule="reply.human.replied").count() == 2  # execution and enrollment


def test_stop_complete_and_send_at_once_do_not_deadlock(at_once):
    for _round in range(ROUNDS):
        sender, sequence = SenderFactory(), SequenceFactory()
        rows = many(sequence, 20, due=lambda n: NOW, sender=sender)
        results = at_once(
            lambda s=sender: sending.send_due([s.pk], NOW),
            lambda s=sequence: sequences.complete_sequence(s.pk, NOW),
            lambda r=rows: [enrollments.stop_enrollment(one.enrollment_id, NOW) for one in r[:5]],
        )
        refused = [r for r in results if isinstance(r, Exception) and type(r).__name__ != "TransitionNotAllowed"]
        assert refused == []
        assert_right()
        assert not Sequence.objects.get(pk=sequence.pk).has_pending_work


@pytest.fixture
def sweep(transactional_db):
    def run(name, now):
        ran = sweeping.run(f"campaigns.{name}", now=now, wait=True)
        assert ran["error"] is None, ran
        return ran["counts"]

    return run
