"""Granting and ending locks. Both happen under the branch's row, and ending one grants the next in line."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from uuid_utils.compat import uuid7

from config.errors import Conflict
from locks.models import (
    CLAIM_SECONDS,
    Branch,
    BranchLock,
    LockEvent,
    LockType,
    LockWaiter,
    Scope,
    overlapping,
    seconds,
)
from locks.services.branches import mark_indexing, move, take_branch
from locks.services.refusals import LockConflict, LockGone, conflict, wrong_state

HOUR = 3600
DEFAULT_TTL = {
    LockType.INDEXING: 4 * HOUR,
    LockType.MIGRATION: 6 * HOUR,
    LockType.BACKUP: 2 * HOUR,
    LockType.MAINTENANCE: HOUR,
    LockType.MANUAL: 24 * HOUR,
}
DEFAULT_HEARTBEAT = 120
CHANNEL = "branch_lock_waiters"
SYSTEM = "system"


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


@dataclass
class Outcome:
    """Of one try: the lock, or the place in line, or the refusal (raised once its event is committed)."""

    lock: BranchLock | None = None
    waiter: LockWaiter | None = None
    refusal: LockConflict | None = None
    replayed: bool = False


@transaction.atomic
def try_acquire(request: LockRequest, wait_seconds: float = 0) -> Outcome:
    if request.key and (earlier := same_key(request)):
        return earlier
    branch = take_branch(request.branch)
    if not admits(branch, request.lock_scope):
        return Outcome(refusal=note_conflict(branch, request, wrong_state(branch)))
    blockers = in_the_way(branch, request)
    if not blockers and not earlier_waiters(branch, request):
        return Outcome(lock=grant(branch, request, LockEvent.Kind.ACQUIRED))
    if wait_seconds > 0:
        return Outcome(waiter=queue(branch, request, wait_seconds))
    return Outcome(refusal=note_conflict(branch, request, conflict(blockers or ahead(branch, request))))


def same_key(request: LockRequest) -> Outcome | None:
    """What this client's Idempotency-Key got before. The advisory lock makes a twin request wait for the first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"lock {request.client} {request.key}"]
        )
    mine = {"idempotency_key": request.key}
    found = BranchLock.objects.filter(
        locked_by=request.client, locked_at__gt=Now() - settings.IDEMPOTENCY_WINDOW, **mine
    )
    lock = found.clocked().order_by("-locked_at").first()
    waiting = LockWaiter.objects.queued().filter(client=request.client, **mine).order_by("-id").first()
    if lock is None and waiting is None:
        return None
    fingerprint = lock.fingerprint if lock else waiting.terms["fingerprint"] if waiting else None
    if fingerprint != request.fingerprint:
        raise Conflict("This key was used with another body.", code="idempotency_conflict", attr="Idempotency-Key")
    if lock is None:
        return Outcome(waiter=waiting)
    if lock.dead:
        raise LockGone
    return Outcome(lock=lock, replayed=True)


def admits(branch: Branch, scope: str) -> bool:
    if branch.state == Branch.State.ERROR:
        return scope == Scope.BRANCH
    return branch.state != Branch.State.ARCHIVED


def in_the_way(branch: Branch, request: LockRequest) -> list[BranchLock]:
    """Locks that block this request; the expired among them are ended first, which may grant a waiter."""
    held = list(BranchLock.objects.active().on(branch.pk).sharing(*request.scope).clocked())
    expired = [lock.pk for lock in held if lock.auto_release_enabled and (lock.ttl_expired or lock.heartbeat_expired)]
    if expired:
        expire_locks([branch], expired, how="takeover")
        held = list(BranchLock.objects.blocking().on(branch.pk).sharing(*request.scope))
    return held or list(BranchLock.objects.delaying(request.client).on(branch.pk).sharing(*request.scope))


def earlier_waiters(branch: Branch, request: LockRequest, before: int | None = None) -> bool:
    rows = LockWaiter.objects.queued().filter(overlapping(*request.scope), branch=branch)
    return (rows.filter(pk__lt=before) if before else rows).exists()


