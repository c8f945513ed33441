"""Agents, sweeps and operators at the same instant."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction

from config import sweeping
from config.errors import Conflict
from devices import services
from devices.models import PC, Attempt, Device, Event, PCSummary, Task, TaskDevice
from tests.devices.conftest import Farm


@pytest.fixture
def farm(transactional_db):
    return Farm()


def unexpected(results):
    return [error for error in results if isinstance(error, Exception) and not isinstance(error, Conflict)]


def closing(function):
    def call(*args):
        try:
            return function(*args)
        finally:
            connection.close()

    return call


def until_somebody_waits():
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_clear_snapshot()")  # kept for the whole transaction otherwise
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            if cursor.fetchone()[0]:
                return
    raise AssertionError("nobody waits")


def assert_consistent():
    assert Task.objects.filter(status="running").count() <= 1
    for summary in PCSummary.objects.all():
        assert summary.running_count <= 20
    for row in TaskDevice.objects.prefetch_related("attempts", "events"):
        events = [event.event for event in sorted(row.events.all(), key=lambda event: event.pk)]
        ends = {"SUCCEEDED", "FAILED", "TIMEOUT"}
        assert events.count("SENT") == row.attempt == len(row.attempts.all())
        ended = sum(event in ends for event in events)
        open_runs = row.attempt - ended
        assert open_runs == (row.status == "running") or (row.status == "cancelled" and open_runs in (0, 1)), events
        assert sum(attempt.ended_at is None for attempt in row.attempts.all()) == (row.status == "running")
    for device in Device.objects.filter(status="busy"):
        assert device.rows.filter(status="running").count() == 1
    for task in Task.objects.all():
        states = Counter(task.rows.values_list("status", flat=True))
        assert (task.devices_done, task.devices_failed) == (states["success"], states["failed"])
        assert task.devices_taken == sum(states.values()) - states["cancelled"] <= task.device_count


def test_ten_promoters_leave_one_running_task(farm, at_once):
    for n in range(5):
        Task.objects.create(name=str(n), device_count=1)
    oldest = Task.objects.oldest_first().first()
    results = at_once(*[lambda: services.promote_next_task(farm.now)] * 10)
    assert unexpected(results) == []
    assert [task.pk for task in results if task] == [oldest.pk]
    assert Task.objects.get(status="running").pk == oldest.pk


def test_tasks_created_while_the_running_one_ends_are_seen_by_somebody(farm, at_once):
    pc = farm.pc()
    for _round in range(5):
        farm.task()
        [grant] = farm.claim(pc)
        results = at_once(lambda g=grant: farm.complete(g), farm.task, farm.task)
        assert unexpected(results) == []
        assert Task.objects.filter(status="running").count() == 1
        for task in Task.objects.filter(status__in=["pending", "running"]).order_by("-created_at"):
            services.cancel_task(task, farm.now)
    assert_consistent()


def test_two_processes_of_one_pc_claiming_20_each_get_20_distinct_devices(farm, at_once):
    pc = farm.pc(devices=30)
    farm.task(100)
    results = at_once(*[lambda: farm.claim(pc, 20)] * 2)
    assert unexpected(results) == []
    grants = [grant for result in results for grant in result]
    assert len(grants) == len({grant.device.pk for grant in grants}) == 20
    assert_consistent()


def test_ten_pcs_never_exceed_device_count(farm, at_once):
    pcs = [farm.pc(f"PC-{n:02}", 5) for n in range(10)]
    farm.task(23)
    results = at_once(*[lambda pc=pc: farm.claim(pc, 20) for pc in pcs])
    assert unexpected(results) == []
    assert sum(len(result) for result in results) == TaskDevice.objects.count() == 23
    assert_consistent()


def test_claim_heartbeat_and_recover_at_once_leave_no_contradiction(farm, at_once, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc = farm.pc(devices=10)
    serials = [f"PC-01-{n:02}" for n in range(10)]
    ids = list(Device.objects.values_list("pk", flat=True))
    farm.task(100)
    for turn in range(6):
        services.quarantine_devices(ids[turn : turn + 3], boss, "", farm.now)
        results = at_once(
            lambda: farm.claim(pc, 20),
            lambda: farm.claim(pc, 20),
            lambda t=turn: farm.beat(pc, serials[t:], offline=serials[:t]),
            lambda: services.recover_devices(ids, boss, "", farm.now),
            lambda t=turn: services.quarantine_devices(ids[t + 4 : t + 6], boss, "", farm.now),
        )
        assert unexpected(results) == []
        assert_consistent()
        for row in TaskDevice.objects.filter(status="running").select_related("device"):
            assert row.device.status in ("busy", "quarantined", "offline")
            agent = PC.objects.get(pk=pc.pk).agent
            services.complete_task_device(row.pk, agent, services.claim_token(row.pk, row.attempt), None, farm.now)
        if not Task.objects.filter(status="running").exists():
            farm.task(100)


def test_two_pcs_that_list_and_claim_the_same_devices(farm, at_once):
    one, two = farm.pc("PC-01", 5), farm.pc("PC-02", 5)
    serials = [f"PC-0{pc}-{n:02}" for pc in (1, 2) for n in range(5)]
    farm.task(1000)
    for _turn in range(5):
        results = at_once(
            lambda: farm.beat(one, serials),
            lambda: farm.beat(two, list(reversed(serials))),
            lambda: farm.claim(one, 20),
            lambda: farm.claim(two, 20),
        )
        assert unexpected(results) == []
        for row in TaskDevice.objects.filter(status="running").select_related("device"):
            assert row.claimed_by_id == row.device.pc_id
        assert_consistent()
        for task in Task.objects.filter(status="running"):
            services.cancel_task(task, farm.now)
        farm.sweep("promote_next_task")
        for row in TaskDevice.objects.filter(status="running").select_related("claimed_by__agent"):
            token = services.claim_token(row.pk, row.attempt)
            services.complete_task_device(row.pk, row.claimed_by.agent, token, None, farm.now)
        farm.task(1000)


def test_two_pcs_that_list_the_same_new_devices_the_other_way_round(farm):
    """Both take them in one order, so the second waits with nothing in its hands."""
    one, two = farm.pc("PC-01", 0), farm.pc("PC-02", 0)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            Device.objects.create(serial="a", pc=one, offline_at=farm.now)
            beat = pool.submit(closing(farm.beat), two, ["b", "a"])
            until_somebody_waits()
            Device.objects.create(serial="b", pc=one, offline_at=farm.now)
        assert beat.result() is None
    assert set(Device.objects.values_list("serial", "pc", "status")) == {
        ("a", two.pk, "online"),
        ("b", two.pk, "online"),
    }


def test_a_new_device_that_another_pc_lists_and_claims_first_stays_there(farm):
    one, two = farm.pc("PC-01", 0), farm.pc("PC-02", 0)
    farm.task()
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            farm.beat(one, ["new"])
            beat = pool.submit(closing(farm.beat), two, ["new"])
            until_somebody_waits()
            [grant] = farm.claim(one)
        beat.result()
    assert Device.objects.values_list("pc", "status").get() == (one.pk, "busy")
    assert farm.complete(grant).status == "success"


def test_complete_against_the_timeout_sweep_is_one_outcome_and_one_chain_of_events(farm, at_once):
    pc = farm.pc(devices=8)
    farm.task(8)
    grants = farm.claim(pc, 8)
    farm.later(minutes=20, seconds=1)
    agent = farm.agent(grants[0])

    def complete(grant):
        return lambda: services.complete_task_device(grant.id, agent, farm.token(grant), {"done": 1}, farm.now)

    def sweep():
        return sweeping.run("devices.time_out_attempts", now=farm.now)

    results = at_once(*[complete(grant) for grant in grants], sweep, sweep)
    assert unexpected(results) == []
    for grant in grants:
        row, chain = farm.row(grant), farm.events(grant)
        if row.status == "success":
            assert chain == ["CREATED", "SENT", "SUCCEEDED"]
        else:
            assert (row.status, chain) == ("pending", ["CREATED", "SENT", "TIMEOUT", "RETRY_SCHEDULED"])
    assert Attempt.objects.filter(ended_at=None).count() == 0
    assert_consistent()


def test_the_same_result_sent_five_times_at_once_is_written_once(farm, at_once):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    agent = farm.agent(grant)
    send = [lambda: services.complete_task_device(grant.id, agent, farm.token(grant), 1, farm.now)] * 5
    assert at_once(*send) == [None] * 5
    assert Event.objects.filter(event="SUCCEEDED").count() == 1


def test_results_sweeps_heartbeats_and_cancelling_all_at_once(farm, at_once, django_user_model):
    """No deadlock, whatever order the doors are opened in."""
    pcs = [farm.pc(f"PC-{n:02}", 4) for n in range(1, 4)]
    for turn in range(4):
        task = farm.task(12)
        farm.task(12)
        grants = [grant for pc in pcs for grant in farm.claim(pc, 4)]
        farm.later(minutes=5, seconds=1)
        jobs = [lambda g=grant: farm.fail(g) for grant in grants[:3]]
        jobs += [lambda g=grant: farm.complete(g) for grant in grants[3:6]]
        jobs += [lambda: sweeping.run("devices.expire_leases", now=farm.now)]
        jobs += [lambda pc=pc: farm.beat(pc, offline=[f"{pc.pc_number}-{n:02}" for n in range(4)]) for pc in pcs[1:]]
        jobs += [lambda pc=pc: farm.claim(pc, 4) for pc in pcs]
        if turn % 2:
            jobs += [lambda t=task: services.cancel_task(t, farm.now)]
        results = at_once(*jobs)
        assert unexpected(results) == []
        assert_consistent()
        for left in Task.objects.filter(status__in=["pending", "running"]).order_by("-created_at"):
            services.cancel_task(left, farm.now)
        farm.later(minutes=21)
        farm.sweep("time_out_attempts")
        assert not TaskDevice.objects.filter(status__in=["pending", "running"]).exists()
        broken = list(Device.objects.filter(status="error").values_list("pk", flat=True))
        boss, _ = django_user_model.objects.get_or_create(username="boss")
        services.recover_devices(broken, boss, "", farm.now)
        for pc in pcs:
            farm.beat(pc, [f"{pc.pc_number}-{n:02}" for n in range(4)])
