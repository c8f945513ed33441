"""Waiting for a lock without holding a transaction or a connection: one listener per process wakes the requests."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import structlog
from django.conf import settings
from django.db import connection, transaction
from django.db.models.functions import Now

from locks.models import CLAIM_SECONDS, LONGEST_DELAY, BranchLock, LockWaiter
from locks.services.acquiring import in_the_way, refuse, try_acquire, waited_for
from locks.services.branches import take_branches
from locks.services.endings import SILENT
from locks.services.grants import LockRequest, admits
from locks.services.queue import CHANNEL, abandon, claim, in_line, serve_lines
from locks.services.refusals import LockConflict, conflict, wrong_state

log = structlog.get_logger("locks")
POLL = 0.5  # the fallback when a NOTIFY is lost, and how an expiry without a sweep is noticed
PATROL = 1.0  # how often a request looks whether its client and the listener are still there
IDLE = 5.0
TELL = 3.0  # how often a process says that its waiters live; unheard of for the claim time they lose their place
DJANGOS = {"context", "cursor_factory", "pool"}  # of the connection parameters: not for a plain connection
LOOKS = 4  # connections that all waiting requests of a process may use at a time
# A request that waits keeps its thread of the web server; the last are for whoever would release what it waits for.
SEATS = settings.WEB_THREADS - 4

# The ranges are those of branch_locks_exclusive, whose index finds the first obstacle among any number of locks.
SHARES = """
    lock_text_range(o.resource_type, o.resource_type, '[]') && lock_text_range(w.resource_type, w.resource_type, '[]')
    AND lock_text_range(o.resource_id, o.resource_id, '[]') && lock_text_range(w.resource_id, w.resource_id, '[]')
"""
HELD = f"""
    SELECT 1 FROM branch_locks AS o
     WHERE int8range(o.branch_id, o.branch_id, '[]') && int8range(w.branch_id, w.branch_id, '[]') AND {SHARES}
       AND o.state = 'active'
       AND NOT (auto_release_enabled AND (expires_at < statement_timestamp() OR {SILENT}))
"""
DELAYED = f"""
    SELECT 1 FROM branch_locks AS o
     WHERE o.branch_id = w.branch_id AND {SHARES} AND o.locked_by <> w.client
       AND o.state = 'expired' AND o.lock_delay > 0
       AND o.expired_at > statement_timestamp() - make_interval(secs => {LONGEST_DELAY})
       AND o.expired_at + make_interval(secs => o.lock_delay) > statement_timestamp()
"""
BARRED = f"""
    SELECT 1 FROM branch_lock_waiters AS o
     WHERE o.branch_id = w.branch_id AND {SHARES} AND o.id < w.id AND o.state = 'waiting'
       AND o.deadline_at >= statement_timestamp()
       AND o.seen_at >= statement_timestamp() - make_interval(secs => {CLAIM_SECONDS})
"""
# Of this process's waiters: those with an answer, and those whose way looks free. The request itself looks properly,
# which takes the branch's row and ten statements: forty who look in vain twice a second would keep a processor busy.
READY = f"""
    SELECT w.id FROM branch_lock_waiters AS w WHERE w.id = ANY(%s) AND (
        w.state <> 'waiting' OR w.deadline_at < statement_timestamp()
        OR NOT (EXISTS ({HELD}) OR EXISTS ({DELAYED}) OR EXISTS ({BARRED})))
"""


# Rows somebody grants at this moment are left alone: the one listener waits for nobody.
ALIVE = """
    UPDATE branch_lock_waiters SET seen_at = statement_timestamp() WHERE id IN (
        SELECT id FROM branch_lock_waiters WHERE id = ANY(%s) AND state = 'waiting' FOR UPDATE SKIP LOCKED)
