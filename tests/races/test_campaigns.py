"""Campaigns with real threads and commits: the signal at commit, no deadlocks, nobody written to twice."""

from contextlib import contextmanager
from threading import Event

import pytest
from django.db import OperationalError, connection, connections, transaction

from campaigns.models import Enrollment, Execution, Sender, Sequence
from campaigns.services import enrolling, enrollments, following, reconciling, replies, senders, sending, sequences
from campaigns.services.leads import change_lead, subscribe
from config import sweeping
from config.errors import Conflict
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


def part_of(enrollment_id):
    with connection.cursor() as cursor:
        cursor.execute("SELECT uuid_hash(%s::uuid) & 63", [enrollment_id])
        return cursor.fetchone()[0]


def test_a_move_that_is_not_committed_holds_up_no_other_sequence(at_once):
    """But for one in 64, which stands behind the same lock."""
    moving, target, other = work(), SequenceFactory(), work()
    while part_of(other.enrollment_id) == part_of(moving.enrollment_id):
        other = work()
    moved, done = Event(), Event()

    def move():
        with transaction.atomic():
            Enrollment.objects.filter(pk=moving.enrollment_id).update(sequence=target)
            moved.set()
            done.wait(30)

    def end():
        moved.wait(30)
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '5s'")
                skip(other)
        finally:
            done.set()

    all_well(at_once(move, end))


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


def test_a_refused_sender_is_told_once_and_nobody_waits_for_another(at_once, sweep):
    for _round in range(ROUNDS):
        sender = SenderFactory()
        sequence = SequenceFactory()
        many(sequence, 30, due=lambda n: NOW, sender=sender)
        sweep("send_due_steps", NOW)
        late = many(sequence, 5, due=lambda n: NOW, sender=sender)
        mine = Message.objects.filter(from_address=sender.address)
        details = {"scope": "sender", "code": "553"}
        mine.update(status="failed", failed_at=NOW, error_reason="sender_rejected", error_details=details)
        ids = list(Execution.objects.filter(enrollment__sequence=sequence, status="processing").values_list("pk"))
        ids = [pk for (pk,) in ids]
        halves = [ids[:15], ids[15:]]
        follow = [lambda keys=half: following.record_results(keys, NOW) for half in halves * 2]
        all_well(at_once(*follow, lambda s=sender: sending.send_due([s.pk], NOW)))
        # What a worker left because another held the sender is found by the next sweep.
        sweep("follow_message_results", NOW)
        assert Sender.objects.get(pk=sender.pk).status == "error"
        assert Decision.objects.filter(rule="sender.rejected", object_id=str(sender.pk)).count() == 1
        assert Execution.objects.filter(pk__in=ids, status="failed").count() == 30
        assert Execution.objects.filter(pk__in=[row.pk for row in late], status="failed").count() == 0


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


def test_two_senders_do_not_leave_their_leads_to_each_other(at_once):
    for _round in range(ROUNDS):
        one, two = SenderFactory(), SenderFactory()
        row = work(sender=one)
        results = at_once(
            lambda a=one, b=two: senders.delete_sender(a.pk, reassign_to=b.pk),
            lambda a=one, b=two: senders.delete_sender(b.pk, reassign_to=a.pk),
        )
        assert [type(result) for result in results if isinstance(result, Exception)] == [Conflict]
        assert Sender.objects.healthy().filter(enrollments=row.enrollment_id).count() == 1


def test_a_lead_completed_while_it_is_enrolled_is_not_forgotten(at_once):
    """Neither sees the other's row: the one who enrolls no address, the one who gives it no step that waits for it."""
    from threading import Event

    sequence = StepFactory(channel="sms", body="hi").sequence
    lead = LeadFactory(application=sequence.application)
    enrolled, told = Event(), Event()

    def enroll():
        with transaction.atomic():
            enrolling.enroll_leads(sequence.pk, [lead.pk], NOW)
            enrolled.set()
            while not (somebody_waits() or told.is_set()):
                pass

    def complete():
        enrolled.wait(10)
        change_lead(lead.pk, {"phone": "+821012345678"}, NOW)
        told.set()

    all_well(at_once(enroll, complete))
    assert Execution.objects.get().status == "pending"


def test_a_lead_completed_just_before_it_is_enrolled_is_seen(at_once):
    from threading import Event

    sequence = StepFactory(channel="sms", body="hi").sequence
    lead = LeadFactory(application=sequence.application)
    changed, made = Event(), Event()

    def complete():
        with transaction.atomic():
            change_lead(lead.pk, {"phone": "+821012345678"}, NOW)
            changed.set()
            while not (somebody_waits() or made.is_set()):
                pass

    def enroll():
        changed.wait(10)
        enrolling.enroll_leads(sequence.pk, [lead.pk], NOW)
        made.set()

    all_well(at_once(complete, enroll))
    assert Execution.objects.get().status == "pending"


