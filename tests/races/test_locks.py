"""What only two at once can break: grants, endings, gated writes, the line of waiters, stopped holders."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction

from config import sweeping
from config.errors import Unavailable
from locks.models import Branch, BranchLock, LockEvent, LockWaiter
from locks.services import (
    LockConflict,
    Locked,
    LockGone,
    LockRequest,
    acquire_lock,
    check_write,
    force_unlock,
    record_heartbeat,
    release_lock,
    set_branch_state,
    start_indexing,
)
from locks.services.acquiring import try_acquire
from locks.services.branches import patiently
from locks.services.waiting import ROOM

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE = 30


def request(client="holder", branch="main", scope="BRANCH", **terms):
    return LockRequest(branch, terms.pop("kind", "MAINTENANCE"), scope, client, "night work", **terms)


def acquire(*args, wait=0, **terms):
    return acquire_lock(request(*args, **terms), wait)[0]


def sql(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall() if cursor.description else None


def until(condition):
    """Poll other transactions without a sleep that hides a race: the deadline only bounds a failure."""
    pause = threading.Event()
    for _try in range(PATIENCE * 100):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def somebody_waits_for_a_row():
    sql("SELECT pg_stat_clear_snapshot()")  # within a transaction the view would not change
    [[count]] = sql(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return count


def in_line(count=1):
    return lambda: LockWaiter.objects.filter(state="waiting").count() >= count


@pytest.fixture(autouse=True, scope="module")
def _let_the_listener_leave():
    """Its connection would keep the test database from being dropped."""
    yield
    if ROOM.listener:
        ROOM.listener.join()


@pytest.fixture
def beside():
    """Start a function in a thread with a connection of its own; `.result()` waits for it."""
    with ThreadPoolExecutor(64) as pool:

        def start(function, *args, **kwargs):
            def run():
                try:
                    return function(*args, **kwargs)
                finally:
                    connection.close()

            return pool.submit(run)

        yield start


def test_of_twenty_parallel_acquires_one_is_granted(at_once):
    answers = at_once(*[lambda n=n: acquire(f"client-{n}") for n in range(20)])
    assert sum(isinstance(answer, BranchLock) for answer in answers) == 1
    assert sum(isinstance(answer, LockConflict) for answer in answers) == 19
    assert BranchLock.objects.count() == 1
    assert LockEvent.objects.filter(kind="CONFLICT").count() == 19


def test_of_twenty_parallel_bare_inserts_one_succeeds(at_once):
    branch = Branch.objects.create(name="main").pk

    def insert():
        sql(
            "INSERT INTO branch_locks (branch_id, lock_type, lock_scope, locked_by, reason, expires_at)"
            " VALUES (%s, 'BACKUP', 'BRANCH', 'x', 'x', now() + interval '1 hour')",
            branch,
        )

    answers = at_once(*[insert] * 20)
    assert answers.count(None) == 1
    assert sum(isinstance(answer, IntegrityError) for answer in answers) == 19


def test_the_same_key_twenty_times_at_once_is_one_lock(at_once):
    answers = at_once(*[lambda: acquire(key="k", fingerprint="same")] * 20)
    assert len({lock.pk for lock in answers}) == 1


def test_eight_sweepers_end_each_of_500_expired_locks_once(at_once):
    for n in range(10):
        Branch.objects.create(name=f"b{n}")
    sql(
        "INSERT INTO branch_locks (branch_id, lock_type, lock_scope, resource_type, resource_id, locked_by, reason,"
        " expires_at) SELECT b.id, 'BACKUP', 'RESOURCE', 't', n::text, 'x', 'x', now() - interval '1 minute'"
        " FROM branches AS b, generate_series(1, 50) AS n"
    )
    runs = at_once(*[lambda: sweeping.run("locks.expire_ttls")] * 8)
    assert all(run is None or run["error"] is None for run in runs), runs
    assert sum(run["counts"].get("expired", 0) for run in runs if run) == 500
    assert sql("SELECT count(*), count(DISTINCT lock_id) FROM branch_lock_events") == [(500, 500)]
    assert not BranchLock.objects.active().exists()


@pytest.mark.parametrize("name", ["locks.expire_ttls", "locks.expire_heartbeats"])
def test_a_sweep_passes_over_a_lock_that_somebody_holds(beside, name):
    silent = {"heartbeat_interval": 60} if name.endswith("heartbeats") else {}
    held, other = (acquire(scope="RESOURCE_TYPE", resource_type=kind, **silent) for kind in "ab")
    column = "last_heartbeat" if silent else "expires_at"
    sql(f"UPDATE branch_locks SET {column} = {column} - interval '1 day'")
    with transaction.atomic():
        BranchLock.objects.select_for_update().get(pk=held.pk)
        run = beside(sweeping.run, name).result(PATIENCE)
    assert (run["counts"], run["error"]) == ({"expired": 1}, None)
    assert BranchLock.objects.active().get() == held
    assert sweeping.run(name)["counts"] == {"expired": 1}
    assert other.events.filter(kind__startswith="EXPIRED").count() == 1


def test_two_starts_in_opposite_order_do_not_deadlock(at_once):
    types = [f"type-{n}" for n in range(20)]
    for _round in range(5):
        force_unlock("admin", "next round", branch="main")
        one, other = at_once(
            lambda: start_indexing("main", "one", resource_types=types),
            lambda: start_indexing("main", "other", resource_types=types[::-1]),
        )
        assert {type(one), type(other)} == {dict, LockConflict}


def test_an_acquire_waits_for_a_gated_write_in_flight(beside):
    written, go_on = threading.Event(), threading.Event()

    def write():
        with transaction.atomic():
            check_write("main", "template", "7", actor="writer")
            written.set()
            assert go_on.wait(PATIENCE)
            return sql("SELECT clock_timestamp()")[0][0]

    writer = beside(write)
    assert written.wait(PATIENCE)
    asking = beside(acquire)
    until(somebody_waits_for_a_row)
    assert not BranchLock.objects.exists()
    go_on.set()
    assert writer.result(PATIENCE) < asking.result(PATIENCE).locked_at


def test_a_gated_write_sees_the_lock_that_was_being_granted(beside):
    granted, go_on = threading.Event(), threading.Event()

    def grant():
        with transaction.atomic():
            acquire()
            granted.set()
            assert go_on.wait(PATIENCE)

    def write():
        with transaction.atomic():
            check_write("main", "template", "7", actor="writer")

    granting = beside(grant)
    assert granted.wait(PATIENCE)
    writing = beside(write)
    until(somebody_waits_for_a_row)
    go_on.set()
    granting.result(PATIENCE)
    with pytest.raises(Locked):
        writing.result(PATIENCE)


def test_two_writers_do_not_wait_for_each_other(beside):
    Branch.objects.create(name="main")
    with transaction.atomic():
        check_write("main", "template", "7")

        def write():
            with transaction.atomic():
                check_write("main", "template", "7")

        beside(write).result(PATIENCE)


def test_a_row_not_had_within_five_seconds_is_a_503(beside):
    Branch.objects.create(name="main")
    with transaction.atomic():
        Branch.objects.select_for_update().get()

        def write():
            with transaction.atomic():
                check_write("main", None, None)

        with pytest.raises(Unavailable):
            beside(write).result(PATIENCE)


def test_a_wait_is_bounded_as_a_whole_and_not_at_each_turn():
    """Behind another who waits there are two waits, each with a lock_timeout of its own."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(patiently("SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"))
        cursor.nextset()
        assert cursor.fetchall() == [("5s", "5s")]


