"""Locks beside the same statements as bare SQL over the same connection, and what many active locks cost."""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from django.db import connection

from config import sweeping
from locks.models import Branch, BranchLock, LockWaiter
from locks.services import LockRequest, acquire_lock, record_heartbeat, release_lock
from locks.services.waiting import ROOM

SECONDS = 3.0
MANY = 10_000
WAKES = 30


def _say(text: str) -> None:
    print(text)  # noqa: T201


def _rate(work: Callable[[], None], seconds: float = SECONDS) -> float:
    for _warm in range(20):
        work()
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        work()
        count += 1
    return count / passed


def _request(**terms: Any) -> LockRequest:
    return LockRequest("bench", "BACKUP", "BRANCH", "bench", "benchmark", **terms)


def _statements(work: Callable[[], Any]) -> list[tuple[str, Any]]:
    """What the service sends, with its parameters, as psycopg gets it."""
    seen: list[tuple[str, Any]] = []

    def listen(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(listen):
        work()
    return seen


def _replay(statements: list[tuple[str, Any]], cuts: list[int]) -> None:
    """The captured statements on the bare driver, in transactions as the services have them."""
    driver = connection.connection
    start = 0
    for end in cuts:
        with driver.transaction(), driver.cursor() as cursor:
            for sql, params in statements[start:end]:
                cursor.execute(sql, params)
                if cursor.description:
                    cursor.fetchall()
        start = end


def _acquire_and_release() -> None:
    lock, _replayed = acquire_lock(_request())
    release_lock(lock.pk, lock.fence, "bench")


def _bare_acquire_and_release() -> Callable[[], None]:
    """The ids and fences of a replay must be new ones: the insert's id is found and replaced."""
    from uuid_utils.compat import uuid7

    taken: dict[str, Any] = {}
    acquiring = _statements(lambda: taken.update(lock=acquire_lock(_request())[0]))
    lock = taken["lock"]
    releasing = _statements(lambda: release_lock(lock.pk, lock.fence, "bench"))

    def swap(params: Any, new: Any) -> Any:
        if isinstance(params, dict):
            return {name: swap(value, new) for name, value in params.items()}
        if isinstance(params, list | tuple):
            return type(params)(swap(value, new) for value in params)
        return new if params == lock.pk else params

    def work() -> None:
        new = uuid7()
        both = [(sql, swap(params, new)) for sql, params in acquiring + releasing]
        _replay(both, [len(acquiring), len(both)])

    return work


def _beats(locks: list[BranchLock], seconds: float) -> list[float]:
    times, n, ends = [], 0, time.perf_counter() + seconds
    while (started := time.perf_counter()) < ends:
        lock = locks[n % len(locks)]
        record_heartbeat(lock.pk, lock.fence, "bench", source="bench", progress=50.0)
        times.append(time.perf_counter() - started)
        n += 1
    return sorted(times)


def _fill(count: int) -> list[BranchLock]:
    branch, _made = Branch.objects.get_or_create(name="many")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO branch_locks (branch_id, lock_type, lock_scope, resource_type, resource_id, locked_by, reason,"
            " expires_at, heartbeat_interval) SELECT %s, 'BACKUP', 'RESOURCE', 't', n::text, 'bench', 'many',"
            " now() + interval '4 hours', 120 FROM generate_series(1, %s) AS n",
            [branch.pk, count],
        )
        cursor.execute("ANALYZE branch_locks")
    return list(BranchLock.objects.filter(branch=branch).active())


def _empty() -> None:
    BranchLock.objects.active().update(state="force_released", released_at="2026-01-01T00:00Z", released_by="bench")


def _verdict(good: bool) -> str:
    return "ok" if good else "MISSED"


def _compare(name: str, ours: float, floor: float) -> None:
    share = ours / floor
    _say(f"  {name:26} {floor:8,.0f}/s bare {ours:8,.0f}/s ours   {share:.2f} (≥ 0.40) {_verdict(share >= 0.4)}")


def _heartbeat_rates() -> None:
    lock, _replayed = acquire_lock(_request(heartbeat_interval=120))

    def beat() -> None:
        record_heartbeat(lock.pk, lock.fence, "bench", source="bench", progress=50.0)

    statements = _statements(beat)
    _compare("heartbeat", _rate(beat), _rate(lambda: _replay(statements, [len(statements)])))
    release_lock(lock.pk, lock.fence, "bench")


def _many_locks() -> None:
    few = _beats(_fill(10), SECONDS)
    _empty()
    many = _beats(_fill(MANY), SECONDS)
    p99 = [times[int(len(times) * 0.99)] * 1000 for times in (few, many)]
    ratio = p99[1] / p99[0]
    _say(
        f"  heartbeat p99              {p99[0]:8.2f} ms at 10 {p99[1]:8.2f} ms at {MANY:,}   {ratio:.2f} (≤ 3)"
        f" {_verdict(ratio <= 3)}"
    )
    idle = _sweep_seconds()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE branch_locks SET expires_at = now() - interval '1 second' WHERE id IN"
            " (SELECT id FROM branch_locks WHERE state = 'active' LIMIT 500)"
        )
    busy = _sweep_seconds()
    _say(f"  sweeps over {MANY:,} active    {idle * 1000:8.1f} ms none expired {busy * 1000:8.1f} ms 500 expired")
    _empty()


def _sweep_seconds() -> float:
    started = time.perf_counter()
    for name in ("locks.expire_ttls", "locks.expire_heartbeats"):
        sweeping.run(name)
    return time.perf_counter() - started


def _wakes() -> None:
    """From the start of the release to the waiter holding its lock."""
    times = []
    for _n in range(WAKES):
        held, _replayed = acquire_lock(_request())
        granted: list[Any] = []

        def wait(granted: list[Any] = granted) -> None:
            granted.append(acquire_lock(_request(), 20)[0])
            granted.append(time.perf_counter())
            connection.close()

        thread = threading.Thread(target=wait)
        thread.start()
        while not LockWaiter.objects.filter(state="waiting").exists():
            time.sleep(0.005)
        time.sleep(0.05)
        started = time.perf_counter()
        release_lock(held.pk, held.fence, "bench")
        thread.join()
        times.append((granted[1] - started) * 1000)
        release_lock(granted[0].pk, granted[0].fence, "bench")
    median = statistics.median(times)
    _say(
        f"  waiter woken               {median:8.1f} ms median {max(times):8.1f} ms worst   (≤ 200)"
        f" {_verdict(median <= 200)}"
    )


def run() -> None:
    _say("locks: services beside the same statements on the bare driver")
    _acquire_and_release()
    _compare("acquire + release", _rate(_acquire_and_release), _rate(_bare_acquire_and_release()))
    _heartbeat_rates()
    _many_locks()
    _wakes()
    if ROOM.listener:
        ROOM.listener.join()  # it leaves a while after the last waiter; the database is dropped next
