"""Integrity, metrics, the force_unlock command, retention: what operators use."""

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from config import integrity, sweeping
from config.models import Decision
from locks.models import Branch, BranchLock, LockEvent, LockWaiter
from locks.services import set_branch_state
from locks.services.acquiring import try_acquire
from locks.services.waiting import READY
from tests.locks.conftest import kinds, shift
from tests.locks.test_gate import lock as held
from tests.races.test_locks import request

pytestmark = pytest.mark.django_db


def count(name):
    return integrity.measure(integrity.find(name)).count


def sql(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def clean():
    return {reading.name: reading.count for reading in integrity.report() if reading.name.startswith("locks.")}


def test_a_quiet_database_breaks_no_invariant(holder):
    shift(holder.acquire("a"), expires_at=-1)
    holder.acquire("b")
    assert set(clean().values()) == {0}
    assert len(clean()) == 6


def test_a_lock_that_blocks_past_its_expiry_is_reported(holder):
    lock = holder.acquire(auto_release_enabled=False)
    shift(lock, expires_at=-1)
    assert count("locks.expired_but_blocking") == 1
    holder.release(lock)
    assert count("locks.expired_but_blocking") == 0


def test_an_expired_lock_no_sweep_comes_for_is_reported_and_healed(holder):
    lock = holder.acquire()
    shift(lock, expires_at=-600)
    assert count("locks.expired_unswept") == 0
    shift(lock, expires_at=-661)
    assert count("locks.expired_unswept") == 1
    assert integrity.heal("locks.expired_unswept") == {"expired": 1}
    assert count("locks.expired_unswept") == 0


def test_a_fence_that_went_back_is_reported(holder):
    lock = holder.acquire(scope="RESOURCE_TYPE", resource_type="a")
    sql("UPDATE branch_locks SET fence = 9 WHERE id = %s", lock["lock_id"])
    assert count("locks.fence_going_back") == 1
    sql("UPDATE branches SET fence = 9")
    assert count("locks.fence_going_back") == 0
    sql(
        "INSERT INTO branch_locks (branch_id, lock_type, lock_scope, resource_type, locked_by, reason, expires_at,"
        " fence) SELECT id, 'BACKUP', 'RESOURCE_TYPE', 'b', 'x', 'x', now() + interval '1 hour', 9 FROM branches"
    )
    assert count("locks.fence_going_back") == 1


@pytest.mark.parametrize("state", ["ARCHIVED", "ERROR"])
def test_a_lock_on_a_closed_branch_is_reported_and_healed(holder, state):
    lock = holder.acquire()
    sql("UPDATE branches SET state = %s", state)
    assert count("locks.lock_on_closed_branch") == 1
    assert integrity.heal("locks.lock_on_closed_branch") == {"force_released": 1}
    assert kinds(lock)[-1] == "FORCE_RELEASED"
    assert count("locks.lock_on_closed_branch") == 0


def test_a_lock_for_the_repair_of_an_error_is_none(holder):
    set_branch_state("main", "ERROR", "boss", "broken")
    holder.acquire()
    assert count("locks.lock_on_closed_branch") == 0


def test_an_earlier_error_excuses_no_lock_on_a_closed_branch(holder):
    set_branch_state("main", "ERROR", "boss", "broken")
    set_branch_state("main", "ACTIVE", "boss", "mended")
    holder.acquire()
    sql("UPDATE branches SET state = 'ERROR'")
    assert count("locks.lock_on_closed_branch") == 1


def test_a_branch_locked_for_write_by_nobody_is_reported_and_healed(holder, admin):
    lock = holder.acquire(kind="INDEXING")
    admin.post("/status/other/", {"state": "LOCKED_FOR_WRITE", "reason": "by hand"})
    assert count("locks.locked_without_indexing") == 1
    sql("UPDATE branch_locks SET state = 'released' WHERE id = %s", str(lock["lock_id"]))
    assert count("locks.locked_without_indexing") == 2
    assert integrity.heal("locks.locked_without_indexing") == {"activated": 2}
    assert set(Branch.objects.values_list("state", flat=True)) == {"ACTIVE"}
    assert count("locks.locked_without_indexing") == 0


def test_a_waiter_past_its_deadline_is_reported_swept_and_healed():
    held()
    for _n in range(2):
        try_acquire(request("dead"), 30)
    sql("UPDATE branch_lock_waiters SET deadline_at = now() - interval '9 seconds'")
    assert count("locks.waiter_past_deadline") == 0
    sql("UPDATE branch_lock_waiters SET deadline_at = now() - interval '11 seconds'")
    assert count("locks.waiter_past_deadline") == 2
    first = LockWaiter.objects.order_by("id").first()
    sql("UPDATE branch_lock_waiters SET deadline_at = now() WHERE id = %s", first.pk)
    assert sweeping.run("locks.expire_heartbeats")["counts"] == {"gone": 1}
    sql("UPDATE branch_lock_waiters SET deadline_at = now() - interval '11 seconds'")
    assert integrity.heal("locks.waiter_past_deadline") == {"gone": 1}


def test_a_waiter_whose_lock_is_taken_away_before_it_came_for_it_is_gone(holder, admin):
    lock = holder.acquire()
    try_acquire(request("dead"), 30)
    holder.release(lock)
    assert LockWaiter.objects.get().state == "granted"
    assert admin.post("/force-unlock/", {"branch_name": "main", "reason": "stuck"}).data == {"locks_released": 1}
    assert LockWaiter.objects.get().state == "gone"


def ready():
    with connection.cursor() as cursor:
        cursor.execute(READY, [list(LockWaiter.objects.values_list("pk", flat=True))])
        return {row[0] for row in cursor.fetchall()}


def test_who_stands_behind_another_is_not_woken_to_look():
    held(scope="RESOURCE_TYPE", resource_type="a")
    first = try_acquire(request("first"), 30).waiter.pk
    second = try_acquire(request("second", scope="RESOURCE_TYPE", resource_type="b"), 30).waiter.pk
    assert ready() == set()
    sql("UPDATE branch_lock_waiters SET seen_at = now() - interval '11 seconds' WHERE id = %s", first)
    assert ready() == {second}
    sql("UPDATE branch_lock_waiters SET deadline_at = now() - interval '1 second' WHERE id = %s", first)
    assert ready() == {first, second}


def test_who_waits_out_a_delay_is_not_woken_to_look():
    held(lock_delay=60)
    other = try_acquire(request("other"), 30).waiter.pk
    sql("UPDATE branch_locks SET expires_at = now() - interval '1 second'")
    assert ready() == {other}
    sweeping.run("locks.expire_ttls")
    assert ready() == set()
    sql("UPDATE branch_locks SET expired_at = now() - interval '61 seconds'")
    assert ready() == {other}


def test_a_sweep_leaves_healthy_locks_alone_and_a_decision_for_each_it_ends(holder):
    fresh, silent = holder.acquire("a", heartbeat_interval=60), holder.acquire("b", heartbeat_interval=60)
    off = holder.acquire("c")
    shift(silent, last_heartbeat=-181)
    for _n in range(2):
        sweeping.run("locks.expire_heartbeats")
        sweeping.run("locks.expire_ttls")
    assert [str(d.object_id) for d in Decision.objects.all()] == [str(silent["lock_id"])]
    assert holder.lock(fresh).status_code == holder.lock(off).status_code == 200


def test_a_dry_run_of_a_sweep_changes_nothing(holder):
    lock = holder.acquire()
    shift(lock, expires_at=-1)
    assert sweeping.run("locks.expire_ttls", dry_run=True)["counts"] == {"expired": 1}
    assert kinds(lock) == ["ACQUIRED"]


def test_the_time_of_a_sweep_is_the_databases(holder):
    lock = holder.acquire()
    sweeping.run("locks.expire_ttls", now=timezone.now() + timedelta(days=365))
    assert kinds(lock) == ["ACQUIRED"]


def test_the_metrics_tell_of_locks(holder, make_client):
    holder.acquire(kind="INDEXING")
    holder.ask()
    text = make_client("operator", username="op").get("/metrics").content.decode()
    for line in (
        'signalbox_locks_active{type="INDEXING"} 1.0',
        'signalbox_locks_active{type="MANUAL"} 0.0',
        'signalbox_locks_health{health="healthy"} 1.0',
        "signalbox_locks_branches_locked 1.0",
        "signalbox_locks_waiting 0.0",
        "signalbox_locks_conflicts_last_hour 1.0",
    ):
        assert line in text


def command(*arguments):
    out = StringIO()
    call_command("force_unlock", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_ends_what_a_branch_holds(holder):
    lock, other = holder.acquire("a/b"), holder.acquire("b")
    assert "would release 1 locks" in command("--branch", "a/b", "--reason", "stuck", "--dry-run")
    assert kinds(lock) == ["ACQUIRED"]
    assert f"released {lock['lock_id']} on a/b" in command("--branch", "a/b", "--reason", "stuck")
    assert "released 0 locks" in command("--branch", "a/b", "--reason", "stuck")
    event = LockEvent.objects.get(kind="FORCE_RELEASED")
    assert event.reason == "stuck"
    assert event.actor.startswith("command ")
    assert kinds(other) == ["ACQUIRED"]


def test_the_command_ends_the_locks_named(holder):
    first, second, third = (holder.acquire(name) for name in "abc")
    assert "released 2 locks" in command("--lock", str(first["lock_id"]), str(second["lock_id"]), "--reason", "x")
    assert kinds(third) == ["ACQUIRED"]
    fourth = holder.acquire("a")
    assert "released 2 locks" in command(
        "--lock", str(third["lock_id"]), "--lock", str(fourth["lock_id"]), "--reason", "x"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--reason", "x"],
        ["--branch", "a"],
        ["--branch", "a", "--lock", "01980000-0000-7000-8000-000000000000", "--reason", "x"],
        ["--lock", "x", "--reason", "x"],
        ["--branch", "a", "--reason", "  "],
    ],
)
def test_the_command_refuses_nonsense(arguments):
    with pytest.raises(CommandError):
        command(*arguments)


def test_the_history_is_kept_for_two_years(holder):
    lock = holder.acquire()
    holder.release(lock)
    out = StringIO()
    call_command("purge_retention", stdout=out)
    assert "deleted 0 branch_locks" in out.getvalue()
    from locks.retention import purge

    later = timezone.now() + timedelta(days=731)
    assert purge(later, True)["branch_lock_events"] == 2
    assert purge(later, False) == {"branch_lock_waiters": 0, "branch_lock_events": 2, "branch_locks": 1}
    assert not BranchLock.objects.exists()
    assert Branch.objects.exists()


def test_the_integrity_command_lists_them(holder):
    out = StringIO()
    call_command("integrity", "--json", stdout=out)
    assert "locks.expired_but_blocking" in {reading["name"] for reading in json.loads(out.getvalue())}
