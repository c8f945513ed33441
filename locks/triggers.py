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
    """Every grant takes the branch's next fence; one given by hand lifts the branch to it.

    Either way the branch's row is locked, so a bare INSERT too waits for gated writes in flight.
    """

    when = pgtrigger.Before
    operation = pgtrigger.Insert
    declare = [("asked", "bigint"), ("granted", "bigint")]

    def get_func(self, model: Any) -> str:
        return """
            -- A variable of its own: in RETURNING, PostgreSQL 18 reads NEW as the updated row.
            asked := NEW.fence;
            UPDATE branches SET fence = CASE WHEN asked > 0 THEN greatest(fence, asked) ELSE fence + 1 END
             WHERE id = NEW.branch_id
            RETURNING CASE WHEN asked > 0 THEN asked ELSE fence END INTO granted;
            NEW.fence := granted;
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
    """Keeps silent_after at or before the instant from which the lock counts as silent, for the sweep's index.

    A heartbeat moves that instant away but mostly leaves the column (so the update stays HOT): it is written when it
    would be too late, or more than 1.5 intervals too early. So a lock that beats never comes up in the sweep.
    """

    when = pgtrigger.Before
    operation = pgtrigger.Insert | pgtrigger.Update
    declare = [("silent_at", "timestamptz")]

    def get_func(self, model: Any) -> str:
        return """
            IF NEW.heartbeat_interval = 0 THEN
                NEW.silent_after := NULL;
                RETURN NEW;
            END IF;
            silent_at := coalesce(NEW.last_heartbeat, NEW.locked_at)
                + make_interval(secs => 3 * NEW.heartbeat_interval);
            IF NEW.silent_after IS NULL OR NEW.silent_after > silent_at
               OR NEW.silent_after < silent_at - make_interval(secs => 1.5 * NEW.heartbeat_interval) THEN
                NEW.silent_after := silent_at;
            END IF;
            RETURN NEW;
        """


class EndedAt(pgtrigger.Trigger):
    """A lock ended by bare SQL tells when, like any other."""

    when = pgtrigger.Before
    operation = pgtrigger.Update
    condition = pgtrigger.Condition("OLD.state = 'active' AND NEW.state <> 'active' AND NEW.released_at IS NULL")

    def get_func(self, model: Any) -> str:
        return """
            NEW.released_at := statement_timestamp();
            RETURN NEW;
        """
