"""The batch rules: each guard, each row of the stranded table, each boundary, yes and no."""

import pytest
from django.db import connection
from django.db.models import F
from uuid_utils.compat import uuid7

from campaigns.models import Enrollment, Execution, Sequence
from campaigns.services import reconciling
from campaigns.services.completion import evaluate_completion
from campaigns.services.leads import subscribe
from config.models import Decision
from messaging.models import Message
from messaging.services import Draft, enqueue_messages
from tests.campaigns.factories import (
    DAY,
    HOUR,
    MINUTE,
    NOW,
    EnrollmentFactory,
    ExecutionFactory,
    ReplyFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    pool,
    work,
)

pytestmark = pytest.mark.django_db
LIMIT = 9 * DAY  # harvest_days 3 × 3
SECOND = MINUTE / 60


def fresh(row):
    return type(row).objects.get(pk=row.pk)


def rules():
    return set(Decision.objects.values_list("rule", flat=True))


def message(row, status="pending", **fields):
    lead = row.enrollment.lead
    subscribe([lead], NOW)
    draft = Draft(lead.application_id, lead.email_subscription_id, title="t", body="b")
    (made,) = enqueue_messages([draft], now=NOW)
    Message.objects.filter(pk=made.message_id).update(status=status, **fields)
    Execution.objects.filter(pk=row.pk).update(message=made.message_id)
    return Message.objects.get(pk=made.message_id)


class TestForward:
    def test_sent_everything_and_no_reply_completes_at_once(self, sweep):
        row = work(status="sent", enrollment="completed")
        assert sweep("reconcile_sequences", NOW) == {"completed": 1}
        assert fresh(row.enrollment.sequence).status == "completed"
        assert fresh(row.enrollment.sequence).completed_at == NOW
        decision = Decision.objects.get(rule="forward.completed")
        assert (decision.before, decision.after) == ({"status": "active"}, {"status": "completed"})
        assert decision.won and decision.run_id

    @pytest.mark.parametrize("status", ["pending", "processing", "deferred"])
    @pytest.mark.parametrize("enrollment", ["active", "paused"])
    def test_pending_work_holds(self, status, enrollment):
        row = work(status=status, enrollment=enrollment, due=NOW)
        verdict = evaluate_completion(row.enrollment.sequence_id, NOW)
        assert (verdict.verdict, verdict.guard) == ("hold", "pending_work")

    def test_guard_1_reads_the_predicate_not_the_column(self, sweep):
        row = work(due=NOW + DAY)
        Sequence.objects.update(has_pending_work=False)
        assert evaluate_completion(row.enrollment.sequence_id, NOW).guard == "pending_work"

    def test_waiting_for_enrichment_does_not_hold(self):
        row = work(status="awaiting_enrichment")
        assert evaluate_completion(row.enrollment.sequence_id, NOW).verdict == "completed"

    def test_a_human_reply_holds_until_harvest_days_later(self):
        row = work(status="sent", enrollment="replied")
        ReplyFactory(enrollment=row.enrollment, received_at=NOW - 3 * DAY)
        last = ReplyFactory(enrollment=row.enrollment, received_at=NOW - DAY)
        held = evaluate_completion(row.enrollment.sequence_id, NOW + 2 * DAY - SECOND)
        assert (held.guard, held.until) == ("reply_harvest", last.received_at + 3 * DAY)
        assert evaluate_completion(row.enrollment.sequence_id, NOW + 2 * DAY).verdict == "completed"

    @pytest.mark.parametrize("kind", ["ooo", "bounce", "unsubscribe"])
    def test_other_replies_do_not_hold(self, kind):
        row = work(status="sent", enrollment="completed")
        ReplyFactory(enrollment=row.enrollment, kind=kind)
        assert evaluate_completion(row.enrollment.sequence_id, NOW).verdict == "completed"

    def test_just_activated_and_empty_holds_for_24_hours(self):
        sequence = SequenceFactory(activated_at=NOW)
        held = evaluate_completion(sequence.pk, NOW + 24 * HOUR - SECOND)
        assert (held.guard, held.until) == ("just_activated", NOW + 24 * HOUR)
        assert evaluate_completion(sequence.pk, NOW + 24 * HOUR).verdict == "completed"

    def test_just_activated_with_an_enrollment_does_not_hold(self):
        sequence = SequenceFactory(activated_at=NOW)
        EnrollmentFactory(sequence=sequence, status="stopped")
        assert evaluate_completion(sequence.pk, NOW).verdict == "completed"

    @pytest.mark.parametrize("status", ["draft", "generating", "ready", "paused", "archived"])
    def test_intent_states_and_paused_are_never_completed(self, sweep, status):
        sequence = SequenceFactory(status=status)
        sweep("reconcile_sequences", NOW)
        assert fresh(sequence).status == status

    def test_nobody_starves_when_ten_thousand_are_candidates(self, sweep):
        application = SequenceFactory().application
        Sequence.objects.bulk_create(
            Sequence(application=application, name=str(n), status="active", activated_at=NOW - 9 * DAY)
            for n in range(10_000)
        )
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")  # as autovacuum would have done
        assert sweep("reconcile_sequences", NOW)["completed"] == 10_001
        assert Decision.objects.filter(rule="forward.completed").count() == 10_001


