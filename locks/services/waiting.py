"""Waiting for a lock without holding a transaction or a connection: one listener per process wakes the requests."""

import os
import threading
import time
from typing import Any

import psycopg
import structlog
from django.db import connection, transaction

from locks.models import BranchLock, LockWaiter
from locks.services.branches import take_branches
from locks.services.grants import (
    CHANNEL,
    LockRequest,
    ahead,
    claim,
    grant_waiting,
    in_the_way,
    note_conflict,
    try_acquire,
)
from locks.services.refusals import LockConflict, conflict

log = structlog.get_logger("locks")
POLL = 0.5  # the fallback when a NOTIFY is lost, and how an expiry without a sweep is noticed
IDLE = 5.0

# Of this process's waiters: those with an answer, and those whose way looks free. The request itself looks properly.
READY = """
    SELECT w.id FROM branch_lock_waiters AS w WHERE w.id = ANY(%s) AND (
        w.state <> 'waiting' OR w.deadline_at < statement_timestamp() OR NOT EXISTS (
            SELECT 1 FROM branch_locks AS l
             WHERE l.branch_id = w.branch_id AND l.state = 'active'
               AND (l.resource_type IS NULL OR w.resource_type IS NULL OR l.resource_type = w.resource_type
                    AND (l.resource_id IS NULL OR w.resource_id IS NULL OR l.resource_id = w.resource_id))
               AND NOT (l.auto_release_enabled AND (l.expires_at < statement_timestamp()
                    OR l.heartbeat_interval > 0 AND l.silent_after < statement_timestamp()))))
"""


class Room:
    """Where this process's requests wait, and the one thread and connection that listen for all of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bells: dict[int, threading.Event] = {}
        self.listener: threading.Thread | None = None
        self.pid = os.getpid()

    def enter(self, waiter_id: int) -> threading.Event:
        with self.lock:
            bell = self.bells.setdefault(waiter_id, threading.Event())
            if self.listener is None or not self.listener.is_alive() or self.pid != os.getpid():
                self.pid = os.getpid()
                params = connection.get_connection_params()
                keys = ("dbname", "host", "port", "user", "password", "sslmode", "options")
                place = {key: params[key] for key in keys if params.get(key)}
                self.listener = threading.Thread(target=self.listen, args=[place], daemon=True, name="lock-waiters")
                self.listener.start()
            return bell

    def leave(self, waiter_id: int) -> None:
        with self.lock:
            self.bells.pop(waiter_id, None)

    def ring(self, waiter_id: int) -> None:
        if bell := self.bells.get(waiter_id):
            bell.set()

    def listen(self, place: dict[str, Any]) -> None:
        """Ends by itself after a while without waiters. Requests also look on their own, so a failure only slows."""
        try:
            with psycopg.connect(**place, autocommit=True, application_name="signalbox lock waiters") as listening:
                listening.execute(f"LISTEN {CHANNEL}")
                last_used = time.monotonic()
                while time.monotonic() - last_used < IDLE:
                    for notice in listening.notifies(timeout=POLL, stop_after=1):
                        self.ring(int(notice.payload))
                    if ids := list(self.bells):
                        last_used = time.monotonic()
                        for (found,) in listening.execute(READY, [ids]).fetchall():
                            self.ring(found)
        except psycopg.Error:
            log.warning("lock_listener_failed", exc_info=True)


ROOM = Room()


def acquire_lock(request: LockRequest, wait_seconds: float = 0) -> tuple[BranchLock, bool]:
    """The lock, and whether it is the one of an earlier request with the same key. Raises LockConflict."""
    outcome = try_acquire(request, wait_seconds)
    if outcome.refusal:
        raise outcome.refusal
    if outcome.waiter:
        return wait_for_grant(outcome.waiter, request), False
    assert outcome.lock is not None
    return outcome.lock, outcome.replayed


def wait_for_grant(waiter: LockWaiter, request: LockRequest) -> BranchLock:
    bell = ROOM.enter(waiter.pk)
    try:
        while True:
            if not connection.in_atomic_block:
                connection.close()
            bell.wait(timeout=2 * POLL)
            bell.clear()
            if not connection.in_atomic_block and not worth_a_look(waiter):
                continue
            answer = look(waiter.pk, request)
            if isinstance(answer, LockConflict):
                raise answer
            if answer is not None:
                return answer
    finally:
        ROOM.leave(waiter.pk)


def worth_a_look(waiter: LockWaiter) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(READY, [[waiter.pk]])
        return cursor.fetchone() is not None


@transaction.atomic
def look(waiter_id: int, request: LockRequest) -> BranchLock | LockConflict | None:
    """Claim the grant, or serve the line as far as it can be served, or give up when the time is over."""
    [branch] = take_branches([LockWaiter.objects.values_list("branch_id", flat=True).get(pk=waiter_id)])
    waiter = LockWaiter.objects.get(pk=waiter_id)
    if waiter.state == LockWaiter.State.WAITING:
        grant_waiting(branch)
        waiter = LockWaiter.objects.get(pk=waiter_id)
    if waiter.state == LockWaiter.State.GRANTED and (lock := claim(waiter)):
        return lock
    if LockWaiter.objects.queued().filter(pk=waiter_id).exists():
        return None
    if LockWaiter.objects.filter(pk=waiter_id, state=LockWaiter.State.WAITING).update(state=LockWaiter.State.TIMED_OUT):
        grant_waiting(branch)
    return note_conflict(branch, request, conflict(in_the_way(branch, request) or ahead(branch, request)))