def ahead(branch: Branch, request: LockRequest) -> list[BranchLock]:
    """The locks that those in line before this request wait for."""
    first = LockWaiter.objects.queued().filter(overlapping(*request.scope), branch=branch).order_by("id").first()
    if first is None:
        return []
    scope = (first.lock_scope, first.resource_type, first.resource_id)
    return list(BranchLock.objects.blocking().on(branch.pk).sharing(*scope))


GRANT = """
    WITH lock AS (
        INSERT INTO branch_locks (
            id, branch_id, lock_type, lock_scope, resource_type, resource_id, locked_by, reason, locked_at, expires_at,
            heartbeat_interval, last_heartbeat, heartbeat_source, auto_release_enabled, lock_delay, metadata,
            ttl_source, idempotency_key, fingerprint)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s, statement_timestamp(),
            statement_timestamp() + make_interval(secs => %s), %s,
            CASE WHEN %s THEN statement_timestamp() END, %s, %s, %s, %s, %s, %s, %s)
        RETURNING *
    ), event AS (
        INSERT INTO branch_lock_events (branch_id, lock_id, kind, actor, reason, fence, details)
        SELECT branch_id, id, %s, locked_by, reason, fence, %s FROM lock
    )
    SELECT * FROM lock
"""


def grant(branch: Branch, request: LockRequest, kind: str, *, unclaimed: bool = False) -> BranchLock:
    """Insert the lock and its event in one statement. The database gives the fence and refuses an overlap.

    A waiter's lock lives for the claim time only, until its request picks it up and gets its terms.
    """
    if request.full_indexing and branch.state == Branch.State.READY:
        move(branch, Branch.State.ACTIVE, request.client, request.reason)
    ttl, interval = (CLAIM_SECONDS, 0) if unclaimed else (request.ttl, request.interval)
    details = json.dumps({"lock_type": request.lock_type, "lock_scope": request.lock_scope, "ttl_seconds": request.ttl})
    values = [
        uuid7(), branch.pk, request.lock_type, *request.scope, request.client, request.reason, ttl,
        interval, interval > 0, request.source or request.client, unclaimed or request.auto_release_enabled,
        0 if unclaimed else request.lock_delay, json.dumps(request.metadata),
        "default" if request.ttl_seconds is None else "request", request.key, request.fingerprint, kind, details,
    ]  # fmt: skip
    lock = list(BranchLock.objects.raw(GRANT, values))[0]
    lock.branch = branch
    if request.full_indexing and branch.state != Branch.State.LOCKED_FOR_WRITE:
        move(branch, Branch.State.LOCKED_FOR_WRITE, request.client, request.reason)
    if request.lock_type == LockType.INDEXING:
        mark_indexing(branch, request.source or request.client, completed=False)
    return lock


def queue(branch: Branch, request: LockRequest, wait_seconds: float) -> LockWaiter:
    waiter = LockWaiter.objects.create(
        branch=branch,
        client=request.client,
        lock_type=request.lock_type,
        lock_scope=request.lock_scope,
        resource_type=request.resource_type,
        resource_id=request.resource_id,
        terms=asdict(request),
        idempotency_key=request.key,
        deadline_at=Now() + seconds(wait_seconds),
    )
    LockEvent.objects.create(
        branch=branch,
        kind=LockEvent.Kind.WAIT_QUEUED,
        actor=request.client,
        reason=request.reason,
        details={"waiter": waiter.pk, "wait_seconds": wait_seconds},
    )
    return waiter


def note_conflict(branch: Branch, request: LockRequest, refusal: LockConflict) -> LockConflict:
    blocked_by = [found["lock_id"] for found in refusal.extra["conflicts"]]
    details = {"blocked_by": blocked_by, "lock_type": request.lock_type, "lock_scope": request.lock_scope}
    if request.resource_type:
        details |= {"resource_type": request.resource_type, "resource_id": request.resource_id}
    LockEvent.objects.create(
        branch=branch, kind=LockEvent.Kind.CONFLICT, actor=request.client, reason=request.reason, details=details
    )
    return refusal


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
            'expires_at', expires_at, 'last_heartbeat', last_heartbeat) FROM ended
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


