"""One try to get a lock. A refusal is a value, not an exception, until what it leaves behind is committed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models.functions import Now

from config.errors import Conflict
from locks.models import Branch, BranchLock, LockEvent, LockQuerySet, LockWaiter
from locks.services.branches import take_branch
from locks.services.grants import LockRequest, admits, grant, obstacles
from locks.services.queue import enqueue, expire_locks, in_line
from locks.services.refusals import MOST_TOLD, LockConflict, LockGone, conflict, wrong_state


@dataclass
class Outcome:
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
        return Outcome(refusal=refuse(branch, request, wrong_state(branch)))
    blockers = in_the_way(branch, request)
    ahead = in_line(branch, request)
    if not blockers and ahead is None:
        return Outcome(lock=grant(branch, [request], LockEvent.Kind.ACQUIRED)[0])
    blockers = blockers or waited_for(ahead)
    if wait_seconds > 0:
        return Outcome(waiter=enqueue(branch, request, wait_seconds, blockers))
    return Outcome(refusal=refuse(branch, request, conflict(blockers)))


def same_key(request: LockRequest) -> Outcome | None:
    """What this client's Idempotency-Key got before. The advisory lock makes a twin request wait for the first."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('lock_timeout', '5s', true), pg_advisory_xact_lock(hashtextextended(%s, 0))",
            [f"lock {request.client} {request.key}"],
        )
    waiter = LockWaiter.objects.unanswered().filter(client=request.client, idempotency_key=request.key).first()
    if waiter is not None:
        refuse_other_body(waiter.terms.get("fingerprint"), request)
        return Outcome(waiter=waiter)
    kept = BranchLock.objects.filter(locked_at__gt=Now() - settings.IDEMPOTENCY_WINDOW).clocked()
    lock = kept.filter(locked_by=request.client, idempotency_key=request.key).order_by("-locked_at").first()
    if lock is None:
        return None
    if LockWaiter.objects.filter(lock=lock, claimed_at=None).exists():
        return None  # granted to a request that died before it knew: the key is free again
    refuse_other_body(lock.fingerprint, request)
    if lock.dead:
        raise LockGone
    return Outcome(lock=lock, replayed=True)


def refuse_other_body(fingerprint: str | None, request: LockRequest) -> None:
    if fingerprint != request.fingerprint:
        raise Conflict("This key was used with another body.", code="idempotency_conflict", attr="Idempotency-Key")


def in_the_way(branch: Branch, request: LockRequest) -> list[BranchLock]:
    """Locks that block the request; the expired among them are ended first, which may grant waiters theirs."""
    asked = BranchLock.objects.sharing(*request.scope)
    return without_expired(branch, asked, lambda: obstacles(branch, request))


def without_expired(branch: Branch, asked: LockQuerySet, find: Callable[[], list[BranchLock]]) -> list[BranchLock]:
    """What `find` finds, which tells of the foremost only, once the expired of `asked` are ended: all of them."""
    found = find()
    if not any(lock.reapable for lock in found):
        return found
    expire_locks([branch], list(asked.on(branch.pk).reapable().values_list("pk", flat=True)), how="takeover")
    return find()


def waited_for(waiter: LockWaiter | None) -> list[BranchLock]:
    """The locks that the one in line before waits for."""
    if waiter is None:
        return []
    scope = (waiter.lock_scope, waiter.resource_type, waiter.resource_id)
    return list(BranchLock.objects.blocking().on(waiter.branch_id).sharing(*scope).foremost(MOST_TOLD))


def refuse(branch: Branch, request: LockRequest, refusal: LockConflict) -> LockConflict:
    note_conflicts(branch, [(request, refusal.extra["conflicts"])])
    return refusal


def note_conflicts(branch: Branch, refused: list[tuple[LockRequest, list[dict[str, Any]]]]) -> None:
    LockEvent.objects.bulk_create(
        LockEvent(
            branch=branch,
            kind=LockEvent.Kind.CONFLICT,
            actor=request.client,
            reason=request.reason,
            details={
                "blocked_by": [found["lock_id"] for found in conflicts],
                "lock_type": request.lock_type,
                "lock_scope": request.lock_scope,
                "resource_type": request.resource_type,
                "resource_id": request.resource_id,
            },
        )
        for request, conflicts in refused
    )
