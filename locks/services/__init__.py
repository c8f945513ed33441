"""Every write of the locks app, one function per verb. Other apps need `check_write` alone."""

from locks.services.branches import duration
from locks.services.gate import check_write, may_write
from locks.services.grants import DEFAULT_HEARTBEAT, DEFAULT_TTL, LockRequest
from locks.services.holding import (
    authorize,
    drop_overdue_waiters,
    extend_lock,
    force_unlock,
    held,
    postpone_silence,
    reap,
    record_heartbeat,
    release_lock,
    set_branch_state,
)
from locks.services.indexing import complete_indexing, guess_types, indexing_locks, start_indexing
from locks.services.refusals import LockConflict, Locked, LockGone, StaleFence
from locks.services.waiting import acquire_lock

__all__ = [
    "DEFAULT_HEARTBEAT",
    "DEFAULT_TTL",
    "LockConflict",
    "LockGone",
    "LockRequest",
    "Locked",
    "StaleFence",
    "acquire_lock",
    "authorize",
    "check_write",
    "complete_indexing",
    "drop_overdue_waiters",
    "duration",
    "extend_lock",
    "force_unlock",
    "guess_types",
    "held",
    "indexing_locks",
    "may_write",
    "postpone_silence",
    "reap",
    "record_heartbeat",
    "release_lock",
    "set_branch_state",
    "start_indexing",
]
