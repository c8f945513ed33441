from datetime import timedelta

from django.utils import timezone

from config import sweeping
from config.models import Decision, Nudge, SweepRun
from devices.models import PC
from devices.services import mark_pcs_offline
from tests.factories import PCFactory


def test_eight_sweepers_end_each_silent_pc_once(at_once):
    now = timezone.now()
    PCFactory.create_batch(200, online_since=now - timedelta(hours=1))
    ids = list(PC.objects.values_list("pk", flat=True))
    taken = at_once(*[lambda: mark_pcs_offline(ids, now)] * 8)
    # SKIP LOCKED: a sweeper that finds all rows taken leaves them; the sum is what counts.
    assert sum(taken) == 200
    assert Decision.objects.count() == Decision.objects.values("object_id").distinct().count() == 200
    assert not PC.objects.silent(now).exists()


def test_only_one_run_holds_a_sweeps_slot(at_once):
    PCFactory.create_batch(50, online_since=timezone.now() - timedelta(hours=1))
    results = at_once(*[lambda: sweeping.run("devices.mark_silent_pcs")] * 6)
    ran = [result for result in results if result is not None]
    assert sum(result["counts"].get("offline", 0) for result in ran) == 50
    assert SweepRun.objects.count() == len(ran)
    assert not SweepRun.objects.exclude(error="").exists()


def test_nudges_at_the_same_instant_ask_once(at_once):
    from django_q.models import OrmQ

    results = at_once(*[lambda: sweeping.nudge("devices.mark_silent_pcs")] * 10)
    assert results == [None] * 10
    assert Nudge.objects.get().asked
    assert OrmQ.objects.count() == 1
