"""Indexing: one lock per resource type, taken together, completed together."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction

from config.errors import Conflict, Missing
from locks.models import Branch, BranchLock, LockEvent, LockType, Scope
from locks.services.branches import mark_indexing, move, take_branch, take_branches
from locks.services.grants import (
    LockRequest,
    admits,
    ahead,
    earlier_waiters,
    end_locks,
    grant,
    in_the_way,
    note_conflict,
)
from locks.services.holding import authorize, refuse_stranger
from locks.services.refusals import LockConflict, LockGone, StaleFence, conflict, conflict_json, widest, wrong_state

WORDS = {
    "object_type": ("object", "entity"),
    "link_type": ("link", "relation"),
    "action_type": ("action", "function"),
}
REASON = "Data indexing in progress"


def guess_types(branch: str) -> list[str]:
    name = branch.lower()
    return [kind for kind, words in WORDS.items() if any(word in name for word in words)] or ["object_type"]


def start_indexing(
    branch: str,
    client: str,
    *,
    resource_types: Sequence[str] | None = None,
    service_name: str | None = None,
    reason: str = REASON,
    whole_branch: bool = False,
) -> dict[str, Any]:
    """Lock what can be locked and tell the rest. Under the one branch row no two starts can wait for each other."""
    answer = _start(branch, client, resource_types, service_name, reason, whole_branch)
    if isinstance(answer, LockConflict):
        raise answer
    return answer


@transaction.atomic
def _start(
    name: str, client: str, types: Sequence[str] | None, service: str | None, reason: str, whole: bool
) -> dict[str, Any] | LockConflict:
    branch = take_branch(name)
    scope = Scope.BRANCH if whole else Scope.RESOURCE_TYPE
    wanted = [None] if whole else sorted(set(types or guess_types(name)))
    granted: list[BranchLock] = []
    not_locked: list[dict[str, Any]] = []
    blockers: dict[Any, BranchLock] = {}
    refused: LockConflict | None = None
    for kind in wanted:
        request = LockRequest(name, LockType.INDEXING, scope, client, reason, resource_type=kind, source=service)
        if not admits(branch, scope):
            refused = note_conflict(branch, request, wrong_state(branch))
            break
        found = in_the_way(branch, request)
        if not found and not earlier_waiters(branch, request):
            granted.append(grant(branch, request, LockEvent.Kind.ACQUIRED))
            continue
        found = widest(found or ahead(branch, request))
        note_conflict(branch, request, conflict(found))
        blockers |= {lock.pk: lock for lock in found}
        not_locked.append({"resource_type": kind, "conflicts": [conflict_json(lock) for lock in found]})
    if not granted:
        return refused or conflict(list(blockers.values()))
    return {
        "locks": [_started(lock) for lock in granted],
        "not_locked": not_locked,
        "lock_scope": scope.value,
        "branch_state": branch.state,
        "other_resources_available": not whole,
    }


def _started(lock: BranchLock) -> dict[str, Any]:
    return {
        "lock_id": str(lock.pk),
        "fence": lock.fence,
        "resource_type": lock.resource_type,
        "expires_at": lock.expires_at,
        "heartbeat_interval": lock.heartbeat_interval,
    }


def indexing_locks(branch: str, ids: Sequence[Any]) -> list[BranchLock]:
    """The locks of this branch, all of them or Missing."""
    found = list(BranchLock.objects.clocked().filter(branch__name=branch, pk__in=ids).order_by("pk"))
    if len(found) != len(set(map(str, ids))):
        raise Missing("There is no such lock on this branch.")
    return found


@transaction.atomic
def complete_indexing(
    branch: str, fences: dict[Any, int], client: str, *, admin: bool = False, reason: str = ""
) -> dict[str, Any]:
    """All or nothing. The only way from LOCKED_FOR_WRITE to READY."""
    [row] = take_branches([indexing_locks(branch, list(fences))[0].branch_id])
    locks = indexing_locks(branch, list(fences))
    for lock in locks:
        refuse_stranger(lock, client, admin)
    if any(lock.dead for lock in locks):
        raise LockGone
    if any(fences[str(lock.pk)] != lock.fence for lock in locks):
        raise StaleFence
    for lock in locks:
        authorize(lock, fences[str(lock.pk)], client, admin)
        if lock.lock_type != LockType.INDEXING:
            raise Conflict("Only INDEXING locks can be completed.", code="not_indexing")
    left = BranchLock.objects.blocking().on(row.pk).filter(lock_type=LockType.INDEXING)
    left = left.exclude(pk__in=[lock.pk for lock in locks])
    remaining = [lock.resource_type for lock in left.order_by("resource_type")]
    full = row.state == Branch.State.LOCKED_FOR_WRITE
    if not remaining:
        mark_indexing(row, None, completed=True)
        if full:
            move(row, Branch.State.READY, client, reason)
    end_locks([row], [lock.pk for lock in locks], client, reason, forced=False, ready=True)
    return {
        "completion_type": "partial" if remaining else "complete",
        "remaining": sorted(set(remaining)),
        "branch_state": row.state,
    }