def test_the_bound_of_a_wait_ends_with_it():
    with transaction.atomic():
        sql("SET LOCAL statement_timeout = '50s'")
        check_write("main", None, None)
        assert sql("SHOW statement_timeout") == [("50s",)]


@pytest.mark.parametrize("table", ["branches", "branch_locks"])
def test_a_locked_table_is_no_longer_waited_for_than_a_row(beside, table):
    Branch.objects.create(name="main")
    with transaction.atomic():
        sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")

        def write():
            with transaction.atomic():
                check_write("main", None, None)

        with pytest.raises(Unavailable):
            beside(write).result(PATIENCE)


def test_the_command_says_when_a_branch_is_busy(beside):
    acquire()
    with transaction.atomic():
        Branch.objects.select_for_update().get()
        with pytest.raises(CommandError, match="nothing was released, try again"):
            beside(call_command, "force_unlock", branch="main", reason="stuck", stdout=StringIO()).result(PATIENCE)
    assert BranchLock.objects.active().count() == 1


def test_a_heartbeat_that_waited_past_the_expiry_is_refused(beside):
    lock = acquire(ttl_seconds=60)
    with transaction.atomic():
        BranchLock.objects.select_for_update().get()
        beating = beside(record_heartbeat, lock.pk, lock.fence, "holder")
        until(somebody_waits_for_a_row)
        sql("UPDATE branch_locks SET expires_at = clock_timestamp()")
    with pytest.raises(LockGone):
        beating.result(PATIENCE)


