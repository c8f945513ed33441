"""Granting a lock: what is asked, what stands in its way, and the one statement that gives it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Q
from uuid_utils.compat import uuid7

from locks.models import CLAIM_SECONDS, Branch, BranchLock, Compiled, LockQuerySet, LockType, Scope, Slot
from locks.services.branches import mark_indexing, move
from locks.services.refusals import MOST_TOLD

HOUR = 3600
DEFAULT_TTL = {
    LockType.INDEXING: 4 * HOUR,
    LockType.MIGRATION: 6 * HOUR,
    LockType.BACKUP: 2 * HOUR,
    LockType.MAINTENANCE: HOUR,
    LockType.MANUAL: 24 * HOUR,
}
DEFAULT_HEARTBEAT = 120


@dataclass(frozen=True)
class LockRequest:
    branch: str
    lock_type: str
    lock_scope: str
    client: str
    reason: str
    resource_type: str | None = None
    resource_id: str | None = None
    ttl_seconds: float | None = None
    heartbeat_interval: int | None = None
    auto_release_enabled: bool = True
    lock_delay: float = 0
    source: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    fingerprint: str | None = None

    @property
    def scope(self) -> tuple[str, str | None, str | None]:
        return self.lock_scope, self.resource_type, self.resource_id

    @property
    def ttl(self) -> float:
        return DEFAULT_TTL[LockType(self.lock_type)] if self.ttl_seconds is None else self.ttl_seconds

    @property
    def interval(self) -> int:
        if self.heartbeat_interval is not None:
            return self.heartbeat_interval
        return DEFAULT_HEARTBEAT if self.lock_type == LockType.INDEXING else 0

    @property
    def full_indexing(self) -> bool:
        return self.lock_type == LockType.INDEXING and self.lock_scope == Scope.BRANCH


def admits(branch: Branch, scope: str) -> bool:
    if branch.state == Branch.State.ERROR:
        return scope == Scope.BRANCH
    return branch.state != Branch.State.ARCHIVED


def share(one: Any, other: Any) -> bool:
    """The same rule as `overlapping`, between two at hand."""
    if one.resource_type is None or other.resource_type is None:
        return True
    same_id = one.resource_id is None or other.resource_id is None or one.resource_id == other.resource_id
    return one.resource_type == other.resource_type and bool(same_id)


def _obstacles_of(scope: str) -> tuple[Compiled, Compiled]:
    asked = (scope, Slot("resource_type"), Slot("resource_id"))
    locks = BranchLock.objects
    return (
        Compiled(lambda: locks.active().on(Slot("branch")).sharing(*asked).clocked().foremost(MOST_TOLD)),  # type: ignore[arg-type]
        Compiled(lambda: locks.delaying(Slot("client")).on(Slot("branch")).sharing(*asked).foremost(MOST_TOLD)),  # type: ignore[arg-type]
    )


OBSTACLES = {scope: _obstacles_of(scope) for scope in Scope.values}


def obstacles(branch: Branch, request: LockRequest) -> list[BranchLock]:
    """Locks of the branch that share something with the request: the foremost of those held, and of those that still
    delay. Free for the taking are the first of them, if any."""
    asked = {
        "branch": branch.pk,
        "client": request.client,
        "resource_type": request.resource_type,
        "resource_id": request.resource_id,
    }
    held, late = OBSTACLES[request.lock_scope]
    return [*held(**asked), *late(**asked)]


def sharing_types(types: Sequence[str]) -> LockQuerySet:
    return BranchLock.objects.filter(Q(resource_type__isnull=True) | Q(resource_type__in=types))


def obstacles_to_types(branch: Branch, client: str, types: Sequence[str]) -> list[BranchLock]:
    """The same for locks on several types, in as many statements as for one."""
    rows = sharing_types(types).on(branch.pk)
    found = (rows.active().clocked(), rows.delaying(client))
    return [lock for some in found for lock in some.foremost(MOST_TOLD, of_each="resource_type")]


ROW = """(%s, %s, %s, %s, %s, %s, %s, %s, statement_timestamp(), statement_timestamp() + make_interval(secs => %s), %s,
    CASE WHEN %s THEN statement_timestamp() END, %s, %s, %s, %s::jsonb, %s, %s, %s)"""
GRANT = """
    WITH lock AS (
        INSERT INTO branch_locks (
            id, branch_id, lock_type, lock_scope, resource_type, resource_id, locked_by, reason, locked_at, expires_at,
            heartbeat_interval, last_heartbeat, heartbeat_source, auto_release_enabled, lock_delay, metadata,
            ttl_source, idempotency_key, fingerprint)
        VALUES {rows}
        RETURNING *
    ), event AS (
        INSERT INTO branch_lock_events (branch_id, lock_id, kind, actor, reason, fence, details)
        SELECT branch_id, id, %s, locked_by, reason, fence, jsonb_build_object(
            'lock_type', lock_type, 'lock_scope', lock_scope, 'resource_type', resource_type,
            'resource_id', resource_id, 'expires_at', expires_at) FROM lock ORDER BY fence
    )
    SELECT * FROM lock ORDER BY fence
"""


def grant(branch: Branch, requests: Sequence[LockRequest], kind: str, *, unclaimed: bool = False) -> list[BranchLock]:
    """Insert the locks and their events in one statement. The database gives the fences and refuses an overlap.

    A waiter's lock lives for the claim time only, until its request picks it up and gets its terms.
    """
    first = requests[0]
    if first.full_indexing and branch.state == Branch.State.READY:
        move(branch, Branch.State.ACTIVE, first.client, first.reason)
    values = [value for request in requests for value in _row(branch, request, unclaimed)]
    locks = list(BranchLock.objects.raw(GRANT.format(rows=", ".join([ROW] * len(requests))), [*values, kind]))
    for lock in locks:
        lock.branch = branch
    if first.full_indexing and branch.state != Branch.State.LOCKED_FOR_WRITE:
        move(branch, Branch.State.LOCKED_FOR_WRITE, first.client, first.reason)
    if first.lock_type == LockType.INDEXING:
        mark_indexing(branch, first.source or first.client, completed=False)
    return locks


def _row(branch: Branch, request: LockRequest, unclaimed: bool) -> list[Any]:
    ttl, interval = (CLAIM_SECONDS, 0) if unclaimed else (request.ttl, request.interval)
    return [
        uuid7(), branch.pk, request.lock_type, *request.scope, request.client, request.reason, ttl,
        interval, interval > 0, request.source or request.client, unclaimed or request.auto_release_enabled,
        0 if unclaimed else request.lock_delay, json.dumps(request.metadata),
        "default" if request.ttl_seconds is None else "request", request.key, request.fingerprint,
    ]  # fmt: skip
