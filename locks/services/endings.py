"""Ending locks: one statement changes the rows and writes their events."""

import json
from collections.abc import Collection
from typing import Any
from uuid import UUID

from config import decisions
from config.models import Decision
from locks.models import Branch, BranchLock, LockType, LockWaiter
from locks.services.branches import move

SYSTEM = "system"
SILENT_AT = "coalesce(last_heartbeat, locked_at) + make_interval(secs => 3 * heartbeat_interval)"
SILENT = f"(heartbeat_interval > 0 AND {SILENT_AT} < statement_timestamp())"
END = """
    WITH ended AS (
        UPDATE branch_locks SET state = %s, released_at = statement_timestamp(), released_by = %s, expired_at = {at}
         WHERE id = ANY(%s) AND branch_id = ANY(%s) AND state = 'active' AND {still}
        RETURNING *
    ), event AS (
        INSERT INTO branch_lock_events (branch_id, lock_id, kind, actor, reason, fence, details)
        SELECT branch_id, id, {kind}, %s, %s, fence, %s::jsonb || jsonb_build_object(
            'expires_at', expires_at, 'last_heartbeat', last_heartbeat) FROM ended ORDER BY fence
    )
    SELECT * FROM ended
"""
# Looked at again in the UPDATE: a heartbeat takes no branch row and may have come in between.
EXPIRE = END.format(
    at=f"CASE WHEN {SILENT} THEN least(expires_at, {SILENT_AT}) ELSE expires_at END",
    still=f"auto_release_enabled AND (expires_at < statement_timestamp() OR {SILENT})",
    kind="CASE WHEN expires_at < statement_timestamp() THEN 'EXPIRED_TTL' ELSE 'EXPIRED_HEARTBEAT' END",
)
RELEASE = END.format(at="NULL", still="true", kind="'RELEASED'")
FORCE = END.format(at="NULL", still="true", kind="'FORCE_RELEASED'")


def expire_rows(
    branches: Collection[Branch], ids: Collection[Any], how: str, run_id: UUID | None = None
) -> list[BranchLock]:
    """Write down the expiry of those that are expired indeed. The caller holds the branches' rows."""
    said = json.dumps({"by": how})
    ended = _end(EXPIRE, BranchLock.State.EXPIRED, branches, ids, SYSTEM, "", said)
    if ended:
        dismiss_granted(ended)
        decisions.record(_decision(lock, how, run_id) for lock in ended)
    reactivate(branches, ended, SYSTEM, "the indexing lock expired")
    return ended


def dismiss_granted(ended: list[BranchLock]) -> None:
    """Whoever had not picked up its lock yet comes too late."""
    LockWaiter.objects.granted().filter(lock__in=[lock.pk for lock in ended]).update(state=LockWaiter.State.GONE)


def _decision(lock: BranchLock, how: str, run_id: UUID | None) -> Decision:
    return decisions.decide(
        "expire_lock",
        lock,
        before={"state": BranchLock.State.ACTIVE},
        after={"state": BranchLock.State.EXPIRED},
        inputs={
            "by": how,
            "expires_at": lock.expires_at.isoformat(),
            "last_heartbeat": lock.last_heartbeat.isoformat() if lock.last_heartbeat else None,
            "heartbeat_interval": lock.heartbeat_interval,
        },
        run_id=run_id,
    )


def end_rows(
    branches: Collection[Branch], ids: Collection[Any], actor: str, reason: str, *, forced: bool
) -> list[BranchLock]:
    """Release, or take away, those still held; what has ended already is left alone."""
    state, sql = (BranchLock.State.FORCE_RELEASED, FORCE) if forced else (BranchLock.State.RELEASED, RELEASE)
    ended = _end(sql, state, branches, ids, actor, reason, "{}")
    if forced and ended:
        dismiss_granted(ended)
    return ended


def _end(
    sql: str, state: str, branches: Collection[Branch], ids: Collection[Any], actor: str, reason: str, said: str
) -> list[BranchLock]:
    keys = [branch.pk for branch in branches]
    return list(BranchLock.objects.raw(sql, [state, actor, list(ids), keys, actor, reason, said]))


def reactivate(branches: Collection[Branch], ended: list[BranchLock], actor: str, reason: str) -> None:
    """A full indexing that ended otherwise than by `complete` leaves an ACTIVE branch, not a READY one."""
    full = {lock.branch_id for lock in ended if lock.lock_type == LockType.INDEXING and lock.resource_type is None}
    for branch in branches:
        if branch.pk in full and branch.state == Branch.State.LOCKED_FOR_WRITE:
            move(branch, Branch.State.ACTIVE, actor, reason)