def expire_locks(branches: Collection[Branch], ids: Collection[Any], *, how: str) -> list[BranchLock]:
    """Write down the expiry of those that are expired indeed. The caller holds the branches' rows."""
    keys, said = [branch.pk for branch in branches], json.dumps({"by": how})
    ended = list(BranchLock.objects.raw(EXPIRE, [BranchLock.State.EXPIRED, SYSTEM, list(ids), keys, SYSTEM, "", said]))
    if ended:
        LockWaiter.objects.filter(
            lock__in=[lock.pk for lock in ended], state=LockWaiter.State.GRANTED, claimed_at=None
        ).update(state=LockWaiter.State.GONE)
    after_end(branches, ended, SYSTEM, "the indexing lock expired")
    return ended


def end_locks(
    branches: Collection[Branch], ids: Collection[Any], actor: str, reason: str, *, forced: bool, ready: bool = False
) -> list[BranchLock]:
    """Release, or take away, those still held. `ready` leaves the branch's state to the caller."""
    state, sql = (BranchLock.State.FORCE_RELEASED, FORCE) if forced else (BranchLock.State.RELEASED, RELEASE)
    keys = [branch.pk for branch in branches]
    ended = list(BranchLock.objects.raw(sql, [state, actor, list(ids), keys, actor, reason, "{}"]))
    after_end(branches, [] if ready else ended, actor, reason)
    return ended


def after_end(branches: Collection[Branch], ended: list[BranchLock], actor: str, reason: str) -> None:
    """A full indexing that ended otherwise than by `complete` leaves an ACTIVE branch; then the next in line."""
    full = {lock.branch_id for lock in ended if lock.lock_type == LockType.INDEXING and lock.resource_type is None}
    for branch in branches:
        if branch.pk in full and branch.state == Branch.State.LOCKED_FOR_WRITE:
            move(branch, Branch.State.ACTIVE, actor, reason)
    keys = [branch.pk for branch in branches]
    waited_for = set(LockWaiter.objects.queued().filter(branch__in=keys).values_list("branch_id", flat=True))
    for branch in branches:
        if branch.pk in waited_for:
            grant_waiting(branch)


def grant_waiting(branch: Branch) -> None:
    """First come, first served among those that conflict: whoever must go on waiting bars the like behind them."""
    barring: list[LockWaiter] = []
    for waiter in LockWaiter.objects.queued().filter(branch=branch).order_by("id"):
        request = LockRequest(**waiter.terms)
        if any(share(waiter, earlier) for earlier in barring):
            continue
        if not admits(branch, request.lock_scope) or in_the_way(branch, request):
            barring.append(waiter)
            continue
        if LockWaiter.objects.filter(pk=waiter.pk, state=LockWaiter.State.WAITING).exists():
            lock = grant(branch, request, LockEvent.Kind.GRANTED, unclaimed=True)
            LockWaiter.objects.filter(pk=waiter.pk).update(state=LockWaiter.State.GRANTED, lock=lock)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, str(waiter.pk)])


def share(one: LockWaiter, other: LockWaiter) -> bool:
    """The same rule as `overlapping`, between two rows at hand."""
    if one.resource_type is None or other.resource_type is None:
        return True
    same_id = one.resource_id is None or other.resource_id is None or one.resource_id == other.resource_id
    return one.resource_type == other.resource_type and same_id


def claim(waiter: LockWaiter) -> BranchLock | None:
    """The granted lock with the terms asked for, or None when it came too late."""
    request = LockRequest(**waiter.terms)
    beating = {"last_heartbeat": Now()} if request.interval else {}
    claimed = (
        BranchLock.objects.active()
        .filter(pk=waiter.lock_id, expires_at__gte=Now())
        .update(
            expires_at=F("locked_at") + seconds(request.ttl),
            heartbeat_interval=request.interval,
            auto_release_enabled=request.auto_release_enabled,
            lock_delay=request.lock_delay,
            **beating,
        )
    )
    LockWaiter.objects.filter(pk=waiter.pk).update(claimed_at=Now())
    return BranchLock.objects.clocked().select_related("branch").get(pk=waiter.lock_id) if claimed else None