class TestReverse:
    def test_fresh_work_reopens(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - LIMIT)
        counts = sweep("reconcile_sequences", NOW)
        assert counts["reopened"] == 1
        assert fresh(row.enrollment.sequence).status == "active"
        assert fresh(row).status == "pending"
        assert "reverse.reopened" in rules()

    def test_stale_work_is_skipped_and_it_stays_completed(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - LIMIT - SECOND)
        assert "reopened" not in sweep("reconcile_sequences", NOW)
        assert (fresh(row).status, fresh(row).skip_reason) == ("skipped", "stale")
        assert fresh(row.enrollment).status == "stopped"
        assert fresh(row.enrollment.sequence).status == "completed"
        assert not fresh(row.enrollment.sequence).has_pending_work
        assert "reverse.stale" in rules()

    def test_stale_work_goes_and_fresh_work_reopens(self, sweep):
        sequence = SequenceFactory(status="completed")
        old, new = work(sequence, due=NOW - 50 * DAY), work(sequence, due=NOW)
        sweep("reconcile_sequences", NOW)
        assert (fresh(old).status, fresh(new).status, fresh(sequence).status) == ("skipped", "pending", "active")

    def test_what_else_an_ended_enrollment_had_queued_ends_with_it(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - 50 * DAY)
        other = ExecutionFactory(enrollment=row.enrollment, step=StepFactory(sequence=row.enrollment.sequence))
        sweep("reconcile_sequences", NOW)
        assert (fresh(row).skip_reason, fresh(other).skip_reason) == ("stale", "orphaned")
        assert fresh(row.enrollment.sequence).status == "completed"
        assert sweep("reconcile_sequences", NOW) == {}

    def test_a_step_that_may_be_sent_late_is_never_stale(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - 50 * DAY)
        row.step.stale_policy = "send_late"
        row.step.save()
        sweep("reconcile_sequences", NOW)
        assert fresh(row.enrollment.sequence).status == "active"

    def test_in_a_paused_enrollment_nothing_is_due_before_it_resumes(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - 50 * DAY, enrollment="paused")
        Enrollment.objects.update(resume_at=NOW + DAY)
        sweep("reconcile_sequences", NOW)
        assert fresh(row).status == "pending"

    def test_reads_the_predicate_never_the_column(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW)
        Sequence.objects.update(has_pending_work=False)
        assert reconciling.reconcile_sequence(row.enrollment.sequence_id, NOW).verdict.verdict == "reopened"

    @pytest.mark.parametrize(("days", "multiplier"), [(1, 1), (90, 100)])
    def test_the_limit_is_harvest_days_times_the_multiplier(self, sweep, days, multiplier):
        sequence = SequenceFactory(status="completed", harvest_days=days, stale_after_multiplier=multiplier)
        young = work(sequence, due=NOW - days * multiplier * DAY)
        old = work(sequence, due=NOW - days * multiplier * DAY - SECOND)
        sweep("reconcile_sequences", NOW)
        assert (fresh(young).status, fresh(old).status) == ("pending", "skipped")


