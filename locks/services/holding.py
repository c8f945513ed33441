"""What a holder does with its lock, and what a lock-admin does with any."""

import json
from collections.abc import Collection
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from config.errors import Forbidden, Invalid, Missing
from locks.models import Branch, BranchLock, Compiled, LockEvent, LockWaiter, Slot
from locks.services.branches import move, patiently, take_branch, take_branch_of, take_branches
from locks.services.endings import SILENT
from locks.services.queue import end_locks, expire_locks, serve_lines
from locks.services.refusals import LockGone, StaleFence

HOLDERS_TOTAL = timedelta(hours=24)
ADMINS_TOTAL = timedelta(days=30)
KEPT_HEARTBEATS = 100


HELD = Compiled(lambda: BranchLock.objects.clocked().filter(pk=Slot("id")))


def held(lock_id: Any) -> BranchLock:
    """A lock, ended or not, with its clocks read."""
    found: list[BranchLock] = HELD(id=lock_id)
    if not found:
        raise Missing("There is no such lock.")
    return found[0]


def authorize(lock: BranchLock, fence: int, actor: str, admin: bool, *, expired_too: bool = False) -> None:
    """In the order of the contract: 403, 410, 409."""
    refuse_stranger(lock, actor, admin)
    kept = expired_too and lock.state == BranchLock.State.ACTIVE and not lock.auto_release_enabled
    if lock.dead and not kept:
        raise LockGone
    if lock.fence != fence:
        raise StaleFence


def refuse_stranger(lock: BranchLock, actor: str, admin: bool) -> None:
    if lock.locked_by != actor and not admin:
        raise Forbidden("Only its holder or a lock-admin may do this.")


# The row first, the clock in the next statement: a time read before the wait would let a lock beat after its expiry.
TAKE = patiently("SELECT 1 FROM branch_locks WHERE id = %s FOR NO KEY UPDATE")
# No branch row is taken, so holders never wait for each other. What was read before the UPDATE is still so: we hold it.
BEAT = f"""
    WITH was AS (
        SELECT l.id, l.expires_at,
               CASE WHEN %(remaining)s::float8 * interval '1 hour' > l.expires_at - statement_timestamp()
                    THEN greatest(l.expires_at, least(l.expires_at + interval '2 hours',
                                                      l.locked_at + interval '24 hours'))
                    ELSE l.expires_at END AS new_expiry
          FROM branch_locks AS l
         WHERE l.id = %(id)s AND l.fence = %(fence)s AND l.state = 'active'
           AND (%(admin)s::boolean OR l.locked_by = %(actor)s)
           AND l.expires_at >= statement_timestamp() AND NOT {SILENT}
    ), beat AS (
        UPDATE branch_locks AS l
           SET last_heartbeat = statement_timestamp(), expires_at = was.new_expiry, status = %(status)s,
               heartbeat_source = coalesce(%(source)s::text, l.heartbeat_source),
               progress = coalesce(%(progress)s::float8, l.progress),
               estimated_remaining_hours = coalesce(%(remaining)s::float8, l.estimated_remaining_hours),
               estimated_at = CASE WHEN %(remaining)s::float8 IS NULL THEN l.estimated_at
                                   ELSE statement_timestamp() END
          FROM was WHERE l.id = was.id
        RETURNING l.branch_id, l.id, l.fence, l.last_heartbeat, l.heartbeat_interval, l.expires_at,
                  was.expires_at AS old_expiry
    ), extended AS (
        INSERT INTO branch_lock_events (branch_id, lock_id, kind, actor, reason, fence, details)
        SELECT branch_id, id, 'EXTENDED', %(actor)s, 'estimated to need longer', fence, jsonb_build_object(
            'automatic', true, 'from', old_expiry, 'to', expires_at) FROM beat WHERE expires_at <> old_expiry
    ), told AS (
        INSERT INTO branch_lock_events (branch_id, lock_id, kind, actor, fence, details)
        SELECT branch_id, id, 'HEARTBEAT', %(actor)s, fence, %(details)s::jsonb FROM beat
    )
    SELECT last_heartbeat, heartbeat_interval, expires_at FROM beat
"""
PRUNE = """
    DELETE FROM branch_lock_events WHERE id IN (
        SELECT id FROM branch_lock_events WHERE lock_id = %s AND kind = 'HEARTBEAT' ORDER BY id DESC OFFSET %s)
"""


@transaction.atomic
def record_heartbeat(
    lock_id: Any,
    fence: int,
    actor: str,
    *,
    admin: bool = False,
    source: str | None = None,
    status: str = "healthy",
    progress: float | None = None,
    remaining: float | None = None,
) -> dict[str, Any]:
    told = {"service_name": source, "status": status, "progress": progress, "estimated_remaining_hours": remaining}
    details = json.dumps({name: value for name, value in told.items() if value is not None})
    values = {
        "id": lock_id, "fence": fence, "actor": actor, "admin": admin, "source": source, "status": status,
        "progress": progress, "remaining": remaining, "details": details,
    }  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(TAKE, [lock_id])
        cursor.execute(BEAT, values)
        beat = cursor.fetchone()
        if beat is None:
            authorize(held(lock_id), fence, actor, admin)
            raise LockGone  # it ran out between the two statements
        cursor.execute(PRUNE, [lock_id, KEPT_HEARTBEATS])
    return {"last_heartbeat": beat[0], "next_interval": beat[1], "expires_at": beat[2]}


