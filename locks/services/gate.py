"""The write gate: one call for every app that publishes something locks may protect."""

from typing import Any

from django.db import DatabaseError, InterfaceError, connection, transaction
from django.utils.translation import gettext as _

from config.errors import DomainError, Unavailable
from locks.models import Branch, BranchLock, Scope
from locks.services.branches import take_branch
from locks.services.refusals import StaleFence, closed, locked

CLOSED = (Branch.State.ARCHIVED, Branch.State.ERROR)


def check_write(
    branch_name: str,
    resource_type: str | None,
    resource_id: str | None,
    *,
    lock_id: Any = None,
    fence: int | None = None,
    actor: Any = None,
) -> None:
    """Let the caller's transaction write, or raise Locked (423), StaleFence (409) or Unavailable (503).

    Call it first, inside the transaction that writes: it shares the branch's row until that commits, so whoever
    acquires meanwhile waits, and no write commits under a lock it has not seen. `actor` is the user, or its name.
    """
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError("check_write belongs into the transaction that writes")
    try:
        _check(branch_name, resource_type, resource_id, lock_id, fence, client_name(actor))
    except (DatabaseError, InterfaceError) as error:
        raise Unavailable(_("Whether this is locked cannot be asked now. Try again."), retry_after=1) from error


def _check(
    name: str, resource_type: str | None, resource_id: str | None, lock_id: Any, fence: int | None, client: str | None
) -> None:
    branch = take_branch(name, shared=True)
    if branch.state in CLOSED:
        raise closed(branch, resource_type)
    if (lock_id is not None or fence is not None) and not holds(branch, client, lock_id, fence):
        raise StaleFence
    others = BranchLock.objects.exclude(pk=lock_id).blocking().on(branch.pk)
    for lock in others.sharing(*write_scope(resource_type, resource_id)).foremost(1):
        raise locked(branch, resource_type, lock)


def client_name(actor: Any) -> str | None:
    return actor if actor is None or isinstance(actor, str) else str(actor.get_username())


def write_scope(resource_type: str | None, resource_id: str | None) -> tuple[str, str | None, str | None]:
    """A write conflicts like an acquire of the same scope."""
    if resource_type is None:
        return Scope.BRANCH, None, None
    if resource_id is None:
        return Scope.RESOURCE_TYPE, resource_type, None
    return Scope.RESOURCE, resource_type, resource_id


def holds(branch: Branch, client: str | None, lock_id: Any, fence: int | None) -> bool:
    if client is None or lock_id is None or fence is None:
        return False
    lock = BranchLock.objects.clocked().filter(pk=lock_id, branch=branch, locked_by=client, fence=fence).first()
    return lock is not None and not lock.dead


def may_write(branch_name: str, resource_type: str | None, resource_id: str | None, **held: Any) -> DomainError | None:
    """The gate's answer without a write: None, or the refusal. Leaves nothing behind, not even the branch."""
    try:
        with transaction.atomic():
            check_write(branch_name, resource_type, resource_id, **held)
            transaction.set_rollback(True)
    except Unavailable:
        raise
    except DomainError as refusal:
        return refusal
    return None
