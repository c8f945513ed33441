"""Every write of the locks app, one function per verb. Other apps need `check_write` alone."""

from locks.services.gate import check_write, may_write
from locks.services.grants import DEFAULT_HEARTBEAT, DEFAULT_TTL, LockRequest
from locks.services.holding import (
    authorize,
    drop_overdue_waiters,
    extend_lock,
    force_unlock,
    held,
    postpone_silence,
    reactivate_unindexed,
    reap,
    record_heartbeat,
    refuse_stranger,
    release_lock,
    set_branch_state,
)
from locks.services.indexing import REASON as INDEXING_REASON
from locks.services.indexing import complete_indexing, guess_types, indexing_locks, start_indexing
from locks.services.refusals import LockConflict, Locked, LockGone, StaleFence, eta_seconds
from locks.services.waiting import acquire_lock

__all__ = [
    "DEFAULT_HEARTBEAT",
    "DEFAULT_TTL",
    "INDEXING_REASON",
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
    "eta_seconds",
    "extend_lock",
    "force_unlock",
    "guess_types",
    "held",
    "indexing_locks",
    "may_write",
    "postpone_silence",
    "reactivate_unindexed",
    "reap",
    "record_heartbeat",
    "refuse_stranger",
    "release_lock",
    "set_branch_state",
    "start_indexing",
]
