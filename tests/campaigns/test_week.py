"""Three steps to many leads over two senders, a simulated week; and again with workers that die anywhere."""

import random
from datetime import UTC, datetime, time, timedelta

import pytest
from django.db import transaction

from campaigns.models import Enrollment, Execution, Lead, Sender, Sequence
from campaigns.services import replies, windows
from campaigns.services.enrolling import enroll_leads
from campaigns.services.leads import subscribe
from config import sweeping
from messaging.models import Message, Suppression
from tests.campaigns.factories import DAY, HOUR, ApplicationFactory, SenderFactory, SequenceFactory, StepFactory, pool
from tests.campaigns.test_signal import assert_right

pytestmark = pytest.mark.django_db
MONDAY = datetime(2026, 3, 2, 6, tzinfo=UTC)
ZONES = ["Asia/Seoul", "UTC", "Europe/Berlin", "America/New_York"]
LEADS, LIMIT = 120, 60
SWEEPS = ["resume_paused_enrollments", "send_due_steps", "follow_message_results", "reconcile_sequences"]


@pytest.fixture
def campaign(db):
    sequence = SequenceFactory(activated_at=MONDAY)
    for delay in (0, DAY, DAY):
        StepFactory(sequence=sequence, delay_seconds=delay.total_seconds() if delay else 0)
    fields = {"daily_limit": LIMIT, "window_from": time(9), "window_to": time(18), "window_days": [1, 2, 3, 4, 5, 6]}
    pool(sequence, SenderFactory(**fields), SenderFactory(**fields))
    leads = Lead.objects.bulk_create(
        Lead(application=ApplicationFactory(), name=f"L{n}", email=f"w{n}@example.com", time_zone=ZONES[n % 4])
        for n in range(LEADS)
    )
    subscribe(leads, MONDAY)
    enroll_leads(sequence.pk, [lead.pk for lead in leads], MONDAY)
    return sequence


class Crash(Exception):
    pass


def tick(now, dice=None):
    """All sweeps once. With `dice`, a worker may die at any commit boundary: its transaction is gone, nothing else."""
    for name in SWEEPS:
        try:
            with transaction.atomic():
                ran = sweeping.run(f"campaigns.{name}", now=now, wait=True)
                assert ran["error"] is None, ran
                if dice is not None and dice.random() < 0.25:
                    raise Crash
        except Crash:
            continue


def deliver(now, bounced):
    rows = Message.objects.filter(status="pending").exclude(scheduled_at__gt=now)
    bad = rows.filter(user_id__in=bounced)
    details = {"scope": "recipient"}
    bad.update(status="failed", failed_at=now, error_reason="hard_bounce", error_details=details)
    rows.filter(status="pending").update(status="successful", sent_at=now)


def answer(enrollments, kind, now, **fields):
    for pk in enrollments:
        incoming = replies.Incoming(enrollment_id=pk, kind=kind, external_id=f"{kind}{pk}", **fields)
        replies.record_reply(incoming, Enrollment.objects.all(), now)


@pytest.mark.parametrize("dying", [False, True], ids=["calm", "workers die"])
def test_a_week_runs_to_its_end(campaign, dying):
    dice = random.Random(7) if dying else None
    ids = list(Enrollment.objects.order_by("pk").values_list("pk", flat=True))
    lead_ids = [str(pk) for pk in Enrollment.objects.order_by("pk").values_list("lead_id", flat=True)]
    human, away, gone, bounced = ids[:10], ids[10:15], ids[15:20], lead_ids[20:25]
    now, end = MONDAY, MONDAY + 16 * DAY
    while now < end and Sequence.objects.get().status != "completed":
        tick(now, dice)
        deliver(now, bounced)
        if now == MONDAY + 2 * DAY:
            answer(human, "human", now, text="interesting")
            answer(away, "ooo", now, ooo_until=now + 3 * DAY, text="away")
            answer(gone, "unsubscribe", now, text="no")
        if now.hour == 0:
            assert_right()
        now += 2 * HOUR if dying else 3 * HOUR
    check_limits_and_windows()
    assert Sequence.objects.get().status == "completed"
    states = dict(Enrollment.objects.values_list("pk", "status"))
    assert {states[pk] for pk in human} == {"replied"}
    assert {states[pk] for pk in gone} == {"unsubscribed"}
    assert {states[pk] for pk in away} == {"completed"}
    assert set(Enrollment.objects.filter(lead__in=bounced).values_list("status", flat=True)) == {"bounced"}
    assert Suppression.objects.count() == len(gone)
    done = Enrollment.objects.filter(status="completed")
    assert done.count() == LEADS - len(human) - len(gone) - len(bounced)
    assert Execution.objects.filter(enrollment__in=done, status="sent").count() == 3 * done.count()
    assert not Execution.objects.filter(status__in=Execution.WAITING).exists()
    assert Message.objects.filter(campaign__isnull=False).values("idempotency_key").distinct().count() == (
        Message.objects.count()
    )
    assert_right()


def check_limits_and_windows():
    """Per sender and day not more than its limit; each message inside the window of its lead's zone."""
    used = {}
    for row in Execution.objects.exclude(message=None).select_related("sender", "enrollment__lead"):
        key = (row.sender_id, row.processing_started_at.date())
        used[key] = used.get(key, 0) + 1
        assert windows.is_open(row.sender, row.enrollment.lead.time_zone, row.processing_started_at)
    assert max(used.values()) <= LIMIT
    senders = Enrollment.objects.values_list("pk", "executions__sender")
    assert all(len({s for e, s in senders if e == pk and s}) <= 1 for pk in {e for e, _s in senders})
    assert Sender.objects.count() == 2
    assert timedelta(days=1) == DAY