class TestStranded:
    @pytest.mark.parametrize("state", ["none", "deleted", "error", "suspended", "inactive"])
    def test_without_a_healthy_sender_it_is_reassigned_within_the_pool(self, sweep, state):
        sequence, healthy = SequenceFactory(), SenderFactory()
        broken = None if state == "none" else SenderFactory(status="active" if state == "deleted" else state)
        if state == "deleted":
            broken.deleted_at = NOW
            broken.save()
        pool(sequence, *filter(None, [broken, healthy]))
        row = work(sequence, sender=broken, due=NOW - 10 * MINUTE)
        assert sweep("reconcile_sequences", NOW)["reassigned"] == 1
        assert fresh(row.enrollment).sender_id == healthy.pk
        assert fresh(row).status == "pending"

    def test_with_nobody_healthy_in_the_pool_it_is_skipped_and_the_enrollment_ends(self, sweep):
        sequence, other = SequenceFactory(), SenderFactory()  # healthy, but not of this sequence
        row = work(sequence, sender=SenderFactory(status="error"), due=NOW - 10 * MINUTE)
        assert sweep("reconcile_sequences", NOW)["stranded_no_sender"] == 1
        assert (fresh(row).status, fresh(row).skip_reason) == ("skipped", "stranded_no_sender")
        assert fresh(row.enrollment).status == "stopped"
        assert fresh(sequence).status == "completed"
        assert "stranded.stranded_no_sender" in rules()
        assert other.enrollments.count() == 0

    def test_a_sender_of_another_channel_does_not_help(self, sweep):
        sequence = SequenceFactory()
        pool(sequence, SenderFactory(channel="sms", address="+821012345678"))
        row = work(sequence, due=NOW - HOUR)
        sweep("reconcile_sequences", NOW)
        assert fresh(row).skip_reason == "stranded_no_sender"

    @pytest.mark.parametrize("due", [NOW - 10 * MINUTE + SECOND, NOW + HOUR])
    def test_rows_younger_than_ten_minutes_wait_for_their_sender(self, sweep, due):
        row = work(sender=SenderFactory(status="error"), due=due)
        assert sweep("reconcile_sequences", NOW) == {}
        assert fresh(row).status == "pending"

    def test_healthy_and_stale_is_skipped(self, sweep):
        row = work(sender=SenderFactory(), due=NOW - LIMIT - SECOND)
        assert sweep("reconcile_sequences", NOW)["stale"] == 1
        assert fresh(row).skip_reason == "stale"
        assert fresh(row.enrollment).status == "stopped"

    def test_healthy_and_due_is_queued_again_and_keeps_its_due_time(self, sweep):
        row = work(sender=SenderFactory(), status="deferred", due=NOW - 8 * DAY)
        Execution.objects.update(deferred_until=NOW - 10 * MINUTE, scheduled_at=NOW - 50 * DAY)
        assert sweep("reconcile_sequences", NOW) == {"requeued": 1}
        assert (fresh(row).status, fresh(row).effective_due_at) == ("pending", NOW - 10 * MINUTE)
        assert sweep("reconcile_sequences", NOW) == {}

    def test_pending_and_healthy_costs_no_write_and_no_message(self, sweep):
        work(sender=SenderFactory(), due=NOW - DAY)
        assert sweep("reconcile_sequences", NOW) == {}
        assert not Decision.objects.exists()
        assert not Message.objects.exists()

    @pytest.mark.parametrize("where", ["paused sequence", "paused enrollment", "draft"])
    def test_only_active_ones_are_stranded(self, sweep, where):
        sequence = SequenceFactory(status={"paused sequence": "paused", "draft": "draft"}.get(where, "active"))
        row = work(sequence, due=NOW - 50 * DAY, enrollment="paused" if "enrollment" in where else "active")
        assert sweep("reconcile_sequences", NOW) == {}
        assert fresh(row).status == "pending"

    def test_awaiting_enrichment_is_never_touched(self, sweep):
        row = work(status="awaiting_enrichment", due=NOW - 300 * DAY)
        sweep("reconcile_sequences", NOW)
        assert fresh(row).status == "awaiting_enrichment"
        assert fresh(row.enrollment).status == "active"

    def test_at_most_500_per_sequence_and_tick_oldest_first(self, sweep):
        sequence = SequenceFactory()
        many(sequence, 501, due=lambda n: NOW - 20 * DAY - n * MINUTE)
        small = work(sender=None, due=NOW - 20 * DAY)
        counts = sweep("reconcile_sequences", NOW)
        assert counts["stranded_no_sender"] == 501
        left = Execution.objects.get(status="pending")
        assert left.scheduled_at == NOW - 20 * DAY
        assert fresh(small).status == "skipped"
        assert sweep("reconcile_sequences", NOW)["stranded_no_sender"] == 1


