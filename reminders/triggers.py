"""What the database does by itself to alarms: owner, stamps and tombstones, whoever writes."""

import pgtrigger

# Writers that may not have committed yet hold a shared advisory lock (CHANGES, second since CHANGES_EPOCH) taken before
# they read the clock for their stamp. Whoever reads pg_locks therefore knows a time below all stamps still to come.
# Seconds since the epoch itself would leave a signed 32-bit integer in 2038.
CHANGES = 0x616C6172
CHANGES_EPOCH = 1_700_000_000

STAMP = f"""
    PERFORM pg_advisory_xact_lock_shared(
        {CHANGES}, (floor(extract(epoch FROM clock_timestamp())) - {CHANGES_EPOCH})::int);
"""


def alarm_triggers() -> list[pgtrigger.Trigger]:
    return [
        pgtrigger.Trigger(
            name="alarm_born",
            when=pgtrigger.Before,
            operation=pgtrigger.Insert,
            func=f"""
                IF NEW.application_id IS NULL OR NEW.user_id IS NULL THEN
                    SELECT application_id, user_id INTO NEW.application_id, NEW.user_id
                    FROM pages WHERE id = NEW.page_id;
                END IF;
                {STAMP}
                NEW.updated_at := clock_timestamp();
                RETURN NEW;
            """,
        ),
        # A claim, its release and the wait after a refusal are the scheduler's own business: nothing to pull again.
        pgtrigger.Trigger(
            name="alarm_changed",
            when=pgtrigger.Before,
            operation=pgtrigger.Update,
            condition=pgtrigger.Condition(
                "ROW(OLD.page_id, OLD.user_id, OLD.title, OLD.body, OLD.next_alarm_time, OLD.sent_count,"
                " OLD.last_notification_id) IS DISTINCT FROM ROW(NEW.page_id, NEW.user_id, NEW.title, NEW.body,"
                " NEW.next_alarm_time, NEW.sent_count, NEW.last_notification_id)"
            ),
            func=f"""
                {STAMP}
                NEW.updated_at := clock_timestamp();
                RETURN NEW;
            """,
        ),
        pgtrigger.Trigger(
            name="alarm_tombstone",
            when=pgtrigger.After,
            operation=pgtrigger.Delete,
            func=f"""
                {STAMP}
                INSERT INTO alarm_deleted (id, application_id, user_id, deleted_at)
                VALUES (OLD.id, OLD.application_id, OLD.user_id, clock_timestamp())
                ON CONFLICT (id) DO UPDATE SET deleted_at = EXCLUDED.deleted_at;
                RETURN NULL;
            """,
        ),
    ]
