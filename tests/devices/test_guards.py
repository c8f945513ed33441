"""What the database itself refuses, whoever asks."""

from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.db import IntegrityError, connection, transaction

from config.models import Decision
from devices import services
from devices.models import PC, Attempt, Device, Event, PCSummary, Task, TaskDevice


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


def test_an_attempt_taken_away(farm):
    pc = farm.pc()
    farm.task()
    farm.claim(pc)
    assert refused("DELETE FROM task_device_attempts") == "task_device_attempts_kept"
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert refused("TRUNCATE task_device_attempts") == "task_device_attempts_kept"


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


RUNNING = "'running', 1, now() - interval '{0}', now() - interval '{0}' + interval '20 minutes', now() - interval '1 s'"


def bring_in_run(task_id, device, began):
    run(
        "INSERT INTO task_devices (task_id, device_id, status, attempt, started_at, deadline_at, lease_expires_at)"
        f" VALUES (%s, %s, {RUNNING.format(began)})",
        task_id,
        device.pk,
    )
    return TaskDevice.objects.get(task=task_id, device=device)


def told(row):
    return list(row.events.order_by("id").values_list("event", "attempt_no"))


@pytest.mark.parametrize(
    ("began", "sweep", "kind", "event"),
    [
        ("6 minutes", "expire_leases", "lease_expired", "FAILED"),
        ("20 minutes", "time_out_attempts", "timeout", "TIMEOUT"),
    ],
)
def test_a_run_brought_in_by_hand_is_one_like_others(farm, began, sweep, kind, event):
    pc, task = farm.pc(), farm.task()
    farm.later(seconds=1)
    row = bring_in_run(task.pk, farm.device("PC-01-00"), began)
    assert (row.claimed_by, farm.device("PC-01-00").status) == (pc, "busy")
    assert PCSummary.objects.get(pk=pc.pk).running_count == 1
    assert farm.sweep(sweep) == {kind: 1}
    assert told(row) == [("CREATED", 0), ("SENT", 1), (event, 1), ("RETRY_SCHEDULED", 1)]
    assert Attempt.objects.get(task_device=row).outcome == kind
    [again] = farm.claim(pc)
    assert (again.id, again.attempt, farm.complete(again).status) == (row.pk, 2, "success")
    assert farm.status(task) == "success"


def test_a_run_brought_in_by_hand_counts_towards_the_devices_wanted(farm):
    pc, task = farm.pc(devices=3), farm.task(2)
    [grant] = farm.claim(pc)
    second, third = Device.objects.exclude(pk=grant.device.pk)
    bring_in_run(task.pk, second, "6 minutes")
    assert Task.objects.get().devices_taken == 2
    with pytest.raises(IntegrityError) as error, transaction.atomic():
        bring_in_run(task.pk, third, "6 minutes")
    assert error.value.__cause__.diag.constraint_name == "tasks_counts"
    assert farm.claim(pc, 3) == []


def test_a_pc_with_devices_brought_in_by_hand_works(farm):
    run("INSERT INTO pcs (pc_number, status) VALUES ('PC-88', 'online')")
    pc = PC.objects.get(pc_number="PC-88")
    assert pc.last_heartbeat_at is not None
    for status in Device.Status.values:
        run("INSERT INTO devices (serial, pc_id, status) VALUES (%s, %s, %s)", status, pc.pk, status)
    assert (farm.device("error").errored_at is not None, farm.device("offline").offline_at is not None) == (True, True)
    summary = PCSummary.objects.get(pk=pc.pk)
    assert (summary.device_count, summary.eligible_device_count, summary.error_count) == (5, 2, 1)
    farm.task(5)
    assert {grant.device.serial for grant in farm.claim(pc, 5)} == {"online", "busy"}
    run("UPDATE devices SET status = 'error' WHERE serial = 'busy'")
    services.recover_devices([farm.device("busy").pk], get_user_model().objects.create(username="boss"), "", farm.now)
    assert farm.device("busy").status == "busy"


def test_an_ended_task_brought_in_by_hand_keeps_its_counts(farm):
    pc = farm.pc(devices=3)
    run(
        "INSERT INTO tasks (name, status, device_count, devices_done, devices_failed, created_at, started_at,"
        " completed_at) VALUES ('old', 'success', 3, 2, 1, now(), now(), now()),"
        " ('bare', 'failed', 3, 0, 0, now(), now(), now())"
    )
    for name in ("old", "bare"):
        run(
            "INSERT INTO task_devices (task_id, device_id, status, attempt, completed_at, final)"
            " SELECT tasks.id, devices.id, CASE serial WHEN 'PC-01-00' THEN 'failed' ELSE 'success' END, 3, now(),"
            " serial = 'PC-01-00' FROM tasks, devices WHERE name = %s",
            name,
        )
    assert set(Task.objects.values_list("devices_taken", "devices_done", "devices_failed")) == {(3, 2, 1)}
    assert farm.device("PC-01-00").status == "error"
    row = TaskDevice.objects.get(task__name="old", device__serial="PC-01-00")
    assert (row.failure_kind, told(row)) == ("error", [("CREATED", 0), ("FAILED", 3), ("FAILED_FINAL", 3)])
    again = services.retry_task(Task.objects.get(name="old"), farm.now)
    assert (again.device_count, farm.status(again), farm.claim(pc, 3)) == (1, "running", [])