def many(sequence, count, *, due, sender=None, status="pending"):
    from campaigns.models import Lead

    step = sequence.steps.first() or StepFactory(sequence=sequence)
    leads = Lead.objects.bulk_create(
        Lead(application=sequence.application, name="Lee", email=f"{uuid7()}@example.com") for _n in range(count)
    )
    enrollments = Enrollment.objects.bulk_create(
        Enrollment(sequence=sequence, lead=lead, sender=sender, current_step=step) for lead in leads
    )
    return Execution.objects.bulk_create(
        Execution(enrollment=row, step=step, scheduled_at=due(n), status=status) for n, row in enumerate(enrollments)
    )


class TestStuck:
    def stuck(self, **fields):
        return work(status="processing", due=NOW - 30 * MINUTE, **fields)

    def test_without_a_message_it_goes_back_to_pending(self, sweep):
        row = self.stuck(sender=SenderFactory())
        assert sweep("reconcile_sequences", NOW)["stuck_pending"] == 1
        assert fresh(row).status == "pending"
        assert fresh(row).processing_started_at is None

    def test_younger_than_half_an_hour_is_left_alone(self, sweep):
        row = work(status="processing", due=NOW - 30 * MINUTE + SECOND)
        assert sweep("reconcile_sequences", NOW) == {}
        assert fresh(row).status == "processing"

    @pytest.mark.parametrize(
        ("status", "times"),
        [
            ("successful", {"sent_at": NOW - HOUR}),
            ("received", {"sent_at": NOW - HOUR, "received_at": NOW}),
            ("converted", {"sent_at": NOW - HOUR, "received_at": NOW, "converted_at": NOW}),
            ("failed", {"sent_at": NOW - HOUR, "failed_at": NOW, "error_reason": "receipt_timeout"}),
        ],
    )
    def test_a_message_that_was_sent_makes_it_sent(self, sweep, status, times):
        row = self.stuck()
        step_to(message(row), status, times)
        assert sweep("reconcile_sequences", NOW)["stuck_sent"] == 1
        assert (fresh(row).status, fresh(row).executed_at) == ("sent", NOW - HOUR)
        assert fresh(row.enrollment).status == "completed"

    def test_a_message_that_failed_makes_it_failed(self, sweep):
        row = self.stuck()
        message(row, "failed", failed_at=NOW, error_reason="expired")
        assert sweep("reconcile_sequences", NOW)["stuck_failed"] == 1
        assert (fresh(row).status, fresh(row).failure) == ("failed", "expired")
        assert fresh(row.enrollment).status == "failed"

    @pytest.mark.parametrize("status", ["pending", "errored"])
    def test_a_message_under_way_is_messagings_to_end(self, sweep, status):
        row = self.stuck()
        errored = {"error_details": {"errored_at": NOW.isoformat()}, "next_attempt_at": NOW, "failure_type": "network"}
        message(row, status, **(errored if status == "errored" else {}))
        assert sweep("reconcile_sequences", NOW) == {}
        assert fresh(row).status == "processing"

    def test_in_a_paused_sequence_it_is_recovered_and_the_pause_stays(self, sweep):
        row = self.stuck_in(SequenceFactory(status="paused"))
        sweep("reconcile_sequences", NOW)
        assert (fresh(row).status, fresh(row.enrollment.sequence).status) == ("pending", "paused")

    def stuck_in(self, sequence):
        return work(sequence, status="processing", due=NOW - HOUR)


