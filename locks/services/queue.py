"""The line of those who wait. Whatever ends a lock serves the line in the same transaction, under the branch's row."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models.functions import Now

from locks.models import Branch, BranchLock, Compiled, LockEvent, LockWaiter, Scope, Slot, overlapping, seconds
from locks.services.branches import take_branches
from locks.services.endings import end_rows, expire_rows, reactivate
from locks.services.grants import LockRequest, admits, grant, obstacles, share
from locks.services.refusals import foremost

CHANNEL = "branch_lock_waiters"


def enqueue(branch: Branch, request: LockRequest, wait_seconds: float, blockers: Sequence[BranchLock]) -> LockWaiter:
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
    details = {
        "waiter": waiter.pk,
        "wait_seconds": wait_seconds,
        "blocked_by": [str(lock.pk) for lock in foremost(blockers)],
        "lock_type": request.lock_type,
        "lock_scope": request.lock_scope,
        "resource_type": request.resource_type,
        "resource_id": request.resource_id,
    }
    LockEvent.objects.create(
        branch=branch, kind=LockEvent.Kind.WAIT_QUEUED, actor=request.client, reason=request.reason, details=details
    )
    return waiter


TERMS = {field.name for field in fields(LockRequest)}


def wanted(waiter: LockWaiter, branch: Branch) -> LockRequest:
    """What it asked for. The columns count: a row of somebody's SQL, or of another version, may have other terms."""
    terms = {name: value for name, value in waiter.terms.items() if name in TERMS}
    columns = {
        name: getattr(waiter, name) for name in ("client", "lock_type", "lock_scope", "resource_type", "resource_id")
    }
    return LockRequest(**{"reason": "in line", **terms, **columns, "branch": branch.name})


def _line_of(scope: str) -> Compiled:
    asked = overlapping(scope, Slot("resource_type"), Slot("resource_id"))  # type: ignore[arg-type]
    return Compiled(lambda: LockWaiter.objects.queued().filter(asked, branch=Slot("branch")).order_by("id")[:1])


LINE = {scope: _line_of(scope) for scope in Scope.values}


def in_line(branch: Branch, request: LockRequest) -> LockWaiter | None:
    """The first of those who wait for something the request shares."""
    _scope, resource_type, resource_id = request.scope
    found = LINE[request.lock_scope](branch=branch.pk, resource_type=resource_type, resource_id=resource_id)
    return found[0] if found else None


def expire_locks(
    branches: Collection[Branch], ids: Collection[Any], *, how: str, run_id: UUID | None = None
) -> list[BranchLock]:
    ended = expire_rows(branches, ids, how, run_id)
    serve_lines(branches, ended)
    return ended


def end_locks(
    branches: Collection[Branch], ids: Collection[Any], actor: str, reason: str, *, forced: bool
) -> list[BranchLock]:
    ended = end_rows(branches, ids, actor, reason, forced=forced)
    reactivate(branches, ended, actor, reason)
    serve_lines(branches, ended)
    return ended


QUEUED = Compiled(lambda: LockWaiter.objects.queued().filter(branch=Slot("branch")).order_by("id"))


def serve_lines(branches: Collection[Branch], freed: Collection[Any]) -> None:
    """`freed` are the locks that ended or the waiters that left: only who shares with one of them can be served now."""
    for branch in branches:
        if waiters := QUEUED(branch=branch.pk):
            serve(branch, waiters, [thing for thing in freed if thing.branch_id == branch.pk])


def serve(branch: Branch, waiters: list[LockWaiter], freed: list[Any]) -> None:
    """First come, first served among those that conflict: whoever is still in line bars the like behind them."""
    expired = list(BranchLock.objects.reapable().on(branch.pk).values_list("pk", flat=True))
    if expired:
        freed = [*freed, *expire_rows([branch], expired, "takeover")]
    passed: list[LockWaiter] = []
    for waiter in waiters:
        request = wanted(waiter, branch)
        if not admits(branch, request.lock_scope):
            _answer(waiter, LockWaiter.State.TIMED_OUT)
            continue
        hopeful = any(share(waiter, thing) for thing in freed)
        barred = any(share(waiter, earlier) for earlier in passed)
        passed.append(waiter)
        if hopeful and not barred and not obstacles(branch, request):
            [lock] = grant(branch, [request], LockEvent.Kind.GRANTED, unclaimed=True)
            _answer(waiter, LockWaiter.State.GRANTED, lock=lock)


def _answer(waiter: LockWaiter, state: str, **fields: Any) -> None:
    """Delivered at the commit, to whichever process the request waits in."""
    LockWaiter.objects.filter(pk=waiter.pk).update(state=state, **fields)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, str(waiter.pk)])


def claim(waiter: LockWaiter) -> BranchLock | None:
    """The granted lock with the terms asked for, or None when it came too late. Its time counts from now."""
    rows = BranchLock.objects.clocked().select_related("branch").filter(waiters=waiter)
    lock = rows.first()
    if lock is None or lock.dead:
        return None
    if waiter.claimed_at is None:
        request = wanted(waiter, lock.branch)
        BranchLock.objects.filter(pk=lock.pk).update(
            locked_at=Now(),
            expires_at=Now() + seconds(request.ttl),
            heartbeat_interval=request.interval,
            last_heartbeat=Now() if request.interval else None,
            auto_release_enabled=request.auto_release_enabled,
            lock_delay=request.lock_delay,
        )
        LockWaiter.objects.filter(pk=waiter.pk).update(claimed_at=Now())
        lock = rows.all().get()
    return lock


def abandon(waiter_id: int) -> None:
    """Its client is gone: out of the line, and what it was granted but never got goes to the next."""
    [branch] = take_branches([LockWaiter.objects.values_list("branch_id", flat=True).get(pk=waiter_id)])
    waiter = LockWaiter.objects.get(pk=waiter_id)
    if waiter.state == LockWaiter.State.WAITING or (
        waiter.state == LockWaiter.State.GRANTED and waiter.claimed_at is None
    ):
        LockWaiter.objects.filter(pk=waiter_id).update(state=LockWaiter.State.GONE)
        if waiter.lock_id:
            end_rows([branch], [waiter.lock_id], waiter.client, "its client hung up while waiting", forced=False)
        serve_lines([branch], [waiter])