def test_a_second_running_task_or_row_brought_in_by_hand(farm):
    farm.pc()
    task, other = farm.task(), farm.task()
    assert refused("INSERT INTO tasks (name, device_count, status) VALUES ('x', 1, 'running')") == "tasks_one_running"
    assert refused("UPDATE tasks SET status = 'running' WHERE id = %s", other.pk) == "tasks_one_running"
    device = farm.device("PC-01-00")
    bring_in_run(task.pk, device, "6 minutes")
    with pytest.raises(IntegrityError) as error, transaction.atomic():
        bring_in_run(other.pk, device, "6 minutes")
    assert error.value.__cause__.diag.constraint_name == "task_devices_one_running"


def test_a_state_alone_is_enough_to_end_by_hand(farm):
    pc, task = farm.pc(devices=2), farm.task(2)
    grants = farm.claim(pc, 2)
    run("UPDATE task_devices SET status = 'success' WHERE id = %s", grants[0].id)
    run("UPDATE task_devices SET status = 'cancelled' WHERE id = %s", grants[1].id)
    assert set(Attempt.objects.values_list("outcome", flat=True)) == {"success", "cancelled"}
    assert {row.completed_at is not None for row in TaskDevice.objects.all()} == {True}
    assert Attempt.objects.filter(ended_at__gt=farm.now).count() == 2
    assert set(Device.objects.values_list("status", flat=True)) == {"online"}
    run("UPDATE tasks SET status = 'cancelled' WHERE id = %s", task.pk)
    assert Task.objects.get().completed_at is not None


def test_an_attempt_changed_by_hand_blocks_no_claim_and_leaves_none_open(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.fail(grant)
    run("UPDATE task_devices SET attempt = 0")
    [grant] = farm.claim(pc)
    assert (grant.attempt, Attempt.objects.get().outcome) == (1, None)
    run("UPDATE task_devices SET attempt = 3")
    farm.later(minutes=6)
    farm.sweep("expire_leases")
    assert (farm.row(grant).status, Attempt.objects.get().outcome) == ("failed", "lease_expired")


def test_a_run_ended_with_every_column_by_hand_is_dated_by_them(farm):
    pc = farm.pc(devices=2)
    farm.task(2)
    failed, done = farm.claim(pc, 2)
    at = farm.now + timedelta(minutes=1)
    run(
        "UPDATE task_devices SET status = 'failed', final = true, failure_kind = 'error', error = 'by hand',"
        " completed_at = %s, lease_expires_at = NULL WHERE id = %s",
        at,
        failed.id,
    )
    run(
        "UPDATE task_devices SET status = 'success', completed_at = %s, lease_expires_at = NULL WHERE id = %s",
        at,
        done.id,
    )
    assert set(Attempt.objects.values_list("ended_at", flat=True)) == {at}
    assert Device.objects.get(status="error").errored_at == at
    ends = Event.objects.exclude(event__in=["CREATED", "SENT"])
    assert set(ends.values_list("event", "created_at")) == {("FAILED", at), ("FAILED_FINAL", at), ("SUCCEEDED", at)}


def test_a_run_brought_in_by_hand_was_sent_when_it_started(farm):
    farm.pc()
    row = bring_in_run(farm.task().pk, farm.device("PC-01-00"), "6 minutes")
    assert row.events.get(event="SENT").created_at == row.started_at == Attempt.objects.get().started_at


def test_an_event_nobody_knows(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    insert = "INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at) VALUES (%s, 'LOST', 1, now())"
    assert refused(insert, grant.id) == "tasks_event_kind"


@pytest.mark.parametrize("end", ["success", "failed", "cancelled"])
def test_rows_of_a_task_ended_by_hand_end_with_it(farm, end):
    """Whatever the task became: nobody claims its waiting rows, and results of running ones count for nothing."""
    pc, task = farm.pc(devices=3), farm.task(3)
    waiting, lapsing, running = farm.claim(pc, 3)
    farm.fail(waiting)
    run("UPDATE tasks SET status = %s WHERE id = %s", end, task.pk)
    assert farm.complete(running, result={"done": 1}).status == "cancelled"
    assert farm.complete(running).result == {"done": 1}
    farm.later(minutes=6)
    farm.beat(pc, [f"PC-01-{n:02}" for n in range(3)])
    assert farm.sweep("expire_leases") == {"lease_expired": 1}
    assert farm.row(lapsing).status == "cancelled"
    assert farm.sweep("promote_next_task") == {"cancelled": 1}
    assert farm.row(waiting).status == "cancelled"
    assert set(Device.objects.values_list("status", "total_errors")) == {("online", 0)}
    assert farm.status(task) == end


def test_a_task_ends_by_its_rows_whatever_its_counts_say(farm):
    pc, task, following = farm.pc(devices=2), farm.task(2), farm.task()
    done, failed = farm.claim(pc, 2)
    run("UPDATE tasks SET devices_taken = 2, devices_done = 0, devices_failed = 0 WHERE id = %s", task.pk)
    farm.complete(done)
    run("UPDATE tasks SET devices_done = 0 WHERE id = %s", task.pk)
    farm.fail(failed, retryable=False)
    assert farm.status(task) == "running"
    assert farm.sweep("promote_next_task") == {"recounted": 1, "ended": 1}
    task = Task.objects.get(pk=task.pk)
    assert (task.status, task.devices_taken, task.devices_done, task.devices_failed) == ("success", 2, 1, 1)
    assert Decision.objects.get(rule="recount_rows").before["devices_done"] == 0
    assert farm.status(following) == "running"
    assert farm.sweep("promote_next_task") == {}
