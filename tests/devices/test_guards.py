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


def run(sql, *params):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


def test_a_failure_by_hand_is_final_even_where_nobody_said_so(farm):
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    run("UPDATE task_devices SET status = 'failed', completed_at = now(), lease_expires_at = NULL")
    row, device = farm.row(grant), Device.objects.get()
    assert (row.final, row.failure_kind, Attempt.objects.get().outcome) == (True, "error", "error")
    assert (device.status, device.error_reason, device.total_errors) == ("error", "error", 1)
    assert farm.events(grant)[-2:] == ["FAILED", "FAILED_FINAL"]
    assert Task.objects.get(pk=task.pk).devices_failed == 1


def test_a_run_ended_by_hand_has_an_outcome(farm):
    pc = farm.pc(devices=2)
    farm.task(2)
    again, cancelled = farm.claim(pc, 2)
    run(
        "UPDATE task_devices SET status = 'pending', lease_expires_at = NULL, started_at = NULL, deadline_at = NULL"
        " WHERE id = %s",
        again.id,
    )
    run(
        "UPDATE task_devices SET status = 'cancelled', lease_expires_at = NULL, completed_at = now() WHERE id = %s",
        cancelled.id,
    )
    assert [farm.row(again).failure_kind, farm.row(cancelled).failure_kind] == ["error", "cancelled"]
    assert set(Attempt.objects.values_list("outcome", flat=True)) == {"error", "cancelled"}


def test_a_device_set_offline_or_in_error_by_hand_is_so_since_now(farm):
    farm.pc(devices=2)
    run("UPDATE devices SET status = 'offline' WHERE serial = 'PC-01-00'")
    run("UPDATE devices SET status = 'error' WHERE serial = 'PC-01-01'")
    assert farm.device("PC-01-00").offline_at is not None
    assert farm.device("PC-01-01").errored_at is not None
    run("UPDATE devices SET status = 'online' WHERE serial = 'PC-01-00'")
    assert farm.device("PC-01-00").offline_at is None


def test_an_insert_needs_the_columns_of_the_contract_only(farm):
    pc, task = farm.pc(), farm.task()
    run("INSERT INTO pcs (pc_number) VALUES ('PC-77')")
    run("INSERT INTO devices (serial, pc_id) VALUES ('spare', %s)", pc.pk)
    run("INSERT INTO tasks (name, device_count) VALUES ('by hand', 1)")
    run("INSERT INTO task_devices (task_id, device_id) VALUES (%s, %s)", task.pk, farm.device("PC-01-00").pk)
    assert (farm.device("spare").status, farm.device("spare").labels) == ("offline", {})
    [grant] = farm.claim(pc)
    assert farm.complete(grant).status == "success"
    assert farm.status(task) == "success"
    assert Task.objects.get(name="by hand").status == "running"


@pytest.mark.parametrize("number", ["XX-01", "PC-1", "PC-01 ", "PC-01\n"])
def test_a_pc_with_another_number(farm, number):
    assert refused("INSERT INTO pcs (pc_number) VALUES (%s)", number) == "pcs_pc_number"


def test_a_kind_of_failure_nobody_knows(farm):
    pc = farm.pc()
    farm.task()
    farm.claim(pc)
    assert refused("UPDATE task_devices SET failure_kind = 'bogus'") == "task_devices_failure_kind"
