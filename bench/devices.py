"""Claim and complete through the services beside bare SQL that writes the same rows, and the claim endpoint's tail."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.utils import timezone

from devices import services
from devices.models import PC, Task

PCS, DEVICES = 10, 20
ROWS = PCS * DEVICES
TASKS = 5
# The specification's figure; BENCH_HISTORY=10000 for a quick look.
HISTORY = int(os.environ.get("BENCH_HISTORY", "1000000"))
CALLS = 30
ROUNDS = 3

BARE_CLAIM = """
WITH task AS MATERIALIZED (SELECT id FROM tasks WHERE status = 'running' FOR NO KEY UPDATE),
device AS MATERIALIZED (
    SELECT d.id, task.id AS task_id, gen_random_uuid() AS row_id FROM devices AS d, task
     WHERE d.pc_id = %(pc)s AND d.status = 'online'
       AND NOT EXISTS (SELECT FROM task_devices AS t WHERE t.task_id = task.id AND t.device_id = d.id)
     ORDER BY d.id LIMIT 20 FOR NO KEY UPDATE OF d),
made AS (
    INSERT INTO task_devices (id, task_id, device_id, status, attempt, max_attempts, claimed_by_id, started_at,
           deadline_at, lease_expires_at, timed_out, retryable, final, ended_by, changed_at, created_at)
    SELECT row_id, task_id, id, 'running', 1, 3, %(pc)s, %(now)s, %(now)s + interval '20 minutes',
           %(now)s + interval '5 minutes', false, true, false, '', %(now)s, %(now)s
      FROM device),
attempts AS (
    INSERT INTO task_device_attempts (task_device_id, attempt_no, claimed_by, started_at)
    SELECT row_id, 1, 'PC-00', %(now)s FROM device),
events AS (
    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT row_id, kind, 1, %(now)s FROM device, (VALUES ('CREATED'), ('SENT')) AS told (kind)),
busy AS (UPDATE devices SET status = 'busy' FROM device WHERE devices.id = device.id),
taken AS (
    UPDATE tasks SET devices_taken = devices_taken + (SELECT count(*) FROM device)
     WHERE id = (SELECT id FROM task))
SELECT row_id FROM device
"""
BARE_COMPLETE = """
WITH row AS (
    UPDATE task_devices SET status = 'success', completed_at = %(now)s, lease_expires_at = NULL, result = '{}',
           ended_by = 'complete', changed_at = %(now)s
     WHERE id = %(id)s AND status = 'running' AND attempt = 1
    RETURNING id, task_id, device_id),
attempt AS (
    UPDATE task_device_attempts SET ended_at = %(now)s, outcome = 'success' FROM row
     WHERE task_device_id = row.id AND attempt_no = 1),
event AS (
    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT id, 'SUCCEEDED', 1, %(now)s FROM row),
idle AS (UPDATE devices SET status = 'online' FROM row WHERE devices.id = row.device_id)
UPDATE tasks SET devices_done = devices_done + 1 FROM row WHERE tasks.id = row.task_id
"""
HISTORY_SQL = """
WITH task AS (
    INSERT INTO tasks (id, name, payload, device_count, selector, status, created_at, started_at, completed_at,
           devices_taken, devices_done, devices_failed)
    SELECT gen_random_uuid(), 'old', '{}', %(rows)s, '{}', 'success', now(), now(), now(), %(rows)s, %(rows)s, 0
      FROM generate_series(1, %(tasks)s)
    RETURNING id),
row AS (
    INSERT INTO task_devices (id, task_id, device_id, status, attempt, max_attempts, claimed_by_id, started_at,
           deadline_at, completed_at, timed_out, retryable, final, ended_by, changed_at, created_at)
    SELECT gen_random_uuid(), task.id, devices.id, 'success', 1, 3, devices.pc_id, now(),
           now() + interval '20 minutes', now(), false, true, false, 'complete', now(), now()
      FROM task, devices
    RETURNING id),
attempt AS (
    INSERT INTO task_device_attempts (task_device_id, attempt_no, claimed_by, started_at, ended_at, outcome)
    SELECT id, 1, 'PC-00', now(), now(), 'success' FROM row)
INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
SELECT id, kind, 1, now() FROM row, (VALUES ('CREATED'), ('SENT'), ('SUCCEEDED')) AS told (kind)
"""
TRIGGERS = ("pcs", "devices", "device_history", "tasks", "task_devices", "task_device_attempts", "tasks_event")


def run() -> None:
    pcs = _farm()
    # Turn by turn, so that whatever else the machine does burdens both alike.
    turns = [(_seconds(_bare, pcs), _seconds(_ours, pcs)) for _turn in range(TASKS)]
    floor, ours = (ROWS / statistics.median(seconds) for seconds in zip(*turns, strict=True))
    say(f"devices: {PCS} PCs x {DEVICES} devices, {TASKS} tasks of {ROWS} rows, claims of 20, completed one by one")
    say(f"  bare SQL, same rows written   {floor:10,.0f} rows/s")
    say(f"  services                      {ours:10,.0f} rows/s   {ours / floor:.2f} of the floor (at least 0.40)")
    young = _claim_cost(pcs)
    _write_history(HISTORY)
    old = _claim_cost(pcs)
    say(f"  a claim of 20, empty history  {young * 1000:10.2f} ms")
    say(f"  … {HISTORY:>9,} finished rows  {old * 1000:10.2f} ms        {old / young:.2f} of the former")
    median, p99 = _endpoint(pcs)
    say(f"  claim endpoint, {PCS} agents     {median * 1000:10.2f} ms median, {p99 * 1000:.2f} ms p99")
    say(f"                                             {p99 / median:.2f} of the median (at most 5)")
    _clean()


def say(line: str) -> None:
    print(line)  # noqa: T201


def _farm() -> list[PC]:
    pcs = []
    group = Group.objects.get(name="device-agent")
    for n in range(PCS):
        user = get_user_model().objects.create(username=f"bench-{n}")
        user.groups.add(group)
        pc = services.assign_agent(user, f"PC-{n:02}")
        reports = [services.DeviceReport(f"{n}-{d}", False, {}) for d in range(DEVICES)]
        services.record_heartbeat(pc, timezone.now(), devices=reports)
        pcs.append(PC.objects.select_related("agent").get(pk=pc.pk))
    return pcs


def _seconds(work: Callable[[list[PC]], None], pcs: list[PC]) -> float:
    started = time.perf_counter()
    work(pcs)
    return time.perf_counter() - started


def _triggers(verb: str) -> None:
    with connection.cursor() as cursor:
        for table in TRIGGERS:
            cursor.execute(f"ALTER TABLE {table} {verb} TRIGGER USER")


def _bare(pcs: list[PC]) -> None:
    """The floor writes the history itself, so the triggers rest meanwhile. Foreign keys stay."""
    _triggers("DISABLE")
    now = timezone.now()
    task = Task.objects.create(name="bare", device_count=ROWS)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tasks SET status = 'running', started_at = now() WHERE status = 'pending'")
        for pc in pcs:
            cursor.execute(BARE_CLAIM, {"pc": pc.pk, "now": now})
            for (row_id,) in cursor.fetchall():
                cursor.execute(BARE_COMPLETE, {"id": row_id, "now": now})
        cursor.execute("UPDATE tasks SET status = 'success', completed_at = now() WHERE status = 'running'")
    _triggers("ENABLE")
    assert Task.objects.get(pk=task.pk).devices_done == ROWS


def _ours(pcs: list[PC]) -> None:
    task = services.create_task("ours", ROWS, timezone.now())
    for pc in pcs:
        for grant in services.claim_task_devices(pc, 20, timezone.now()):
            token = services.claim_token(grant.id, grant.attempt)
            services.complete_task_device(grant.id, pc.agent, token, {}, timezone.now())
    assert Task.objects.get(pk=task.pk).status == Task.Status.SUCCESS


def _claim_cost(pcs: list[PC]) -> float:
    """The median of claims of 20, each undone."""
    services.create_task("cost", ROWS, timezone.now())
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    took = []
    for n in range(CALLS):
        with transaction.atomic():
            started = time.perf_counter()
            assert len(services.claim_task_devices(pcs[n % PCS], 20, timezone.now())) == DEVICES
            took.append(time.perf_counter() - started)
            transaction.set_rollback(True)
    services.cancel_task(Task.objects.get(status="running"), timezone.now())
    return statistics.median(took)


def _write_history(rows: int) -> None:
    """Finished tasks of 200 rows with their attempts and events, fifty tasks to a transaction."""
    _triggers("DISABLE")
    with connection.cursor() as cursor:
        for start in range(0, rows // ROWS, 50):
            cursor.execute(HISTORY_SQL, {"tasks": min(50, rows // ROWS - start), "rows": ROWS})
    _triggers("ENABLE")
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")


def _clean() -> None:
    """The next benchmark finds the database as we did."""
    _triggers("DISABLE")
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE pcs, devices, device_history, tasks, task_devices, task_device_attempts, tasks_event")
    _triggers("ENABLE")
    get_user_model().objects.filter(username__startswith="bench-").delete()


def _endpoint(pcs: list[PC]) -> tuple[float, float]:
    """Each agent claims one, completes it, and again; the claims are timed."""
    from knox.models import AuthToken
    from rest_framework.test import APIClient

    for _round in range(ROUNDS):
        services.create_task("endpoint", ROWS, timezone.now())
    took: list[float] = []

    def work(pc: PC) -> None:
        client = APIClient(SERVER_NAME="localhost")
        client.credentials(HTTP_AUTHORIZATION=f"Token {AuthToken.objects.create(pc.agent)[1]}")
        mine = []
        for turn in range(ROUNDS * DEVICES):
            started = time.perf_counter()
            answer = client.post(f"/api/v1/pcs/{pc.pc_number}/claim/", {"max_to_claim": 1}, format="json")
            seconds = time.perf_counter() - started
            assert answer.status_code == 200, answer.content
            # The first calls of a thread open its connection and compile; a living agent has done that.
            if turn >= 2:
                mine.append(seconds)
            for grant in answer.json()["task_devices"]:
                path = f"/api/v1/task-devices/{grant['id']}/complete/"
                assert client.post(path, {"token": grant["token"], "result": {}}, format="json").status_code == 200
        took.extend(mine)

    def work_and_close(pc: PC) -> None:
        try:
            work(pc)
        finally:
            connection.close()

    with ThreadPoolExecutor(PCS) as pool:
        list(pool.map(work_and_close, pcs))
    return statistics.median(took), statistics.quantiles(took, n=100)[98]
