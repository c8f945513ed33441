"""The write gate: one call for every app that publishes something locks may protect."""

from typing import Any

from django.db import OperationalError, transaction

from config.errors import DomainError, Unavailable
from locks.models import Branch, BranchLock, Scope
from locks.services.branches import take_branch
from locks.services.refusals import StaleFence, closed, locked

CLOSED = (Branch.State.ARCHIVED, Branch.State.ERROR)


def check_write(
    branch: str,
    resource_type: str | None,
    resource_id: str | None,
    client: str,
    lock_id: Any = None,
    fence: int | None = None,
) -> None:
    """Let the caller's transaction write, or raise Locked or StaleFence; Unavailable when locks cannot be asked.

    Call it first, inside the transaction that writes: the shared row lock makes an acquire wait for that commit.
    """
    try:
        row = take_branch(branch, shared=True)
        if row.state in CLOSED:
            raise closed(row, resource_type)
        if lock_id is not None and not holds(row, client, lock_id, fence):
            raise StaleFence
        blockers = list(BranchLock.objects.blocking().on(row.pk).sharing(*write_scope(resource_type, resource_id)))
    except OperationalError as error:
        raise Unavailable("Whether this is locked cannot be asked now. Try again.", retry_after=1) from error
    if others := [lock for lock in blockers if str(lock.pk) != str(lock_id)]:
        raise locked(row, resource_type, others)


def write_scope(resource_type: str | None, resource_id: str | None) -> tuple[str, str | None, str | None]:
    """A write conflicts like an acquire of the same scope."""
    if resource_type is None:
        return Scope.BRANCH, None, None
    if resource_id is None:
        return Scope.RESOURCE_TYPE, resource_type, None
    return Scope.RESOURCE, resource_type, resource_id


def holds(branch: Branch, client: str, lock_id: Any, fence: int | None) -> bool:
    lock = BranchLock.objects.clocked().filter(pk=lock_id, branch=branch, locked_by=client, fence=fence).first()
    return lock is not None and not lock.dead


def may_write(branch: str, resource_type: str | None, resource_id: str | None, client: str, **held: Any) -> Any:
    """The gate's answer without a write: None, or the refusal. Leaves nothing behind, not even the branch."""
    try:
        with transaction.atomic():
            check_write(branch, resource_type, resource_id, client, **held)
            transaction.set_rollback(True)
    except Unavailable:
        raise
    except DomainError as refusal:
        return refusal
    return None
