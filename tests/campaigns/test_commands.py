"""Commands and healers: what they say and change, and that a dry run changes nothing."""

import json
from datetime import UTC
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from campaigns.models import Enrollment, Execution, Sender, Sequence
from campaigns.services.forecasting import forecast
from config import integrity
from tests.campaigns.factories import DAY, HOUR, MINUTE, NOW, ReplyFactory, SenderFactory, SequenceFactory, work
from tests.campaigns.test_reconciling import fresh, many

pytestmark = pytest.mark.django_db


def run(name, *args):
    out, err = StringIO(), StringIO()
    call_command(name, *args, stdout=out, stderr=err)
    return out.getvalue().strip()


def test_backfill_says_what_it_changed_and_a_dry_run_changes_nothing():
    work()
    SequenceFactory()
    Sequence.objects.update(has_pending_work=False)
    assert run("backfill_has_pending_work", "--dry-run") == "would change: backfilled 1"
    assert not Sequence.objects.filter(has_pending_work=True).exists()
    assert run("backfill_has_pending_work") == "changed: backfilled 1"
    assert Sequence.objects.filter(has_pending_work=True).count() == 1
    assert run("backfill_has_pending_work") == "changed: nothing"


def test_skip_stale_for_all_or_one():
    one, two = (work(sender=SenderFactory(), due=timezone.now() - 20 * DAY) for _n in range(2))
    assert run("skip_stale", "--dry-run") == "would change: stale 2"
    assert run("skip_stale", "--sequence", str(one.enrollment.sequence_id)) == "changed: stale 1"
    assert (fresh(one).status, fresh(two).status) == ("skipped", "pending")
    assert run("skip_stale") == "changed: stale 1"


def test_cleanup_orphans():
    row = work(enrollment="stopped")
    assert run("cleanup_orphans", "--dry-run") == "would change: orphaned 1"
    assert fresh(row).status == "pending"
    assert run("cleanup_orphans") == "changed: orphaned 1"
    assert fresh(row).skip_reason == "orphaned"


def test_reconcile_one_or_all():
    row = work(status="sent", enrollment="completed")
    pk = str(row.enrollment.sequence_id)
    said = json.loads(run("reconcile_sequences", "--sequence", pk, "--dry-run"))
    assert (said["verdict"], said["dry_run"]) == ("completed", True)
    assert fresh(row.enrollment.sequence).status == "active"
    assert json.loads(run("reconcile_sequences", "--dry-run"))["counts"] == {"completed": 1}
    assert json.loads(run("reconcile_sequences"))["counts"] == {"completed": 1}
    assert fresh(row.enrollment.sequence).status == "completed"


@pytest.mark.parametrize("pk", ["nonsense", "019a0000-0000-7000-8000-000000000000"])
def test_an_unknown_sequence_is_an_error(pk):
    for name in ("reconcile_sequences", "skip_stale", "backfill_has_pending_work"):
        with pytest.raises(CommandError):
            run(name, "--sequence", pk)


class TestIntegrity:
    def count(self, letter, now=NOW):
        return integrity.measure(integrity.find(letter), now).count

    def test_a_stuck_completion_counts_after_ten_minutes_of_its_clock(self):
        row = work(status="sent", enrollment="completed")
        Sequence.objects.update(pending_work_changed_at=NOW - 10 * MINUTE)
        assert self.count("A") == 0
        assert self.count("A", NOW + MINUTE) == 1
        ReplyFactory(enrollment=row.enrollment, received_at=NOW - 3 * DAY - 5 * MINUTE)
        assert self.count("A", NOW + MINUTE) == 0  # the harvest ended six minutes ago
        assert self.count("A", NOW + 6 * MINUTE) == 1
        integrity.heal("A", NOW + HOUR)
        assert self.count("A", NOW + HOUR) == 0
        assert fresh(row.enrollment.sequence).status == "completed"

    def test_drift(self):
        work()
        Sequence.objects.update(has_pending_work=False)
        assert self.count("B") == 1
        integrity.heal("campaigns.signal_drift", NOW)
        assert self.count("B") == 0

    def test_orphans(self):
        work(enrollment="stopped")
        assert self.count("C") == 1
        integrity.heal("C", NOW)
        assert self.count("C") == 0

    def test_completed_with_work(self):
        row = work(SequenceFactory(status="completed"), due=NOW)
        assert self.count("D") == 1
        integrity.heal("D", NOW)
        assert (self.count("D"), fresh(row.enrollment.sequence).status) == (0, "active")

    def test_overdue_is_information_without_a_healer(self):
        work(due=NOW - MINUTE)
        assert self.count("E") == 1
        assert integrity.measure(integrity.find("E"), NOW).severity == "info"
        with pytest.raises(ValueError):
            integrity.heal("E", NOW)

    def test_overdue_says_since_when_and_when_the_limit_lets_the_last_go(self):
        now = timezone.now()
        sender = SenderFactory(daily_limit=10, time_zone="UTC")
        many(SequenceFactory(), 25, due=lambda n: now - (n + 1) * HOUR, sender=sender)
        (line,) = forecast(now)
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + DAY
        assert (line.waiting, line.a_day, line.eta) == (25, 10, midnight + DAY)
        found = integrity.find("E")
        assert integrity.broken_since(found, now) == now - 25 * HOUR
        assert found.outlook(now)[0].startswith(f"{sender}: 25 waiting, 10 a day")
        Sender.objects.update(status="suspended")
        assert forecast(now)[0].eta is None

    def test_stuck_processing(self):
        work(status="processing", due=NOW - 30 * MINUTE)
        assert self.count("G") == 1
        integrity.heal("G", NOW)
        assert self.count("G") == 0
        assert Execution.objects.get().status == "pending"

    def test_counters(self):
        work()
        Sequence.objects.update(sent_count=5)
        assert self.count("H") == 1
        integrity.heal("H", NOW)
        assert self.count("H") == 0
        assert Sequence.objects.get().counters["sent"] == 0

    def test_all_quiet(self):
        work(due=NOW + DAY)
        assert [self.count(letter) for letter in "ABCDEGH"] == [0] * 7
        assert Enrollment.objects.count() == 1