def test_a_release_and_an_expiry_at_the_same_instant_are_one_ending(at_once):
    for _round in range(15):
        lock = acquire()
        sql("UPDATE branch_locks SET expires_at = clock_timestamp() + interval '3 ms' WHERE state = 'active'")
        at_once(
            lambda lock=lock: release_lock(lock.pk, lock.fence, "holder"),
            lambda: sweeping.run("locks.expire_ttls"),
            lambda lock=lock: force_unlock("admin", "now", lock_ids=[lock.pk]),
        )
        force_unlock("admin", "next round", branch="main")
        assert lock.events.exclude(kind="ACQUIRED").count() == 1


# --- waiters ---------------------------------------------------------------------------------------------------------


def test_waiters_are_served_in_order_and_none_overtakes(beside):
    first = acquire("first", scope="RESOURCE_TYPE", resource_type="a")
    branch = beside(acquire, "branch", wait=PATIENCE)
    until(in_line(1))
    same = beside(acquire, "same", scope="RESOURCE", resource_type="a", resource_id="1", wait=PATIENCE)
    until(in_line(2))
    with pytest.raises(LockConflict):
        acquire("quick", scope="RESOURCE_TYPE", resource_type="b")
    release_lock(first.pk, first.fence, "first")
    second = branch.result(PATIENCE)
    assert not same.done()
    release_lock(second.pk, second.fence, "branch")
    third = same.result(PATIENCE)
    assert first.fence < second.fence < third.fence
    assert list(LockWaiter.objects.order_by("id").values_list("state", flat=True)) == ["granted", "granted"]
    assert LockEvent.objects.filter(kind="GRANTED").count() == 2


def test_a_waiter_behind_a_barred_waiter_does_not_overtake_it(beside):
    """c conflicts with b only, b with a: c stays behind b though nobody holds what c wants."""
    held = acquire("held", scope="RESOURCE_TYPE", resource_type="a")
    other = acquire("other", scope="RESOURCE_TYPE", resource_type="z")
    a = beside(acquire, "a", scope="RESOURCE_TYPE", resource_type="a", wait=PATIENCE)
    until(in_line(1))
    b = beside(acquire, "b", wait=PATIENCE)
    until(in_line(2))
    c = beside(acquire, "c", scope="RESOURCE_TYPE", resource_type="c", wait=PATIENCE)
    until(in_line(3))
    release_lock(other.pk, other.fence, "other")
    assert not b.done() and not c.done()
    release_lock(held.pk, held.fence, "held")
    release_lock(*[(lock := a.result(PATIENCE)).pk, lock.fence, "a"])
    release_lock(*[(lock := b.result(PATIENCE)).pk, lock.fence, "b"])
    assert c.result(PATIENCE).fence == lock.fence + 1


def test_those_who_do_not_conflict_are_granted_together(beside):
    held = acquire()
    waiting = []
    for n in range(3):
        waiting.append(beside(acquire, f"w{n}", scope="RESOURCE_TYPE", resource_type=f"t{n}", wait=PATIENCE))
        until(in_line(n + 1))
    release_lock(held.pk, held.fence, "holder")
    assert len({waiter.result(PATIENCE).pk for waiter in waiting}) == 3


