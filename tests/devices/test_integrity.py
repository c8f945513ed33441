from datetime import timedelta

import pytest
from django.db import connection

from config.integrity import find, heal, measure
from config.models import Decision
from devices import services
from devices.models import Device, PCSummary, Task, TaskDevice


def without_guards(*statements):
    """What the database would refuse, written with its guards down: the report must see it all the same."""
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        for statement in statements:
            cursor.execute(statement)


def count(name, farm):
    return measure(find(f"devices.{name}"), farm.now).count


@pytest.fixture
def busy(farm):
    pc = farm.pc(devices=2)
    farm.task(2)
    farm.claim(pc)
    return farm


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        (
            "two_running_tasks",
            [
                "DROP INDEX tasks_one_running",
                "INSERT INTO tasks (id, name, device_count, selector, status, created_at, devices_taken, devices_done,"
                " devices_failed) VALUES (gen_random_uuid(), 'x', 1, '{}', 'pending', now(), 0, 0, 0)",
                "UPDATE tasks SET status = 'running', started_at = now() WHERE status = 'pending'",
            ],
        ),
        (
            "running_without_lease",
            [
                "ALTER TABLE task_devices DROP CONSTRAINT task_devices_running_is_leased",
                "UPDATE task_devices SET lease_expires_at = NULL",
            ],
        ),
        (
            "attempt_above_max",
            [
                "ALTER TABLE task_devices DROP CONSTRAINT task_devices_attempt",
                "UPDATE task_devices SET attempt = 4",
            ],
        ),
        ("busy_without_run", ["UPDATE devices SET status = 'online' WHERE status = 'busy'"]),
    ],
)
def test_the_report_sees_what_the_guards_should_have_prevented(busy, name, statements):
    assert count(name, busy) == 0
    without_guards(*statements)
    assert count(name, busy) == 1


def test_a_final_failure_needs_its_device_in_error_until_somebody_recovers_it(farm, django_user_model):
    pc = farm.pc()
    farm.task()
    for _attempt in range(3):
        farm.fail(*farm.claim(pc))
    assert count("final_failure_without_device_error", farm) == 0
    with connection.cursor() as cursor:
        cursor.execute("UPDATE devices SET status = 'online'")
    assert count("final_failure_without_device_error", farm) == 1
    assert heal("devices.final_failure_without_device_error", farm.now) == {"error": 1}
    assert count("final_failure_without_device_error", farm) == 0
    device = Device.objects.get()
    assert (device.status, device.error_reason, device.total_errors) == ("error", "broken", 1)
    assert Decision.objects.get(rule="break_down_devices").before == {"status": "online"}
    boss = django_user_model.objects.create(username="boss")
    services.recover_devices(list(Device.objects.values_list("pk", flat=True)), boss, "", farm.now)
    assert count("final_failure_without_device_error", farm) == 0


def test_a_failure_that_blames_no_device_is_no_finding(farm):
    pc = farm.pc()
    farm.task()
    farm.fail(*farm.claim(pc), retryable=False)
    assert count("final_failure_without_device_error", farm) == 0


def test_devices_that_say_the_wrong_thing_about_their_runs_are_corrected(busy):
    with connection.cursor() as cursor:
        cursor.execute("UPDATE devices SET status = CASE status WHEN 'busy' THEN 'online' ELSE 'busy' END")
    assert count("busy_without_run", busy) == 2
    assert heal("devices.busy_without_run", busy.now) == {"corrected": 2}
    assert count("busy_without_run", busy) == 0
    assert Device.objects.get(status="busy") == TaskDevice.objects.get().device
    assert heal("devices.busy_without_run", busy.now) == {"corrected": 0}


def test_slots_above_target(farm):
    pc = farm.pc(devices=2)
    farm.task(2)
    farm.claim(pc, 2)
    assert count("slots_above_target", farm) == 0
    services.set_max_slots(pc, 1)
    assert count("slots_above_target", farm) == 1
    assert PCSummary.objects.get().free_slots == 0


def test_a_task_that_cannot_end_is_found_and_healed(farm):
    Task.objects.create(name="left", device_count=1)
    farm.later(minutes=4)
    assert count("task_that_cannot_end", farm) == 0
    farm.later(minutes=2)
    assert count("task_that_cannot_end", farm) == 1
    assert heal("devices.task_that_cannot_end", farm.now) == {"promoted": 1}
    assert count("task_that_cannot_end", farm) == 0


def test_a_task_whose_rows_have_all_ended_is_found_and_healed(farm):
    pc, task = farm.pc(), farm.task()
    farm.claim(pc)
    without_guards("UPDATE task_devices SET status = 'success'")
    farm.later(minutes=4)
    assert count("task_that_cannot_end", farm) == 0
    farm.later(minutes=2)
    assert count("task_that_cannot_end", farm) == 1
    assert heal("devices.task_that_cannot_end", farm.now)["ended"] == 1
    assert (farm.status(task), count("task_that_cannot_end", farm)) == ("success", 0)


def test_a_task_whose_run_outlived_its_deadline_is_found(farm):
    pc = farm.pc()
    farm.task()
    farm.claim(pc)
    farm.later(minutes=24)
    assert count("task_that_cannot_end", farm) == 0
    farm.later(minutes=2)
    assert count("task_that_cannot_end", farm) == 1


def test_a_task_that_waits_for_its_first_device_is_no_finding_for_a_day(farm):
    farm.task()
    farm.later(hours=24)
    assert count("task_that_cannot_end", farm) == 0
    farm.now += timedelta(minutes=6)
    assert count("task_that_cannot_end", farm) == 1


def test_metrics_tell_the_farms_slots(busy, make_client):
    text = make_client("viewer", username="prometheus").get("/metrics").content.decode()
    for kind, slots in {"target": 2, "running": 1, "free": 1}.items():
        assert f'signalbox_device_slots{{kind="{kind}"}} {slots}.0' in text
    assert "signalbox_stale_pcs 0.0" in text