def test_a_lead_completed_while_its_due_step_is_parked_is_not_forgotten(at_once):
    from threading import Event

    step = StepFactory(channel="sms", body="hi")
    row = work(step.sequence, sender=SenderFactory(channel="sms", address="+821012340000"), step=step)
    lead = row.enrollment.lead
    changed, sent = Event(), Event()

    def complete():
        with transaction.atomic():
            change_lead(lead.pk, {"phone": "+821012345678"}, NOW)
            changed.set()
            while not (somebody_waits() or sent.is_set()):
                pass

    def send():
        changed.wait(10)
        sending.send_due([row.enrollment.sender_id], NOW)
        sent.set()

    all_well(at_once(complete, send))
    assert Execution.objects.get().status == "pending"


@contextmanager
def held(row):
    """Somebody is at this row and does not come to an end."""
    other = connections.create_connection("default")
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {row._meta.db_table} WHERE id = %s FOR NO KEY UPDATE", [row.pk])
        yield other
    finally:
        other.rollback()  # a server that merely loses its client lets go some time later
        other.close()


@pytest.fixture
def impatient(transactional_db):
    """Whoever waits for a row is found out."""
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '500ms'")
        yield
        cursor.execute("RESET lock_timeout")


HOW = {
    "stale in a completed one": ("completed", {"due": NOW - 50 * DAY}, {"stale": 1, "cleared": 1}),
    "stranded and stale": ("active", {"due": NOW - 50 * DAY}, {"stale": 1, "completed": 1}),
    "stranded and deferred": ("active", {"due": NOW - DAY, "status": "deferred"}, {"requeued": 1}),
    "orphaned": ("paused", {"enrollment": "stopped"}, {"orphaned": 1}),
    "idle": ("paused", {"status": "sent"}, {"idle": 1}),
}


@pytest.mark.parametrize("where", ["execution", "enrollment", "sequence"])
@pytest.mark.parametrize(("status", "fields", "counts"), HOW.values(), ids=list(HOW))
def test_a_tick_waits_for_nobody_and_comes_again(sweep, impatient, where, status, fields, counts):
    sender = SenderFactory()
    mine, other = (work(SequenceFactory(status=status), sender=sender, **fields) for _n in range(2))
    row = {"execution": mine, "enrollment": mine.enrollment, "sequence": mine.enrollment.sequence}[where]
    with held(row):
        done = sweep("reconcile_sequences", NOW)
        after = Sequence.objects.get(pk=mine.enrollment.sequence_id)
    # Nobody writes the execution of an idle enrollment, so whoever holds it is in nobody's way.
    if (where, counts) == ("execution", {"idle": 1}):
        assert done == {"idle": 2}
    else:
        assert done == counts
        assert after.status == status
        assert sweep("reconcile_sequences", NOW) == counts
    assert sweep("reconcile_sequences", NOW) == {}
    assert_right()


@pytest.mark.parametrize("where", ["enrollment", "sequence"])
def test_results_are_followed_around_whoever_is_at_one_of_them(sweep, impatient, where):
    rows = [work(sender=SenderFactory(), due=NOW) for _n in range(2)]
    sweep("send_due_steps", NOW)
    Message.objects.update(status="successful", sent_at=NOW)
    with held(rows[0].enrollment if where == "enrollment" else rows[0].enrollment.sequence):
        assert sweep("follow_message_results", NOW)["sent"] == 1
    assert sweep("follow_message_results", NOW)["sent"] == 1
    assert {row.status for row in Sequence.objects.all()} == {"completed"}


def test_steps_go_out_around_whoever_is_at_a_sequence(sweep, impatient):
    rows = [work(sender=SenderFactory(), due=NOW) for _n in range(2)]
    with held(rows[0].enrollment.sequence):
        assert sweep("send_due_steps", NOW)["claimed"] == 1
    assert sweep("send_due_steps", NOW)["claimed"] == 1


def test_the_absent_come_back_around_whoever_is_at_a_sequence(sweep, impatient):
    rows = [work(enrollment="paused", due=NOW + DAY) for _n in range(2)]
    Enrollment.objects.update(resume_at=NOW, paused_at=NOW - DAY)
    with held(rows[0].enrollment.sequence):
        assert sweep("resume_paused_enrollments", NOW)["resumed"] == 1
    assert sweep("resume_paused_enrollments", NOW)["resumed"] == 1


@pytest.mark.parametrize("end", [sequences.archive_sequence, sequences.complete_sequence])
def test_who_ends_a_sequence_takes_along_what_another_was_at(at_once, end):
    """Left behind, a step of an archived sequence would wait for ever: nobody looks after it any more."""
    row = work(SequenceFactory(status="paused"), due=NOW + DAY)
    held_it, done = Event(), Event()

    def touch():
        with transaction.atomic():
            Execution.objects.filter(pk=row.pk).update(scheduled_at=NOW + 2 * DAY)
            held_it.set()
            done.wait(1)

    def finish():
        held_it.wait(10)
        end(row.enrollment.sequence_id, NOW)
        done.set()

    all_well(at_once(touch, finish))
    found = Execution.objects.get(pk=row.pk)
    assert (found.status, found.enrollment.status) == ("skipped", "stopped")
