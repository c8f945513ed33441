"""Why a lock or a write is refused, and the bodies that say so."""

import math
from collections.abc import Iterable
from typing import Any

from django.utils.translation import gettext as _

from config.errors import Conflict, DomainError, Gone
from locks.models import Branch, BranchLock, Scope

WIDTH = {scope: place for place, scope in enumerate(Scope.values)}
LONGEST_RETRY = 1800
SOON = 300
MOST_TOLD = 100  # of ten thousand small locks in the way, each refusal would be megabytes, and its event kept for years


class LockConflict(Conflict):
    """Somebody else holds it, or stood in line before."""

    code = "lock_conflict"


class StaleFence(Conflict):
    code = "stale_fence"

    def __init__(self) -> None:
        super().__init__(_("This fence is not the lock's: it was granted anew, or never yours."))


class LockGone(Gone):
    code = "lock_gone"

    def __init__(self) -> None:
        super().__init__("This lock has ended or expired. Acquire a new one.")


class Locked(DomainError):
    """A write that a lock, or the state of the branch, does not let through."""

    status = 423
    code = "locked"

    def __init__(self, why: str, body: dict[str, Any]) -> None:
        super().__init__(body["message"], code=why, retry_after=body["retry_after"])
        self.body = body


def eta_seconds(lock: BranchLock) -> int | None:
    if lock.estimated_remaining_hours is None or lock.estimated_at is None:
        return None
    # An estimate is never younger than the last heartbeat, wherever a person with SQL may have moved that.
    told_at = min(lock.estimated_at, lock.last_heartbeat or lock.estimated_at)
    passed = (lock.now - told_at).total_seconds()
    return max(0, round(lock.estimated_remaining_hours * 3600 - passed))


def retry_after(lock: BranchLock) -> int:
    delay_ends = getattr(lock, "delay_ends", None)
    eta = None if delay_ends else eta_seconds(lock)
    wait = eta if eta is not None else ((delay_ends or lock.expires_at) - lock.now).total_seconds()
    return min(LONGEST_RETRY, max(1, math.ceil(wait)))


def foremost(locks: Iterable[BranchLock]) -> list[BranchLock]:
    """The one to name first: the widest, then the oldest."""
    return sorted(locks, key=lambda lock: (WIDTH[lock.lock_scope], lock.locked_at, str(lock.pk)))[:MOST_TOLD]


def conflict_json(lock: BranchLock) -> dict[str, Any]:
    return {
        "lock_id": str(lock.pk),
        "locked_by": lock.locked_by,
        "locked_at": lock.locked_at,
        "reason": lock.reason,
        "expires_at": lock.expires_at,
        "lock_type": lock.lock_type,
        "lock_scope": lock.lock_scope,
        "resource_type": lock.resource_type,
        "resource_id": lock.resource_id,
        "heartbeat_health": lock.heartbeat_health,
        "progress": lock.progress,
    }


def conflict(blockers: list[BranchLock]) -> LockConflict:
    blockers = foremost(blockers)
    wait = retry_after(blockers[0]) if blockers else 1
    text = f"Held by {blockers[0].locked_by}: {blockers[0].reason}" if blockers else "Others wait for it already."
    extra = {"conflicts": [conflict_json(lock) for lock in blockers], "retry_after": wait}
    return LockConflict(text, extra=extra, retry_after=wait)


def wrong_state(branch: Branch) -> LockConflict:
    text = f"The branch {branch.name} is {branch.state}."
    return LockConflict(
        text, code="branch_state", extra={"conflicts": [], "retry_after": LONGEST_RETRY}, retry_after=LONGEST_RETRY
    )


def locked(branch: Branch, resource_type: str | None, lock: BranchLock) -> Locked:
    narrow, eta = lock.lock_scope != Scope.BRANCH, eta_seconds(lock)
    return Locked(
        "locked",
        {
            "error": "Locked",
            "message": message(branch, lock, eta),
            "branch": branch.name,
            "resource_type": resource_type,
            "lock_scope": lock.lock_scope,
            "locked_by": lock.locked_by,
            "reason": lock.reason,
            "progress": lock.progress,
            "eta_seconds": eta,
            "retry_after": retry_after(lock),
            "other_resources_available": narrow,
            "alternative_actions": alternatives(narrow, eta),
        },
    )


def message(branch: Branch, lock: BranchLock, eta: int | None) -> str:
    """Also what a person reads who saves a form of the admin."""
    names = {"branch": branch.name, "who": lock.locked_by, "why": lock.reason}
    if what := " ".join(filter(None, [lock.resource_type, lock.resource_id])):
        text = _("%(what)s on %(branch)s is locked by %(who)s: %(why)s") % {"what": what, **names}
    else:
        text = _("The branch %(branch)s is locked by %(who)s: %(why)s") % names
    told = [] if lock.progress is None else [_("%(percent)s done") % {"percent": f"{lock.progress:g}%"}]
    told += [] if eta is None else [_("about %(time)s left") % {"time": spoken(eta)}]
    return f"{text} ({', '.join(told)})" if told else text


def spoken(seconds: int) -> str:
    return f"{seconds // 60}m {seconds % 60}s"


def closed(branch: Branch, resource_type: str | None) -> Locked:
    state = branch.state.lower()
    return Locked(
        f"branch_{state}",
        {
            "error": "Locked",
            "message": _("The branch %(branch)s is %(state)s and takes no writes.")
            % {"branch": branch.name, "state": branch.state},
            "branch": branch.name,
            "resource_type": resource_type,
            "lock_scope": None,
            "locked_by": None,
            "reason": None,
            "progress": None,
            "eta_seconds": None,
            "retry_after": LONGEST_RETRY,
            "other_resources_available": False,
            "alternative_actions": ["Write to another branch.", "Ask a lock-admin to change the branch's state."],
        },
    )


def alternatives(narrow: bool, eta: int | None) -> list[str]:
    soon = eta is not None and eta < SOON
    wait = f"Wait about {spoken(eta or 0)} and try again." if soon else "Come back after retry_after seconds."
    others = ["Work on other resources of the branch."] if narrow else []
    return [*others, wait, "Save a draft and publish it later.", "Write to another branch."]