def step_to(made, status, times):
    """Along the edges of messaging's graph."""
    Message.objects.filter(pk=made.pk).update(status="successful", sent_at=times["sent_at"])
    if status in ("received", "converted"):
        Message.objects.filter(pk=made.pk).update(status="received", received_at=NOW)
    if status == "converted":
        Message.objects.filter(pk=made.pk).update(status="converted", converted_at=NOW)
    if status == "failed":
        Message.objects.filter(pk=made.pk).update(
            status="failed", failed_at=times["failed_at"], error_reason=times["error_reason"]
        )


class TestOrphansDriftIdle:
    @pytest.mark.parametrize("end", ["completed", "replied", "bounced", "unsubscribed", "stopped", "failed"])
    @pytest.mark.parametrize("status", ["pending", "deferred"])
    def test_what_waits_in_an_ended_enrollment_is_skipped(self, sweep, end, status):
        row = work(status=status, enrollment=end, due=NOW + DAY)
        assert sweep("reconcile_sequences", NOW)["orphaned"] == 1
        assert (fresh(row).status, fresh(row).skip_reason) == ("skipped", "orphaned")
        assert fresh(row.enrollment).status == end

    def test_processing_in_an_ended_enrollment_is_not_an_orphan_and_holds_nothing(self, sweep):
        row = work(status="processing", enrollment="stopped")
        assert sweep("reconcile_sequences", NOW) == {"completed": 1}
        assert fresh(row).status == "processing"

    @pytest.mark.parametrize("real", [True, False])
    @pytest.mark.parametrize("status", ["active", "paused", "completed"])
    def test_drift_is_healed_in_both_directions(self, sweep, real, status):
        sequence = SequenceFactory(status=status)
        if real:
            work(sequence, due=NOW + DAY)
        Sequence.objects.update(has_pending_work=not real)
        assert sweep("reconcile_sequences", NOW)["drift"] == 1
        assert fresh(sequence).has_pending_work is real
        decision = Decision.objects.get(rule="drift.has_pending_work")
        assert (decision.before, decision.inputs) == ({"has_pending_work": not real}, {"pending_work": real})

    def test_a_live_enrollment_that_waits_for_nothing_ends(self, sweep):
        done = work(status="sent", enrollment="active")
        never = EnrollmentFactory(sequence=done.enrollment.sequence)
        failed = work(done.enrollment.sequence, status="failed", enrollment="active")
        sweep("reconcile_sequences", NOW)
        ends = [fresh(row).status for row in (done.enrollment, never, failed.enrollment)]
        assert ends == ["completed", "stopped", "failed"]

    def test_one_poisoned_sequence_does_not_stop_the_others(self, sweep, monkeypatch):
        poison, fine = work(status="sent", enrollment="stopped"), work(status="sent", enrollment="stopped")
        real = reconciling.complete_finished

        def fail(ids, now, ledger):
            if poison.enrollment.sequence_id in list(ids):
                raise ValueError("poison")
            return real(ids, now, ledger)

        monkeypatch.setattr(reconciling, "complete_finished", fail)
        from config import sweeping

        ran = sweeping.run("campaigns.reconcile_sequences", now=NOW)
        assert ran["counts"] == {"completed": 1, "error": 1}
        assert "poison" in ran["error"]
        assert fresh(fine.enrollment.sequence).status == "completed"

    @pytest.mark.parametrize("absurd", [2_000_000_000, -5])
    def test_a_sequence_with_absurd_limits_does_not_stop_the_others(self, sweep, absurd):
        """The columns know no bounds; only the API does."""
        limits = {"harvest_days": absurd, "stale_after_multiplier": absurd}
        ReplyFactory(enrollment=work(SequenceFactory(**limits), status="sent", enrollment="replied").enrollment)
        odd, fine = work(SequenceFactory(**limits), due=NOW), work(sender=SenderFactory(), due=NOW - LIMIT - SECOND)
        assert sweep("reconcile_sequences", NOW)["stale"] == 1
        assert (fresh(odd).status, fresh(fine).skip_reason) == ("pending", "stale")
        sweep("send_due_steps", NOW)

    def test_a_dry_run_tells_and_changes_nothing(self, sweep):
        row = work(SequenceFactory(status="completed"), due=NOW - 50 * DAY)
        assert sweep("reconcile_sequences", NOW, dry_run=True)["cleared"] == 1
        assert fresh(row).status == "pending"
        assert not Decision.objects.exists()


