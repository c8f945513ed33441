"""What the database itself refuses, whoever asks."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction

from devices.models import Attempt, Device, Event, Task, TaskDevice


def refused(sql, *params):
    with pytest.raises(IntegrityError) as error, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql, params)
    return error.value.__cause__.diag.constraint_name


def test_a_second_running_task(farm):
    farm.task(), farm.task()
    assert (
        refused("UPDATE tasks SET status = 'running', started_at = now() WHERE status = 'pending'")
        == "tasks_one_running"
    )


def test_a_second_running_row_of_a_device(farm):
    pc, first = farm.pc(), farm.task()
    farm.claim(pc)
    second = Task.objects.create(name="other", device_count=1)
    row = TaskDevice.objects.create(task=second, device=Device.objects.get(), created_at=farm.now, changed_at=farm.now)
    sql = """
        UPDATE task_devices AS row SET status = 'running', attempt = 1, claimed_by_id = running.claimed_by_id,
               started_at = running.started_at, deadline_at = running.deadline_at,
               lease_expires_at = running.lease_expires_at
          FROM task_devices AS running WHERE running.status = 'running' AND row.id = %s
    """
    assert refused(sql, row.pk) == "task_devices_one_running"
    assert first.pk != second.pk


def test_a_second_row_of_a_device_in_a_task(farm):
    pc, task = farm.pc(), farm.task(2)
    farm.claim(pc)
    with pytest.raises(IntegrityError), transaction.atomic():
        TaskDevice.objects.create(task=task, device=Device.objects.get(), created_at=farm.now, changed_at=farm.now)


def test_more_rows_than_devices_wanted(farm):
    pc, task = farm.pc(devices=2), farm.task(1)
    farm.claim(pc)
    spare = Device.objects.exclude(rows__task=task).get()
    with pytest.raises(IntegrityError) as error, transaction.atomic():
        TaskDevice.objects.create(task=task, device=spare, created_at=farm.now, changed_at=farm.now)
    assert error.value.__cause__.diag.constraint_name == "tasks_counts"


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("attempt = 4", "task_devices_attempt"),
        ("attempt = -1", "task_devices_attempt"),
        ("deadline_at = deadline_at + interval '1 second'", "task_devices_deadline"),
        ("started_at = started_at - interval '1 second'", "task_devices_deadline"),
        ("lease_expires_at = deadline_at + interval '1 microsecond'", "task_devices_lease"),
        ("lease_expires_at = NULL", "task_devices_running_is_leased"),
        ("completed_at = now()", "task_devices_completed_at"),
        ("final = true", "task_devices_final"),
    ],
)
def test_a_running_row_that_makes_no_sense(farm, change, constraint):
    pc = farm.pc()
    farm.task()
    farm.claim(pc)
    assert refused(f"UPDATE task_devices SET {change}") == constraint


def test_a_person_may_move_the_times_together(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE task_devices SET started_at = started_at - interval '20 minutes 1 second',"
            " deadline_at = deadline_at - interval '20 minutes 1 second',"
            " lease_expires_at = lease_expires_at - interval '20 minutes 1 second'"
        )
    assert farm.sweep("time_out_attempts") == {"timeout": 1}
    assert farm.events(grant) == ["CREATED", "SENT", "TIMEOUT", "RETRY_SCHEDULED"]


def test_a_change_of_an_event(farm):
    pc = farm.pc()
    farm.task()
    farm.claim(pc)
    assert refused("UPDATE tasks_event SET event = 'ACKED'") == "tasks_event_append_only"
    assert refused("DELETE FROM tasks_event") == "tasks_event_append_only"
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert refused("TRUNCATE tasks_event") == "tasks_event_append_only"
    assert Event.objects.count() == 2


def test_no_path_forgets_the_device_or_the_history_of_a_final_failure(farm):
    """Not even plain SQL: the trigger of task_devices writes what follows."""
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    at = farm.now + timedelta(minutes=1)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE task_devices SET status = 'failed', final = true, failure_kind = 'error', error = 'by hand',"
            " completed_at = %s, changed_at = %s, lease_expires_at = NULL",
            [at, at],
        )
    device = Device.objects.get()
    assert (device.status, device.error_reason, device.errored_at, device.total_errors) == ("error", "by hand", at, 1)
    assert farm.events(grant)[-2:] == ["FAILED", "FAILED_FINAL"]
    attempt = Attempt.objects.get()
    assert (attempt.ended_at, attempt.outcome, attempt.error) == (at, "error", "by hand")
    assert Task.objects.get(pk=task.pk).devices_failed == 1