def test_a_waiter_gets_an_expired_lock_without_a_sweep(beside):
    held = acquire()
    waiting = beside(acquire, "waiter", wait=PATIENCE)
    until(in_line())
    sql("UPDATE branch_locks SET expires_at = clock_timestamp()")
    assert waiting.result(PATIENCE).fence == held.fence + 1
    assert held.events.order_by("id").last().kind == "EXPIRED_TTL"


def test_a_waiters_lock_has_the_terms_it_asked_for(beside):
    held = acquire()
    waiting = beside(acquire, "waiter", kind="INDEXING", ttl_seconds=500, lock_delay=5, wait=PATIENCE)
    until(in_line())
    release_lock(held.pk, held.fence, "holder")
    lock = waiting.result(PATIENCE)
    assert (lock.expires_at - lock.locked_at).total_seconds() == 500
    assert (lock.heartbeat_interval, lock.lock_delay, lock.branch.state) == (120, 5, "LOCKED_FOR_WRITE")
    assert lock.last_heartbeat == lock.locked_at


def test_a_dead_waiter_is_skipped_after_its_claim_time(beside):
    held = acquire()
    dead = try_acquire(request("dead"), PATIENCE).waiter  # in line, but nobody will pick its lock up
    waiting = beside(acquire, "alive", wait=PATIENCE)
    until(in_line(2))
    release_lock(held.pk, held.fence, "holder")
    unclaimed = BranchLock.objects.active().get()
    assert (unclaimed.expires_at - unclaimed.locked_at).total_seconds() == 10
    sql("UPDATE branch_locks SET expires_at = clock_timestamp() WHERE state = 'active'")
    assert waiting.result(PATIENCE).locked_by == "alive"
    assert LockWaiter.objects.get(pk=dead.pk).state == "gone"


def test_a_waiter_whose_process_died_loses_its_place_after_the_claim_time(beside):
    held = acquire(scope="RESOURCE_TYPE", resource_type="a")
    try_acquire(request("dead"), PATIENCE)
    sql("UPDATE branch_lock_waiters SET seen_at = clock_timestamp() - interval '9 seconds'")
    with pytest.raises(LockConflict):
        acquire("quick", scope="RESOURCE_TYPE", resource_type="b")
    sql("UPDATE branch_lock_waiters SET seen_at = clock_timestamp() - interval '11 seconds'")
    assert acquire("quick", scope="RESOURCE_TYPE", resource_type="b").locked_by == "quick"
    waiting = beside(acquire, "alive", scope="RESOURCE_TYPE", resource_type="a", wait=PATIENCE)
    until(in_line(2))
    release_lock(held.pk, held.fence, "holder")
    assert waiting.result(PATIENCE).locked_by == "alive"


def test_a_process_says_that_its_waiters_live(beside):
    held = acquire()
    waiting = beside(acquire, "waiter", wait=PATIENCE)
    until(in_line())
    sql("UPDATE branch_lock_waiters SET seen_at = created_at - interval '1 hour'")
    until(lambda: LockWaiter.objects.queued().exists())
    release_lock(held.pk, held.fence, "holder")
    assert waiting.result(PATIENCE).locked_by == "waiter"


def test_a_client_that_hung_up_leaves_the_line(beside):
    held = acquire()
    gone = threading.Event()
    leaving = beside(acquire_lock, request("leaving"), PATIENCE, gone.is_set)
    until(in_line(1))
    staying = beside(acquire, "staying", wait=PATIENCE)
    until(in_line(2))
    gone.set()
    with pytest.raises(LockConflict):
        leaving.result(PATIENCE)
    release_lock(held.pk, held.fence, "holder")
    assert staying.result(PATIENCE).locked_by == "staying"


def test_a_waiter_is_told_at_once_when_its_branch_is_closed(beside):
    acquire()
    waiting = beside(acquire, "waiter", scope="RESOURCE_TYPE", resource_type="a", wait=PATIENCE)
    until(in_line())
    set_branch_state("main", "ARCHIVED", "admin", "merged")
    with pytest.raises(LockConflict) as refusal:
        waiting.result(PATIENCE)
    assert refusal.value.code == "branch_state"


