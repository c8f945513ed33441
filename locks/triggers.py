"""What the database itself keeps true about locks, besides the state graphs."""

from typing import Any

import pgtrigger

# For append_only's `deletable`: a heartbeat that a hundred younger ones of its lock have followed.
HEARTBEATS_KEPT = """OLD.kind = 'HEARTBEAT' AND 100 <= (
    SELECT count(*) FROM (
        SELECT 1 FROM branch_lock_events AS younger
         WHERE younger.lock_id = OLD.lock_id AND younger.kind = 'HEARTBEAT' AND younger.id > OLD.id LIMIT 100
    ) AS kept)"""


class FenceOnGrant(pgtrigger.Trigger):
    """Every grant, by whatever hand, takes the branch's next fence. The row lock it needs also orders bare INSERTs."""

    when = pgtrigger.Before
    operation = pgtrigger.Insert

    def get_func(self, model: Any) -> str:
        return """
            UPDATE branches SET fence = fence + 1 WHERE id = NEW.branch_id RETURNING fence INTO NEW.fence;
            RETURN NEW;
        """


class FenceOnlyGrows(pgtrigger.Trigger):
    when = pgtrigger.Before
    operation = pgtrigger.Update
    condition = pgtrigger.Condition("NEW.fence < OLD.fence")

    def get_func(self, model: Any) -> str:
        return """
            RAISE EXCEPTION 'the fence of a branch only grows'
            USING ERRCODE = 'check_violation', CONSTRAINT = 'branches_fence_only_grows', TABLE = 'branches';
        """


class SilentAfter(pgtrigger.Trigger):
    """Keeps silent_after an instant before which the lock cannot be silent for too long.

    A heartbeat moves the true instant away and leaves the column (and so every index: the update stays HOT); only
    what brings it nearer, or a first value, is written. The sweep moves it on when it comes by.
    """

    when = pgtrigger.Before
    operation = pgtrigger.Insert | pgtrigger.Update

    def get_func(self, model: Any) -> str:
        return """
            IF NEW.heartbeat_interval = 0 THEN
                NEW.silent_after := NULL;
            ELSE
                NEW.silent_after := least(
                    NEW.silent_after,
                    coalesce(NEW.last_heartbeat, NEW.locked_at)
                        + make_interval(secs => 3 * NEW.heartbeat_interval));
            END IF;
            RETURN NEW;
        """
