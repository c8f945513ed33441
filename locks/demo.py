"""A world of locks on branches of its own: healthy and late holders, a crashed one, and some history."""

from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from locks.models import Branch, BranchLock
from locks.services import (
    LockConflict,
    LockRequest,
    acquire_lock,
    complete_indexing,
    force_unlock,
    record_heartbeat,
    release_lock,
    set_branch_state,
    start_indexing,
)


def seed(scale: int, say: Callable[[str], Any]) -> None:
    """Once: a world that has branches is left alone."""
    if Branch.objects.exists():
        say("locks: there are branches already")
        return
    with transaction.atomic():
        _indexing()
        _crashed()
        _holders()
        _history()
        for number in range(2, scale + 1):
            _acquire(f"demo/feature-{number}", "BACKUP", "RESOURCE_TYPE", "backup-robot", resource_type="object_type")
    say(f"locks: {Branch.objects.count()} branches, {BranchLock.objects.active().count()} locks held")


def _acquire(
    branch: str, kind: str, scope: str, client: str, reason: str = "Demonstration", **terms: Any
) -> BranchLock:
    return acquire_lock(LockRequest(branch, kind, scope, client, reason, **terms))[0]


def _indexing() -> None:
    """Two types are indexed, one well, one late; whoever asks for the same is told so."""
    started = start_indexing(
        "demo/object-links", "funnel-service", service_name="funnel-service", reason="Nightly indexing"
    )
    assert isinstance(started, dict)
    well, late = started["locks"][0], started["locks"][-1]
    for lock, progress in ((well, 65.0), (late, 20.0)):
        record_heartbeat(
            lock["lock_id"], lock["fence"], "funnel-service", source="funnel-service", progress=progress, remaining=0.5
        )
    if late is not well:
        _shift(late["lock_id"], last_heartbeat=-200)
    try:
        _acquire("demo/object-links", "MIGRATION", "BRANCH", "schema-migrator", "Add a column")
    except LockConflict:
        pass  # the event is the point


def _crashed() -> None:
    """Its process died in the middle of a full indexing: silent beyond its grace, free for the taking."""
    lock = _acquire("demo/release", "INDEXING", "BRANCH", "funnel-service-2", "Full indexing")
    record_heartbeat(lock.pk, lock.fence, "funnel-service-2", source="funnel-service-2", progress=42.0)
    _shift(lock.pk, last_heartbeat=-365)


def _holders() -> None:
    _acquire(
        "demo/catalogue", "BACKUP", "RESOURCE_TYPE", "backup-robot", "Weekly backup", resource_type="permission_type"
    )
    _acquire(
        "demo/catalogue",
        "MANUAL",
        "RESOURCE",
        "dana",
        "Reviewing the wording",
        resource_type="view_type",
        resource_id="dashboard",
    )
    _acquire("demo/payments", "MIGRATION", "BRANCH", "schema-migrator", "Split the table", heartbeat_interval=60)


def _history() -> None:
    lock = _acquire("demo/search", "INDEXING", "BRANCH", "funnel-service", "Full indexing")
    complete_indexing("demo/search", {str(lock.pk): lock.fence}, "funnel-service", reason="Indexing completed")
    lock = _acquire("demo/old", "MAINTENANCE", "BRANCH", "dana")
    release_lock(lock.pk, lock.fence, "dana")
    lock = _acquire("demo/old", "MAINTENANCE", "BRANCH", "robot", "Forgotten")
    force_unlock("dana", "The robot is gone", lock_ids=[lock.pk])
    set_branch_state("demo/old", Branch.State.ARCHIVED, "dana", "Merged")
    set_branch_state("demo/broken", Branch.State.ERROR, "funnel-service", "Index files damaged")


def _shift(lock_id: Any, **columns: float) -> None:
    """Seconds from now, by the database's clock."""
    sets = ", ".join(f"{name} = statement_timestamp() + make_interval(secs => %s)" for name in columns)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE branch_locks SET {sets} WHERE id = %s", [*columns.values(), str(lock_id)])