@transaction.atomic
def extend_lock(lock_id: Any, fence: int, hours: float, reason: str, actor: str, *, admin: bool = False) -> BranchLock:
    with connection.cursor() as cursor:
        cursor.execute(TAKE, [lock_id])
    lock = held(lock_id)
    authorize(lock, fence, actor, admin)
    limit = ADMINS_TOTAL if admin else HOLDERS_TOTAL
    # A float of hours may be beyond what a timedelta holds; it is beyond the limit by far.
    new = lock.expires_at + timedelta(hours=min(hours, 10_000))
    if new - lock.locked_at > limit:
        raise Invalid(f"At most {limit.total_seconds() / 3600:g} hours in total.", attr="extension_hours")
    details = {"from": lock.expires_at.isoformat(), "to": new.isoformat(), "extension_hours": hours}
    lock.expires_at = new
    lock.save(update_fields=["expires_at"])
    LockEvent.objects.create(
        branch_id=lock.branch_id, lock=lock, kind=LockEvent.Kind.EXTENDED, actor=actor, reason=reason,
        fence=lock.fence, details=details,
    )  # fmt: skip
    return lock


@transaction.atomic
def release_lock(lock_id: Any, fence: int, actor: str, *, admin: bool = False, reason: str = "") -> None:
    branches = take_branch_of(lock_id)
    authorize(held(lock_id), fence, actor, admin, expired_too=True)
    end_locks(branches, [lock_id], actor, reason, forced=False)


@transaction.atomic
def force_unlock(
    actor: str, reason: str, *, branch: str | None = None, lock_ids: Collection[Any] | None = None
) -> list[BranchLock]:
    """End the locks named, or all the branch holds now. What has ended already is left alone."""
    rows = BranchLock.objects.active()
    if branch is not None:
        rows = rows.filter(branch__name=branch)
    if lock_ids is not None:
        rows = rows.filter(pk__in=lock_ids)
    branches = take_branches(rows.values_list("branch_id", flat=True))
    return end_locks(branches, [lock.pk for lock in rows], actor, reason, forced=True) if branches else []


CLOSING = (Branch.State.ERROR, Branch.State.ARCHIVED)


@transaction.atomic
def set_branch_state(name: str, state: str, actor: str, reason: str) -> Branch:
    """A closed branch holds no locks, and those in line who can no longer be served are told at once."""
    branch = take_branch(name)
    move(branch, state, actor, reason)
    if branch.state in CLOSING:
        ids = list(BranchLock.objects.active().on(branch.pk).values_list("pk", flat=True))
        end_locks([branch], ids, actor, reason, forced=True)
    return branch


@transaction.atomic
def reactivate_unindexed(ids: Collection[int], actor: str, reason: str) -> int:
    branches = take_branches(ids)
    still = set(Branch.objects.unindexed().filter(pk__in=ids).values_list("pk", flat=True))
    for branch in branches:
        if branch.pk in still:
            move(branch, Branch.State.ACTIVE, actor, reason)
    return len(still)


@transaction.atomic
def reap(ids: Collection[Any], run_id: UUID | None = None) -> dict[str, int]:
    """One page of a sweep. A busy branch or lock is left for whoever holds it or for the next tick: waiting for one
    lock here, with the branch's row taken, would make everybody on the branch wait."""
    rows = BranchLock.objects.filter(pk__in=ids)
    branches = take_branches(rows.values_list("branch_id", flat=True), skip_busy=True)
    idle = rows.filter(branch__in=branches).select_for_update(skip_locked=True, no_key=True)
    taken = list(idle.values_list("pk", flat=True))
    ended = expire_locks(branches, taken, how="sweep", run_id=run_id) if taken else []
    return {"expired": len(ended)} if ended else {}


POSTPONE = f"""
    UPDATE branch_locks SET silent_after = NULL WHERE id IN (
        SELECT id FROM branch_locks WHERE id = ANY(%s) AND state = 'active' AND NOT {SILENT}
           FOR NO KEY UPDATE SKIP LOCKED)
"""


def postpone_silence(ids: Collection[Any]) -> None:
    """Those that were heard of since: the trigger puts the bound where it belongs now."""
    with connection.cursor() as cursor:
        cursor.execute(POSTPONE, [list(ids)])


@transaction.atomic
def drop_overdue_waiters(ids: Collection[int]) -> int:
    """Waiters whose process died; the line behind them moves up."""
    overdue = LockWaiter.objects.overdue().filter(pk__in=ids)
    branches = take_branches(overdue.values_list("branch_id", flat=True), skip_busy=True)
    dropped = list(overdue.filter(branch__in=branches))
    LockWaiter.objects.filter(pk__in=[waiter.pk for waiter in dropped]).update(state=LockWaiter.State.GONE)
    serve_lines(branches, dropped)
    return len(dropped)