class TestReconcileOne:
    @pytest.mark.parametrize("status", ["draft", "generating", "ready", "archived"])
    def test_intent_states_are_held(self, status):
        said = reconciling.reconcile_sequence(SequenceFactory(status=status).pk, NOW).verdict
        assert (said.verdict, said.guard) == ("hold", "intent_only")

    def test_paused_is_held(self):
        assert reconciling.reconcile_sequence(SequenceFactory(status="paused").pk, NOW).verdict.guard == "paused"

    def test_completed_and_quiet_is_unchanged(self):
        said = reconciling.reconcile_sequence(SequenceFactory(status="completed").pk, NOW).verdict
        assert (said.verdict, said.guard) == ("unchanged", None)

    def test_holds_write_nothing(self):
        row = work(due=NOW + DAY)
        said = reconciling.reconcile_sequence(row.enrollment.sequence_id, NOW)
        assert (said.verdict.verdict, said.verdict.guard, said.changes) == ("hold", "pending_work", {})
        assert not Decision.objects.exists()


def test_bulk_decisions_carry_count_and_range(sweep):
    sequence = SequenceFactory(status="completed")
    rows = many(sequence, 5, due=lambda n: NOW - 50 * DAY)
    sweep("reconcile_sequences", NOW)
    decision = Decision.objects.get(rule="reverse.stale")
    keys = sorted(str(row.pk) for row in rows)
    assert (decision.object_type, decision.object_id, decision.affected) == ("sequences", str(sequence.pk), 5)
    assert (decision.inputs["first_id"], decision.inputs["last_id"]) == (keys[0], keys[-1])


def test_decisions_say_what_was_before_and_go_by_the_runs_time(sweep):
    sequence = SequenceFactory()
    pool(sequence, new := SenderFactory())
    old = SenderFactory(status="suspended")
    work(sequence, sender=old, due=NOW - HOUR)
    ended = [work(sequence, status=status, enrollment="stopped") for status in ("pending", "deferred")]
    work(SequenceFactory(status="completed"), status="deferred", enrollment="paused", due=NOW - 50 * DAY)
    assert ended
    sweep("reconcile_sequences", NOW)
    found = {row.rule: row for row in Decision.objects.all()}
    assert {row.created_at for row in found.values()} == {NOW}
    assert found["orphans.orphaned"].before == {"status": ["deferred", "pending"]}
    assert found["reverse.stale"].before == {"status": "deferred"}
    assert found["reverse.stopped"].before == {"status": "paused"}
    handed = found["stranded.reassigned"]
    assert (handed.before, handed.after) == ({"sender_id": str(old.pk)}, {"sender_id": str(new.pk)})


def test_counters_always_add_up():
    work(status="sent")
    row = Sequence.objects.annotate(
        parts=F("sent_count") + F("failed_count") + F("skipped_count") + F("waiting_count")
    ).get()
    assert row.parts == row.total_count == 1
    assert ExecutionFactory(enrollment=Enrollment.objects.get(), step=StepFactory(sequence=row), status="failed")
    assert Sequence.objects.get().counters["failed"] == 1
