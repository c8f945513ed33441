"""Due steps become messages: allowances, windows, gaps, fairness, refusals, results."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest

from campaigns.models import Enrollment, Execution, Lead, Sender, Step
from campaigns.services import sending, windows
from campaigns.services.enrolling import enroll_leads, reenroll_failed
from campaigns.services.explaining import explain
from campaigns.services.leads import change_lead, create_lead
from config import sweeping
from config.models import Decision
from messaging.models import Message, Subscription, Suppression
from messaging.services import suppress
from tests.campaigns.factories import (
    DAY,
    HOUR,
    MINUTE,
    NOW,
    ApplicationFactory,
    ExecutionFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    pool,
    work,
)
from tests.campaigns.test_reconciling import LIMIT, SECOND, fresh, many

pytestmark = pytest.mark.django_db
SEOUL = ZoneInfo("Asia/Seoul")


@pytest.fixture
def lead_of(db):
    def make(**fields):
        number = Lead.objects.count()
        values = {"name": f"L{number}", "email": f"l{number}@example.com", **fields}
        return create_lead(ApplicationFactory(), values, NOW)

    return make


def running(*channels, senders=1, status="active", **sender_fields):
    sequence = SequenceFactory(status=status)
    for channel in channels or ("email",):
        StepFactory(sequence=sequence, channel=channel, delay_seconds=0 if not sequence.steps.exists() else 86400)
    pool(sequence, *(SenderFactory(**sender_fields) for _n in range(senders)))
    return sequence


def enrolled(sequence, *leads):
    enroll_leads(sequence.pk, [lead.pk for lead in leads], NOW)
    return [Enrollment.objects.get(sequence=sequence, lead=lead) for lead in leads]


class TestClaim:
    def test_a_due_step_becomes_one_message_with_its_key(self, sweep, lead_of):
        sequence = running()
        (enrollment,) = enrolled(sequence, lead_of(name="<Kim>"))
        assert sweep("send_due_steps", NOW)["claimed"] == 1
        row, message = Execution.objects.get(), Message.objects.get()
        assert (row.status, row.message_id, row.processing_started_at) == ("processing", message.pk, NOW)
        assert row.sender_id == enrollment.sender_id
        assert message.idempotency_key == f"step-execution:{row.pk}"
        assert (message.campaign, message.title, message.kind) == (f"sequence:{sequence.pk}", "Hello", "notice")
        assert message.body == "Dear &lt;Kim&gt;"
        assert sweep("send_due_steps", NOW + MINUTE) == {}
        assert Message.objects.count() == 1

    def test_the_same_execution_never_makes_a_second_message(self, sweep, lead_of):
        enrolled(running(), lead_of())
        sweep("send_due_steps", NOW)
        first = Message.objects.get()
        Execution.objects.update(status="pending", message=None, processing_started_at=None)
        sweep("send_due_steps", NOW + MINUTE)
        assert Message.objects.get() == first
        assert Execution.objects.get().message_id == first.pk

    @pytest.mark.parametrize("status", ["paused", "completed", "draft", "archived"])
    def test_only_active_sequences_send(self, sweep, status):
        work(SequenceFactory(status=status), sender=SenderFactory())
        assert sweep("send_due_steps", NOW) == {}

    def test_a_paused_enrollment_does_not_send(self, sweep, lead_of):
        enrolled(running(), lead_of())
        Enrollment.objects.update(status="paused")
        assert sweep("send_due_steps", NOW) == {}

    def test_not_yet_due_waits(self, sweep, lead_of):
        enrolled(running(), lead_of())
        Execution.objects.update(scheduled_at=NOW + SECOND)
        assert sweep("send_due_steps", NOW) == {}
        assert sweep("send_due_steps", NOW + SECOND)["claimed"] == 1

    def test_what_is_stale_is_never_sent(self, sweep, lead_of):
        enrolled(running(), lead_of())
        Execution.objects.update(scheduled_at=NOW - LIMIT - SECOND)
        assert sweep("send_due_steps", NOW) == {}
        Execution.objects.update(scheduled_at=NOW - LIMIT)
        assert sweep("send_due_steps", NOW)["claimed"] == 1

    def test_fair_between_sequences_and_oldest_first(self, sweep):
        sender = SenderFactory(daily_limit=4)
        big, small = SequenceFactory(), SequenceFactory()
        many(big, 10, due=lambda n: NOW - HOUR + n * MINUTE, sender=sender)
        many(small, 2, due=lambda n: NOW - n * MINUTE, sender=sender)
        sweep("send_due_steps", NOW)
        taken = Execution.objects.filter(status="processing").order_by("scheduled_at")
        assert [row.enrollment.sequence_id for row in taken] == [big.pk, big.pk, small.pk, small.pk]
        assert taken[0].scheduled_at == NOW - HOUR

    def test_many_batches_in_one_sweep(self, sweep):
        many(SequenceFactory(), 1100, due=lambda n: NOW, sender=SenderFactory())
        assert sweep("send_due_steps", NOW)["claimed"] == 1100
        assert Message.objects.count() == 1100
        assert Decision.objects.filter(rule="send.claimed").count() == 3


def slot_times():
    """When each message may go: its own time, or that of the tick that made it."""
    rows = Execution.objects.filter(status="processing").select_related("message")
    return [row.message.scheduled_at or row.processing_started_at for row in rows]


class TestAllowance:
    def test_the_daily_limit_counts_claimed_rows_and_defers_the_rest_to_the_next_day(self, sweep):
        sender = SenderFactory(daily_limit=3, time_zone="Asia/Seoul")
        many(SequenceFactory(), 5, due=lambda n: NOW - n * MINUTE, sender=sender)
        assert sweep("send_due_steps", NOW) == {"claimed": 3, "deferred": 2}
        midnight = datetime(2026, 3, 5, tzinfo=SEOUL)
        assert {row.deferred_until for row in Execution.objects.filter(status="deferred")} == {midnight}
        assert sweep("send_due_steps", NOW + HOUR) == {}
        assert sweep("send_due_steps", midnight)["claimed"] == 2

    def test_each_deferral_is_one_decision_per_sequence(self, sweep):
        sender, sequences = SenderFactory(daily_limit=2), [SequenceFactory(), SequenceFactory()]
        for sequence in sequences:
            many(sequence, 3, due=lambda n: NOW, sender=sender)
        sweep("send_due_steps", NOW)
        told = Decision.objects.filter(rule="send.allowance_used_up", object_type="sequences")
        assert {(row.object_id, row.affected) for row in told} == {(str(row.pk), 2) for row in sequences}
        for row in told:
            ids = Execution.objects.of([row.object_id]).filter(status="deferred").values_list("pk", flat=True)
            assert {row.inputs["first_id"], row.inputs["last_id"]} == {str(pk) for pk in ids}
            assert row.after == {"status": "deferred"}

    @pytest.mark.parametrize(
        ("limits", "rule"),
        [({"window_from": "20:00", "window_to": "21:00"}, "window_closed"), ({"min_gap_seconds": 600}, "behind_gap")],
    )
    def test_window_and_gap_leave_their_decisions(self, sweep, limits, rule):
        many(SequenceFactory(), 2, due=lambda n: NOW, sender=SenderFactory(**limits))
        deferred = sweep("send_due_steps", NOW)["deferred"]
        assert Decision.objects.get(rule=f"send.{rule}").affected == deferred

    def test_whoever_could_not_be_written_to_costs_no_allowance(self, sweep):
        sender, sequence = SenderFactory(daily_limit=1), SequenceFactory()
        barred, other = [work(sequence, sender=sender, due=NOW - age * MINUTE) for age in (2, 1)]
        # Written by hand: only messaging finds out, when the lead has its turn.
        lead = barred.enrollment.lead
        suppress(lead.application_id, [("email", lead.email, "unsubscribed", {})], now=NOW)
        assert sweep("send_due_steps", NOW)["claimed"] == 1
        assert Execution.objects.get(pk=barred.pk).skip_reason == "suppressed"
        assert Execution.objects.get(pk=other.pk).status == "processing"

    def test_the_hourly_limit_defers_to_the_next_hour(self, sweep):
        sender = SenderFactory(daily_limit=100, hourly_limit=2)
        many(SequenceFactory(), 3, due=lambda n: NOW, sender=sender)
        at = NOW + 20 * MINUTE
        assert sweep("send_due_steps", at) == {"claimed": 2, "deferred": 1}
        assert Execution.objects.get(status="deferred").deferred_until == NOW + HOUR
        assert sweep("send_due_steps", NOW + HOUR)["claimed"] == 1

    def test_throttling_never_makes_a_row_stale(self, sweep):
        sender = SenderFactory(daily_limit=1)
        many(SequenceFactory(), 30, due=lambda n: NOW, sender=sender)
        for day in range(29):
            sweep("send_due_steps", NOW + day * DAY)
            sweep("reconcile_sequences", NOW + day * DAY + HOUR)
        assert not Execution.objects.filter(status="skipped").exists()
        assert Execution.objects.filter(status="processing").count() == 29

    def test_explain_reckons_with_every_renewal_until_a_deferred_row_has_its_turn(self, sweep):
        rows = many(SequenceFactory(), 25, due=lambda n: NOW - (25 - n) * MINUTE, sender=SenderFactory(daily_limit=10))
        sweep("send_due_steps", NOW)
        told = [explain(fresh(rows[n]).enrollment, NOW + HOUR) for n in (10, 19, 20, 24)]
        assert [said.gates[6].value for said in told] == [1, 10, 11, 15]
        midnight = NOW.replace(hour=0) + DAY
        assert [said.eta for said in told] == [midnight, midnight, midnight + DAY, midnight + DAY]
        Sender.objects.update(daily_limit=0)
        assert explain(fresh(rows[24]).enrollment, NOW + HOUR).eta is None

    def test_nobody_queues_before_the_step_is_due(self):
        rows = many(SequenceFactory(), 3, due=lambda n: NOW + DAY, sender=SenderFactory(daily_limit=1))
        assert [explain(row.enrollment, NOW).decides for row in rows] == ["eta"] * 3
        assert [explain(row.enrollment, NOW + DAY).decides for row in rows] == [None, *["queue_position"] * 2]

    def test_without_limits_everything_goes(self, sweep):
        many(SequenceFactory(), 30, due=lambda n: NOW, sender=SenderFactory())
        assert sweep("send_due_steps", NOW) == {"claimed": 30}

    def test_ramp_up_starts_low_and_rises_by_the_day(self):
        sender = Sender(daily_limit=100, ramp_start=10, ramp_step=5, time_zone="UTC", created_at=NOW)
        assert [windows.daily_limit(sender, NOW + n * DAY) for n in (0, 1, 30)] == [10, 15, 100]
        sender.daily_limit = None
        assert windows.daily_limit(sender, NOW + 2 * DAY) == 20
        sender.ramp_start = None
        assert windows.daily_limit(sender, NOW) is None

    def test_the_gap_spaces_messages_and_the_rest_gets_its_slot(self, sweep):
        sender = SenderFactory(min_gap_seconds=30)
        many(SequenceFactory(), 4, due=lambda n: NOW, sender=sender)
        assert sweep("send_due_steps", NOW) == {"claimed": 2, "deferred": 2}
        assert sorted(slot_times()) == [NOW, NOW + timedelta(seconds=30)]
        assert sweep("send_due_steps", NOW + timedelta(seconds=3)) == {}
        # The tick may come a little early; the message keeps its slot.
        assert sweep("send_due_steps", NOW + timedelta(seconds=59)) == {}
        assert sweep("send_due_steps", NOW + timedelta(seconds=59.1)) == {"claimed": 2}
        assert {b - a for a, b in zip(sorted(slot_times()), sorted(slot_times())[1:], strict=False)} == {
            timedelta(seconds=30)
        }

    def test_a_gap_longer_than_a_tick_is_kept_over_ticks(self, sweep):
        sender = SenderFactory(min_gap_seconds=150)
        many(SequenceFactory(), 2, due=lambda n: NOW, sender=sender)
        claimed = [sweep("send_due_steps", NOW + n * MINUTE).get("claimed", 0) for n in range(5)]
        assert claimed == [1, 0, 0, 1, 0]
        times = sorted(slot_times())
        assert times[1] - times[0] == 3 * MINUTE

    @pytest.mark.parametrize("ago", [timedelta(hours=1), timedelta(minutes=59)])
    def test_the_gap_is_counted_from_the_last_claimed_row(self, sweep, ago):
        """Also over midnight, and in rows that were written by hand."""
        sender = SenderFactory(min_gap_seconds=3600)
        midnight = NOW.replace(hour=0, minute=30)
        work(sender=sender, status="sent", due=midnight - ago)
        work(sender=sender, due=midnight)
        assert sweep("send_due_steps", midnight).get("claimed", 0) == (ago == timedelta(hours=1))

    def test_rows_sent_by_hand_use_up_the_allowance(self, sweep):
        sender = SenderFactory(daily_limit=1)
        work(sender=sender, status="sent", due=NOW - HOUR)
        work(sender=sender, due=NOW)
        assert sweep("send_due_steps", NOW) == {"deferred": 1}

    def test_jitter_stays_within_its_bounds(self):
        sender = Sender(pk="0" * 32, min_gap_seconds=60, gap_jitter_seconds=30)
        found = [at for at, _n in zip(windows.slots(sender, NOW, NOW), range(50), strict=False)]
        gaps = [(b - a).total_seconds() for a, b in zip(found, found[1:], strict=False)]
        assert all(60 <= gap <= 90 for gap in gaps)
        assert len(set(gaps)) > 10


class TestWindow:
    def sender(self, **fields):
        values = {"window_from": time(9), "window_to": time(18), "window_days": [1, 2, 3, 4, 5], "time_zone": "UTC"}
        return Sender(**{**values, "window_zone": "lead", **fields})

    @pytest.mark.parametrize(
        ("zone", "at", "opens"),
        [
            ("UTC", datetime(2026, 3, 4, 9, tzinfo=UTC), datetime(2026, 3, 4, 9, tzinfo=UTC)),
            ("UTC", datetime(2026, 3, 4, 8, 59, tzinfo=UTC), datetime(2026, 3, 4, 9, tzinfo=UTC)),
            ("UTC", datetime(2026, 3, 4, 18, tzinfo=UTC), datetime(2026, 3, 5, 9, tzinfo=UTC)),
            ("UTC", datetime(2026, 3, 6, 18, tzinfo=UTC), datetime(2026, 3, 9, 9, tzinfo=UTC)),
            ("Asia/Seoul", datetime(2026, 3, 4, 10, tzinfo=UTC), datetime(2026, 3, 5, 0, tzinfo=UTC)),
            ("America/New_York", datetime(2026, 3, 6, 23, tzinfo=UTC), datetime(2026, 3, 9, 13, tzinfo=UTC)),
            ("Nowhere/City", datetime(2026, 3, 4, 12, tzinfo=UTC), datetime(2026, 3, 4, 12, tzinfo=UTC)),
        ],
    )
    def test_opens_in_the_leads_zone(self, zone, at, opens):
        assert windows.opening(self.sender(), zone, at) == opens

    def test_opens_in_the_senders_own_zone(self):
        sender = self.sender(window_zone="sender", time_zone="Asia/Seoul")
        assert windows.opening(sender, "UTC", NOW) == datetime(2026, 3, 5, 0, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("at", "opens"),
        [
            (datetime(2026, 3, 4, 21, 59, tzinfo=UTC), datetime(2026, 3, 4, 22, tzinfo=UTC)),
            (datetime(2026, 3, 5, 5, 59, tzinfo=UTC), datetime(2026, 3, 5, 5, 59, tzinfo=UTC)),
            (datetime(2026, 3, 5, 6, tzinfo=UTC), datetime(2026, 3, 5, 22, tzinfo=UTC)),
            # Friday's night ends on Saturday; Saturday's own does not begin.
            (datetime(2026, 3, 7, 5, tzinfo=UTC), datetime(2026, 3, 7, 5, tzinfo=UTC)),
            (datetime(2026, 3, 7, 22, tzinfo=UTC), datetime(2026, 3, 9, 22, tzinfo=UTC)),
        ],
    )
    def test_a_window_that_ends_before_it_begins_stays_open_over_midnight(self, at, opens):
        sender = self.sender(window_from=time(22), window_to=time(6))
        assert windows.opening(sender, "UTC", at) == opens

    @pytest.mark.parametrize(
        ("at", "opens"),
        [
            # The clocks go forward at 02:00: 02:15 is not on them, its moment is.
            (datetime(2027, 3, 14, 5, 30, tzinfo=UTC), datetime(2027, 3, 14, 7, 15, tzinfo=UTC)),
            (datetime(2027, 3, 15, 5, 30, tzinfo=UTC), datetime(2027, 3, 15, 6, 15, tzinfo=UTC)),
        ],
    )
    def test_opens_on_the_day_the_clocks_change(self, at, opens):
        sender = self.sender(window_from=time(2, 15), window_to=time(2, 45), window_days=[1, 2, 3, 4, 5, 6, 7])
        assert windows.opening(sender, "America/New_York", at) == opens

    def test_no_window_is_always_open(self):
        sender = self.sender(window_from=None, window_to=None, window_days=[1, 2, 3, 4, 5, 6, 7])
        assert windows.is_open(sender, "UTC", datetime(2026, 3, 8, 3, tzinfo=UTC))

    def test_days_alone_close_the_weekend(self):
        sender = self.sender(window_from=None, window_to=None)
        opens = windows.opening(sender, "UTC", datetime(2026, 3, 7, 3, tzinfo=UTC))
        assert opens == datetime(2026, 3, 9, 0, tzinfo=UTC)

    def test_outside_the_window_due_rows_are_deferred_to_the_opening(self, sweep, lead_of):
        sequence = running(window_from=time(9), window_to=time(18))
        here, there = lead_of(time_zone="UTC"), lead_of(time_zone="Asia/Seoul")
        enrolled(sequence, here, there)
        Execution.objects.update(scheduled_at=NOW)
        assert sweep("send_due_steps", NOW) == {"claimed": 1, "deferred": 1}
        row = Execution.objects.get(enrollment__lead=there)
        assert (row.status, row.deferred_until) == ("deferred", datetime(2026, 3, 5, 9, tzinfo=SEOUL))

    def test_enrolling_schedules_into_the_window(self, lead_of):
        sequence = running(window_from=time(9), window_to=time(18))
        enrolled(sequence, lead_of(time_zone="Asia/Seoul"))
        assert Execution.objects.get().scheduled_at == datetime(2026, 3, 5, 9, tzinfo=SEOUL)


class TestRefusals:
    @pytest.mark.parametrize("how", ["suppression", "unsubscribed", "disabled"])
    def test_a_suppressed_lead_is_skipped_and_its_enrollment_ends(self, sweep, lead_of, how):
        lead = lead_of()
        enrolled(running(), lead)
        if how == "suppression":
            suppress(lead.application, [("email", lead.email, "hard_bounce", {})], now=NOW)
        else:
            Subscription.objects.update(status=-2 if how == "unsubscribed" else -31)
        assert sweep("send_due_steps", NOW) == {"suppressed": 1}
        row = Execution.objects.get()
        assert (row.status, row.skip_reason) == ("skipped", "suppressed")
        assert fresh(row.enrollment).status == "stopped"
        assert fresh(row.enrollment.sequence).status == "completed"
        assert not Message.objects.exists()

    def test_an_address_suppressed_before_the_lead_had_a_subscription(self, sweep):
        row = work(sender=SenderFactory())
        suppress(row.enrollment.lead.application, [("email", row.enrollment.lead.email, "complaint", {})], now=NOW)
        sweep("send_due_steps", NOW)
        assert fresh(row).skip_reason == "suppressed"
        assert fresh(row).processing_started_at is None

    def test_a_step_that_cannot_be_sent_fails_and_ends_the_enrollment(self, sweep, lead_of):
        sequence = running()
        enrolled(sequence, lead_of())
        sequence.steps.update(subject="")
        sweep("send_due_steps", NOW)
        row = Execution.objects.get()
        assert row.status == "failed"
        assert row.failure.startswith("required")
        assert fresh(row.enrollment).status == "failed"

    def test_a_used_up_quota_postpones(self, sweep, lead_of):
        lead = lead_of()
        enrolled(running(), lead)
        lead.application.daily_quota = 0
        lead.application.save()
        sweep("send_due_steps", NOW)
        row = Execution.objects.get()
        assert row.status == "pending"
        assert row.deferred_until > NOW
        assert row.processing_started_at is None

    def test_an_unconfigured_channel_postpones_and_tells_the_sender(self, sweep, lead_of, settings):
        enrolled(running(), lead_of())
        settings.PROVIDERS = {}
        sweep("send_due_steps", NOW)
        assert Execution.objects.get().deferred_until == NOW + HOUR
        assert "Email" in Sender.objects.get().last_error

    def test_a_step_of_a_channel_we_do_not_have_is_parked_and_the_others_go(self, sweep):
        sender = SenderFactory()
        odd = work(sender=sender, due=NOW)
        Step.objects.filter(pk=odd.step_id).update(channel="push")
        work(sender=sender, due=NOW)
        assert sweep("send_due_steps", NOW) == {"claimed": 1, "parked": 1}
        assert fresh(odd).status == "awaiting_enrichment"

    def test_one_poisoned_step_does_not_stop_its_senders_others(self, sweep, monkeypatch):
        sender = SenderFactory(daily_limit=5)
        rows = many(SequenceFactory(), 4, due=lambda n: NOW - n * MINUTE, sender=sender)
        poison, real = rows[1].pk, sending.start

        def fail(planned):
            if poison in [row.pk for row, _at in planned]:
                raise ValueError("poison")
            real(planned)

        monkeypatch.setattr(sending, "start", fail)
        ran = sweeping.run("campaigns.send_due_steps", now=NOW)
        assert f"{poison}: ValueError" in ran["error"]
        assert ran["counts"]["claimed"] == 3
        assert fresh(rows[1]).status == "pending"

    def test_a_variable_that_went_missing_parks_the_step(self, sweep, lead_of):
        lead = lead_of()
        enrolled(running(), lead)
        Lead.objects.update(name="")
        sweep("send_due_steps", NOW)
        assert Execution.objects.get().status == "awaiting_enrichment"


class TestResults:
    def test_a_sent_message_schedules_the_next_step(self, sweep, deliver, lead_of):
        sequence = running("email", "email")
        (enrollment,) = enrolled(sequence, lead_of())
        sweep("send_due_steps", NOW)
        assert sweep("follow_message_results", NOW) == {}
        deliver(NOW + MINUTE)
        assert sweep("follow_message_results", NOW + HOUR) == {"sent": 1}
        first, second = Execution.objects.order_by("step__position")
        assert (first.status, first.executed_at) == ("sent", NOW + MINUTE)
        assert (second.status, second.scheduled_at) == ("pending", NOW + MINUTE + DAY)
        assert fresh(enrollment).current_step_id == second.step_id
        assert fresh(enrollment).sender_id == enrollment.sender_id

    def test_the_last_step_completes_enrollment_and_sequence_in_the_same_transaction(self, sweep, deliver, lead_of):
        sequence = running()
        (enrollment,) = enrolled(sequence, lead_of())
        sweep("send_due_steps", NOW)
        deliver(NOW)
        sweep("follow_message_results", NOW)
        assert (fresh(enrollment).status, fresh(sequence).status) == ("completed", "completed")
        assert fresh(sequence).counters == {
            "total": 1, "sent": 1, "failed": 0, "skipped": 0, "waiting": 0, "enrollments": 1,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("reason", "scope", "end"),
        [
            ("hard_bounce", "recipient", "bounced"),
            ("unsubscribed", "recipient", "unsubscribed"),
            ("hard_bounce", "message", "failed"),
            ("expired", "recipient", "failed"),
            ("cancelled", None, "failed"),
        ],
    )
    def test_a_failed_message_ends_the_enrollment(self, sweep, deliver, lead_of, reason, scope, end):
        (enrollment,) = enrolled(running("email", "email"), lead_of())
        sweep("send_due_steps", NOW)
        deliver(NOW, reason, scope)
        assert sweep("follow_message_results", NOW) == {"failed": 1}
        row = Execution.objects.get()
        assert (row.status, row.failure, row.executed_at) == ("failed", reason, NOW)
        assert fresh(enrollment).status == end

    def test_sent_is_never_undone(self, sweep, deliver, lead_of):
        enrolled(running(), lead_of())
        sweep("send_due_steps", NOW)
        deliver(NOW)
        sweep("follow_message_results", NOW)
        Message.objects.update(status="failed", failed_at=NOW, error_reason="receipt_timeout")
        assert sweep("follow_message_results", NOW) == {}
        assert Execution.objects.get().status == "sent"

    def test_the_result_of_a_step_in_an_ended_enrollment_is_recorded_and_nothing_follows(self, sweep, deliver, lead_of):
        (enrollment,) = enrolled(running("email", "email"), lead_of())
        sweep("send_due_steps", NOW)
        Enrollment.objects.update(status="stopped")
        deliver(NOW)
        sweep("follow_message_results", NOW)
        assert Execution.objects.get().status == "sent"
        assert fresh(enrollment).status == "stopped"

    def test_the_sender_of_a_row_written_by_hand_goes_on(self, sweep, deliver):
        sequence = running("email", "email", senders=2)
        for sender in sequence.senders.all():
            row = work(sequence, sender=sender)
            work(sender=sender, due=NOW + DAY)  # the other one is always less busy
            sweep("send_due_steps", NOW)
            deliver(NOW)
            sweep("follow_message_results", NOW)
            assert row.enrollment.executions.count() == 2
            assert fresh(row.enrollment).sender_id == sender.pk

    def test_each_channel_has_its_sticky_sender(self, sweep, deliver, lead_of):
        sequence = running("email", "sms", "email", senders=2)
        pool(sequence, SenderFactory(channel="sms", address="+821000000000"))
        (enrollment,) = enrolled(sequence, lead_of(phone="+821011112222"))
        seen = []
        for n in range(3):
            at = NOW + n * 2 * DAY
            sweep("send_due_steps", at)
            deliver(at)
            seen.append(Execution.objects.filter(status="processing").get().sender)
            sweep("follow_message_results", at)
        assert seen[0] == seen[2] != seen[1]
        assert seen[1].channel == "sms"
        assert fresh(enrollment).status == "completed"


class TestEnrolling:
    def test_spreads_leads_over_the_least_loaded_senders(self, lead_of):
        sequence = running(senders=2)
        enrolled(sequence, *(lead_of() for _n in range(6)))
        loads = [sender.enrollments.count() for sender in Sender.objects.all()]
        assert loads == [3, 3]

    def test_each_lead_once_and_told_in_order(self, lead_of):
        sequence, there, new = running(), lead_of(), lead_of()
        barred = lead_of()
        suppress(barred.application, [("email", barred.email, "complaint", {})], now=NOW)
        enrolled(sequence, there)
        other = create_lead(ApplicationFactory(slug="other"), {"email": "x@example.com"}, NOW)
        ids = [new.pk, there.pk, new.pk, other.pk, barred.pk]
        results = enroll_leads(sequence.pk, ids, NOW)
        wanted = ["enrolled", "already_enrolled", "already_enrolled", "not_found", "suppressed"]
        assert [result.status for result in results] == wanted
        assert results[0].enrollment_id == results[2].enrollment_id
        assert [result.lead_id for result in results] == ids

    def test_a_thousand_leads_cost_at_most_twenty_queries(self, django_assert_max_num_queries):
        sequence = running(senders=2)
        leads = Lead.objects.bulk_create(
            Lead(application=sequence.application, email=f"{n}@example.com", name="x") for n in range(1000)
        )
        from campaigns.services.leads import subscribe

        subscribe(leads, NOW)
        with django_assert_max_num_queries(20):
            results = enroll_leads(sequence.pk, [lead.pk for lead in leads], NOW)
        assert {result.status for result in results} == {"enrolled"}
        assert fresh(sequence).counters["waiting"] == 1000

    def test_enrolling_reopens_a_completed_sequence(self, lead_of):
        sequence = running(status="completed")
        enrolled(sequence, lead_of())
        assert fresh(sequence).status == "active"
        assert Decision.objects.filter(rule="reverse.reopened").exists()

    def test_a_lead_without_address_waits_for_enrichment_and_goes_on_when_it_comes(self, sweep, lead_of):
        sequence = running()
        lead = lead_of(email=None, phone="+821011112222")
        enrolled(sequence, lead)
        assert Execution.objects.get().status == "awaiting_enrichment"
        sweep("reconcile_sequences", NOW + 40 * DAY)
        assert fresh(sequence).status == "completed"
        change_lead(lead.pk, {"email": "late@example.com"}, NOW + 50 * DAY)
        row = Execution.objects.get()
        assert (row.status, row.scheduled_at) == ("pending", NOW + 50 * DAY)
        assert fresh(sequence).status == "active"
        assert sweep("send_due_steps", NOW + 50 * DAY)["claimed"] == 1

    def test_enrichment_after_the_enrollment_ended_is_an_orphan(self, lead_of):
        lead = lead_of(email=None, phone="+821011112222")
        enrolled(running(), lead)
        Enrollment.objects.update(status="stopped")
        change_lead(lead.pk, {"email": "late@example.com"}, NOW)
        assert Execution.objects.get().skip_reason == "orphaned"

    def test_a_missing_variable_is_enrichment_too(self, lead_of):
        sequence = running()
        sequence.steps.update(body="{{attributes.plan}} for {{name}}")
        lead = lead_of()
        enrolled(sequence, lead)
        assert Execution.objects.get().status == "awaiting_enrichment"
        change_lead(lead.pk, {"attributes": {"plan": "gold"}}, NOW)
        assert Execution.objects.get().status == "pending"


class TestReenroll:
    def failed(self, sequence, lead, reason="expired", sent_first=False):
        (enrollment,) = enrolled(sequence, lead)
        row = Execution.objects.get(enrollment=enrollment)
        Execution.objects.filter(pk=row.pk).update(status="processing", processing_started_at=NOW)
        Execution.objects.filter(pk=row.pk).update(status="sent" if sent_first else "failed", executed_at=NOW)
        Enrollment.objects.filter(pk=enrollment.pk).update(status="failed")
        return enrollment

    def test_takes_who_can_be_reached_and_says_why_not_the_others(self, sweep, lead_of):
        sequence = running()
        good, gone, wrong = lead_of(), lead_of(), lead_of()
        rows = [self.failed(sequence, lead) for lead in (good, gone, wrong)]
        suppress(gone.application, [("email", gone.email, "unsubscribed", {})], now=NOW)
        Lead.objects.filter(pk=wrong.pk).update(email="nonsense")
        sweep("reconcile_sequences", NOW)
        assert fresh(sequence).status == "completed"
        found = reenroll_failed(sequence.pk, NOW)
        assert found["taken"] == [{"enrollment_id": rows[0].pk, "lead_id": good.pk}]
        assert {(r["enrollment_id"], r["reason"]) for r in found["refused"]} == {
            (rows[1].pk, "suppressed"),
            (rows[2].pk, "invalid_address"),
        }
        assert fresh(sequence).status == "active"
        assert (fresh(rows[0]).status, fresh(rows[0]).round) == ("active", 2)
        assert Execution.objects.filter(enrollment=rows[0]).count() == 2
        assert sweep("send_due_steps", NOW)["claimed"] == 1
        assert reenroll_failed(sequence.pk, NOW)["taken"] == []

    def test_the_new_round_starts_with_the_first_unsent_step(self, lead_of):
        sequence = running("email", "email")
        row = self.failed(sequence, lead_of(), sent_first=True)
        reenroll_failed(sequence.pk, NOW)
        new = Execution.objects.get(enrollment=row, round=2)
        assert new.step.position == 2

    def test_a_step_that_was_tried_does_not_wait_again(self, sweep, lead_of):
        sequence = running()
        sequence.steps.update(delay_seconds=3 * 86400)
        self.failed(sequence, lead_of())
        reenroll_failed(sequence.pk, NOW + 4 * DAY)
        assert Execution.objects.get(round=2).scheduled_at == NOW + 4 * DAY

    def test_a_hard_bounce_is_for_good(self, sweep, deliver, lead_of):
        sequence = running()
        enrolled(sequence, lead_of())
        sweep("send_due_steps", NOW)
        deliver(NOW, "hard_bounce", "message")
        sweep("follow_message_results", NOW)
        assert reenroll_failed(sequence.pk, NOW)["refused"][0]["reason"] == "bounced"

    def test_only_failed_ones(self, lead_of):
        sequence = running()
        enrolled(sequence, lead_of())
        Enrollment.objects.update(status="bounced")
        assert reenroll_failed(sequence.pk, NOW) == {"taken": [], "refused": []}


def test_leads_written_by_hand_are_subscribed_when_first_written_to(sweep):
    row = work(sender=SenderFactory())
    sweep("send_due_steps", NOW)
    assert fresh(row).status == "processing"
    assert fresh(row.enrollment.lead).email_subscription_id == Message.objects.get().subscription_id
    assert Suppression.objects.count() == 0
    assert ExecutionFactory._meta.model is Execution
