"""Expiry is a predicate at acquire time; these only write it down. The clock is the database's, not the sweep's."""

from config.sweeping import Sweep
from locks.models import BranchLock, LockWaiter
from locks.services import drop_overdue_waiters, postpone_silence, reap


def expire_heartbeats(sweep: Sweep) -> None:
    def page(ids: list[object]) -> dict[str, int]:
        done = reap(ids, sweep.run_id)
        postpone_silence(ids)
        return done

    sweep.pages(BranchLock.objects.maybe_silent(), page, label="locks", by="silent_after")
    sweep.pages(LockWaiter.objects.overdue(), lambda ids: {"gone": drop_overdue_waiters(ids)}, label="waiters")


def expire_ttls(sweep: Sweep) -> None:
    sweep.pages(BranchLock.objects.out_of_ttl(), lambda ids: reap(ids, sweep.run_id), by="expires_at")