def test_a_waiter_waits_out_the_lock_delay(beside):
    acquire(lock_delay=60)
    waiting = beside(acquire, "waiter", wait=PATIENCE)
    until(in_line())
    sql("UPDATE branch_locks SET expires_at = clock_timestamp()")
    until(lambda: BranchLock.objects.filter(state="expired").exists())
    assert not waiting.done()
    sql("UPDATE branch_locks SET expired_at = expired_at - interval '1 minute'")
    assert waiting.result(PATIENCE).locked_by == "waiter"


def test_fifty_waiters_do_not_hold_fifty_connections(beside):
    held = acquire()
    # On a busy machine the fiftieth stands in line only when the first has waited for long.
    waiting = [beside(acquire, f"w{n}", wait=10 * PATIENCE) for n in range(50)]
    until(in_line(50))
    until(lambda: len(ROOM.waiting()) == 50)

    def connections():
        return sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")[0][0]

    until(lambda: connections() <= 8)
    force_unlock("admin", "enough", branch="main")
    assert held.events.filter(kind="FORCE_RELEASED").exists()
    served = 0
    while served < 50:
        until(lambda served=served: sum(waiter.done() for waiter in waiting) > served)
        assert connections() <= 8 + 2
        served = sum(waiter.done() for waiter in waiting)
        force_unlock("admin", "next", branch="main")
    order = list(BranchLock.objects.order_by("fence").values_list("locked_by", flat=True))[1:]
    assert order == list(LockWaiter.objects.order_by("id").values_list("client", flat=True))


def test_without_a_seat_nobody_waits(monkeypatch):
    """The last threads of a web server are for whoever would release the lock."""
    acquire()
    monkeypatch.setattr(ROOM, "seats", threading.BoundedSemaphore(1))
    with ROOM.seats, pytest.raises(LockConflict):
        acquire("late", wait=PATIENCE)
    assert not LockWaiter.objects.exists()
    assert ROOM.seats.acquire(blocking=False)


def test_the_same_key_joins_the_one_already_waiting(beside):
    held = acquire()
    twins = [beside(acquire, "twin", key="k", fingerprint="f", wait=PATIENCE) for _n in range(2)]
    until(lambda: len(ROOM.bells) == 1 and sum(map(len, ROOM.bells.values())) == 2)
    assert LockWaiter.objects.count() == 1
    release_lock(held.pk, held.fence, "holder")
    assert len({twin.result(PATIENCE).pk for twin in twins}) == 1


# --- a stopped holder ------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from locks.client import LockClient, LockError, LockLost
client = LockClient(sys.argv[1], sys.argv[2])
lock = client.acquire("main", lock_type="MIGRATION", reason="long work", enable_heartbeat=True)
print(lock.id, flush=True)
sys.stdin.readline()
for act in (lock.heartbeat, lambda: lock.extend(1), lock.release):
    try:
        act()
        print("done", flush=True)
    except LockLost as lost:
        print(lost.status, flush=True)
asked = {"branch_name": "main", "lock_id": lock.id, "fence": lock.fence}
print(client.call("POST", "/check/", asked)["reason"], flush=True)
"""


def test_a_stopped_holder_can_do_nothing_after_its_expiry(live_server, make_client):
    token = make_client("lock-holder", username="stopped")._credentials["HTTP_AUTHORIZATION"].split()[1]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, live_server.url, token],
        cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        lock_id = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGSTOP)
        sql("UPDATE branch_locks SET last_heartbeat = last_heartbeat - interval '1 hour' WHERE id = %s", lock_id)
        successor = acquire("successor")
        os.kill(process.pid, signal.SIGCONT)
        said = process.communicate("go on\n", timeout=PATIENCE)[0].split()
    finally:
        process.kill()
        process.wait()
    assert said == ["410", "410", "410", "stale_fence"]
    now = BranchLock.objects.get(pk=successor.pk)
    assert (now.state, now.expires_at, now.last_heartbeat) == ("active", successor.expires_at, None)
    assert list(BranchLock.objects.get(pk=lock_id).events.order_by("id").values_list("kind", flat=True)) == [
        "ACQUIRED",
        "EXPIRED_HEARTBEAT",
    ]
