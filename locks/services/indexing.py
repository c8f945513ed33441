"""Indexing: one lock per resource type, taken together, completed together."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from django.db import transaction

from config.errors import Conflict, Missing
from locks.models import Branch, BranchLock, LockEvent, LockType, LockWaiter, Scope
from locks.services.acquiring import in_the_way, note_conflicts, refuse, waited_for, without_expired
from locks.services.branches import mark_indexing, move, take_branch, take_branches
from locks.services.endings import end_rows
from locks.services.grants import LockRequest, admits, grant, obstacles_to_types, share, sharing_types
from locks.services.holding import refuse_stranger
from locks.services.queue import serve_lines
from locks.services.refusals import LockConflict, LockGone, StaleFence, conflict, conflict_json, foremost, wrong_state

WORDS = {
    "object_type": ("object", "entity"),
    "link_type": ("link", "relation"),
    "action_type": ("action", "function"),
}
REASON = "Data indexing in progress"


def guess_types(branch: str) -> list[str]:
    name = branch.lower()
    return [kind for kind, words in WORDS.items() if any(word in name for word in words)] or ["object_type"]


@transaction.atomic
def start_indexing(
    name: str,
    client: str,
    *,
    resource_types: Sequence[str] | None = None,
    service_name: str | None = None,
    reason: str = REASON,
    whole_branch: bool = False,
) -> dict[str, Any] | LockConflict:
    """Lock what can be locked and tell the rest. Under the one branch row no two starts can wait for each other.

    The refusal is returned, not raised, so that its events are committed.
    """
    branch = take_branch(name)
    scope = Scope.BRANCH if whole_branch else Scope.RESOURCE_TYPE
    types = [None] if whole_branch else list(dict.fromkeys(resource_types or guess_types(name)))
    requests = [
        LockRequest(name, LockType.INDEXING, scope, client, reason, resource_type=kind, source=service_name)
        for kind in types
    ]
    if not admits(branch, scope):
        return refuse(branch, requests[0], wrong_state(branch))
    free, taken = sort_out(branch, requests)
    refused = [(request, [conflict_json(lock) for lock in foremost(found)]) for request, found in taken]
    note_conflicts(branch, refused)
    if not free:
        every = {lock.pk: lock for _request, found in taken for lock in found}
        return conflict(list(every.values()))
    return {
        "locks": [_started(lock) for lock in grant(branch, free, LockEvent.Kind.ACQUIRED)],
        "not_locked": [
            {"resource_type": request.resource_type, "conflicts": conflicts} for request, conflicts in refused
        ],
        "lock_scope": scope.value,
        "branch_state": branch.state,
        "other_resources_available": not whole_branch,
    }


def sort_out(
    branch: Branch, requests: list[LockRequest]
) -> tuple[list[LockRequest], list[tuple[LockRequest, list[BranchLock]]]]:
    """Those nobody stands in the way of, and the others with who does."""
    types = [request.resource_type for request in requests if request.resource_type]
    if types:
        find = partial(obstacles_to_types, branch, requests[0].client, types)
        blockers = without_expired(branch, sharing_types(types), find)
    else:
        blockers = in_the_way(branch, requests[0])
    line = list(LockWaiter.objects.queued().filter(branch=branch).order_by("id"))
    free, taken = [], []
    for request in requests:
        found = [lock for lock in blockers if share(request, lock)]
        ahead = next((waiter for waiter in line if share(request, waiter)), None)
        if found or ahead:
            taken.append((request, found or waited_for(ahead)))
        else:
            free.append(request)
    return free, taken


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
    found = list(BranchLock.objects.clocked().filter(branch__name=branch, pk__in=ids).order_by("fence"))
    if len(found) != len(set(map(str, ids))):
        raise Missing("There is no such lock on this branch.")
    return found


@transaction.atomic
def complete_indexing(
    branch_name: str, fences: dict[str, int], client: str, *, admin: bool = False, reason: str = ""
) -> dict[str, Any]:
    """All or nothing. Completing a full indexing is the only way a lock's end leads to READY."""
    [branch] = take_branches([indexing_locks(branch_name, list(fences))[0].branch_id])
    locks = indexing_locks(branch_name, list(fences))
    refuse_completion(locks, fences, client, admin)
    end_rows([branch], [lock.pk for lock in locks], client, reason, forced=False)
    left = BranchLock.objects.blocking().on(branch.pk).filter(lock_type=LockType.INDEXING)
    remaining = sorted({lock.resource_type or "" for lock in left})
    full = any(lock.lock_scope == Scope.BRANCH for lock in locks)
    if not remaining:
        mark_indexing(branch, None, completed=True)
    if full and branch.state == Branch.State.ACTIVE:  # the lock came by SQL, or a lock-admin set the branch free
        move(branch, Branch.State.LOCKED_FOR_WRITE, client, reason)
    if full and branch.state == Branch.State.LOCKED_FOR_WRITE:
        move(branch, Branch.State.READY, client, reason)
    state = branch.state
    serve_lines([branch], locks)
    return {
        "completion_type": "partial" if remaining else "complete",
        "remaining": remaining,
        "branch_state": state,
    }


def refuse_completion(locks: list[BranchLock], fences: dict[str, int], client: str, admin: bool) -> None:
    """In the order of the contract: 403, 410, 409."""
    for lock in locks:
        refuse_stranger(lock, client, admin)
    if any(lock.dead for lock in locks):
        raise LockGone
    if any(fences[str(lock.pk)] != lock.fence for lock in locks):
        raise StaleFence
    if any(lock.lock_type != LockType.INDEXING for lock in locks):
        raise Conflict("Only INDEXING locks can be completed.", code="not_indexing", attr="locks")