"""


class Room:
    """Where this process's requests wait, and the one thread and connection that listen for all of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bells: dict[int, set[threading.Event]] = defaultdict(set)
        self.listener: threading.Thread | None = None
        self.heard_at = self.told_at = 0.0
        self.pid = os.getpid()
        self.looks = threading.BoundedSemaphore(LOOKS)
        self.seats = threading.BoundedSemaphore(SEATS)

    @contextmanager
    def seat(self, waiter_id: int) -> Iterator[threading.Event]:
        bell = threading.Event()
        with self.lock:
            self.bells[waiter_id].add(bell)
        self.attend()
        try:
            yield bell
        finally:
            with self.lock:
                self.bells[waiter_id].discard(bell)
                if not self.bells[waiter_id]:
                    del self.bells[waiter_id]

    def attend(self) -> bool:
        """Whether somebody listens; if not, somebody begins to."""
        with self.lock:
            if self.listener is None or not self.listener.is_alive() or self.pid != os.getpid():
                self.pid = os.getpid()
                params = connection.get_connection_params()
                place = {key: value for key, value in params.items() if key not in DJANGOS}
                self.listener = threading.Thread(target=self.listen, args=[place], daemon=True, name="lock-waiters")
                self.listener.start()
            return time.monotonic() - self.heard_at < 2 * PATROL

    def ring(self, waiter_id: int) -> None:
        with self.lock:
            for bell in self.bells.get(waiter_id, ()):
                bell.set()

    def waiting(self) -> list[int]:
        with self.lock:
            return list(self.bells)

    def listen(self, place: dict[str, Any]) -> None:
        """Ends after a while without waiters. A failure only slows: unattended requests look for themselves."""
        try:
            with psycopg.connect(**place, autocommit=True, application_name="signalbox lock waiters") as listening:
                listening.execute(f"LISTEN {CHANNEL}")
                last_used = time.monotonic()
                while time.monotonic() - last_used < IDLE:
                    self.look_around(listening)
                    self.heard_at = time.monotonic()
                    if self.waiting():
                        last_used = self.heard_at
                    for notice in listening.notifies(timeout=POLL, stop_after=1):
                        self.ring(int(notice.payload))
        except psycopg.Error:
            log.warning("lock_listener_failed", exc_info=True)

    def look_around(self, listening: psycopg.Connection[Any]) -> None:
        if ids := self.waiting():
            if time.monotonic() - self.told_at >= TELL:
                listening.execute(ALIVE, [ids])
                self.told_at = time.monotonic()
            for (found,) in listening.execute(READY, [ids]).fetchall():
                self.ring(found)


ROOM = Room()


def acquire_lock(
    request: LockRequest, wait_seconds: float = 0, hung_up: Callable[[], bool] = lambda: False
) -> tuple[BranchLock, bool]:
    """The lock, and whether it is the one of an earlier request with the same key. Raises LockConflict.

    `hung_up` tells whether the client that waits has gone; what it would have got goes to the next in line then.
    With all seats taken nobody else waits: the answer is that of a wait that is over.
    """
    seated = wait_seconds > 0 and ROOM.seats.acquire(blocking=False)
    try:
        return acquire_seated(request, wait_seconds if seated else 0, hung_up)
    finally:
        if seated:
            ROOM.seats.release()


def acquire_seated(request: LockRequest, wait_seconds: float, hung_up: Callable[[], bool]) -> tuple[BranchLock, bool]:
    outcome = try_acquire(request, wait_seconds)
    if outcome.refusal:
        raise outcome.refusal
    if outcome.waiter:
        if not wait_seconds:
            raise conflict([])
        answer = wait_for_grant(outcome.waiter.pk, request, hung_up)
        if isinstance(answer, LockConflict):
            raise answer
        return answer, False
    assert outcome.lock is not None
    return outcome.lock, outcome.replayed


def wait_for_grant(waiter_id: int, request: LockRequest, hung_up: Callable[[], bool]) -> BranchLock | LockConflict:
    with ROOM.seat(waiter_id) as bell:
        while True:
            let_go()
            rung = bell.wait(PATROL)
            bell.clear()
            # Inside somebody's transaction (a test's) the listener cannot see our row.
            attended = ROOM.attend() and not connection.in_atomic_block
            gone = hung_up()
            if attended and not rung and not gone:
                continue
            with ROOM.looks:
                try:
                    answer = look(waiter_id, request, gone)
                finally:
                    let_go()
            if answer is not None:
                return answer


def let_go() -> None:
    """The connection, so that fifty who wait do not hold fifty."""
    if not connection.in_atomic_block:
        connection.close()


@transaction.atomic
def look(waiter_id: int, request: LockRequest, gone: bool) -> BranchLock | LockConflict | None:
    """Claim the grant, or serve the line as far as it can be served, or give up when the time is over."""
    if gone:
        abandon(waiter_id)
        return conflict([])
    [branch] = take_branches([LockWaiter.objects.values_list("branch_id", flat=True).get(pk=waiter_id)])
    LockWaiter.objects.filter(pk=waiter_id, state=LockWaiter.State.WAITING).update(seen_at=Now())
    # What it wants may have become free by the mere passing of time.
    serve_lines([branch], [LockWaiter.objects.get(pk=waiter_id)])
    waiter = LockWaiter.objects.get(pk=waiter_id)
    if waiter.state == LockWaiter.State.GRANTED and (lock := claim(waiter)):
        return lock
    if LockWaiter.objects.queued().filter(pk=waiter_id).exists():
        return None
    if not admits(branch, request.lock_scope):
        return refuse(branch, request, wrong_state(branch))
    if waiter.state == LockWaiter.State.WAITING:
        LockWaiter.objects.filter(pk=waiter_id).update(state=LockWaiter.State.TIMED_OUT)
        serve_lines([branch], [waiter])
    return refuse(branch, request, conflict(in_the_way(branch, request) or waited_for(in_line(branch, request))))
