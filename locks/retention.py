"""How long the history of locks is kept."""

from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef

from config.retention import purge_append_only
from locks.models import BranchLock, LockEvent, LockWaiter

HISTORY_KEPT = timedelta(days=730)
WAITERS_KEPT = timedelta(days=30)


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    events = LockEvent.objects.filter(created_at__lt=now - HISTORY_KEPT)
    waiters = LockWaiter.objects.exclude(state="waiting").filter(created_at__lt=now - WAITERS_KEPT)
    told = LockEvent.objects.filter(lock=OuterRef("pk"))
    waited_for = LockWaiter.objects.filter(lock=OuterRef("pk"))
    ended = BranchLock.objects.filter(released_at__lt=now - HISTORY_KEPT)
    return {
        "branch_lock_waiters": purge_append_only(waiters, dry_run),
        "branch_lock_events": purge_append_only(events, dry_run),
        "branch_locks": purge_append_only(ended.exclude(Exists(told)).exclude(Exists(waited_for)), dry_run),
    }
