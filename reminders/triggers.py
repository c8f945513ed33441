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
# A person may date rows back; a default or a now() lies at or after the beginning of the transaction.
DATED_BACK = "coalesce(NEW.updated_at < transaction_timestamp(), false)"


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
                    IF NOT FOUND THEN
                        RAISE EXCEPTION 'alarm: there is no such page' USING ERRCODE = 'foreign_key_violation',
                            CONSTRAINT = 'alarm_page_fk', TABLE = 'alarm', COLUMN = 'page_id';
                    END IF;
                END IF;
                -- An id that comes back goes on counting: its old keys are used up, unless it comes back in a send.
                SELECT greatest(NEW.occurrence, max(occurrence) + (NEW.processed_at IS NULL)::int) INTO NEW.occurrence
                FROM alarm_delivery WHERE alarm_id = NEW.id;
                {STAMP}
                IF NOT {DATED_BACK} THEN
                    NEW.updated_at := clock_timestamp();
                END IF;
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
                IF NEW.updated_at IS NOT DISTINCT FROM OLD.updated_at OR NOT {DATED_BACK} THEN
                    NEW.updated_at := clock_timestamp();
                END IF;
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


def delivery_triggers() -> list[pgtrigger.Trigger]:
    """A delivery opened by hand beyond its alarm's occurrence takes the alarm along, so its key is kept."""
    return [
        pgtrigger.Trigger(
            name="occurrence_opened",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=pgtrigger.Insert,
            referencing=pgtrigger.Referencing(new="opened"),
            func="""
                UPDATE alarm SET occurrence = latest.occurrence
                FROM (SELECT alarm_id, max(occurrence) AS occurrence FROM opened GROUP BY alarm_id) AS latest
                WHERE alarm.id = latest.alarm_id AND alarm.occurrence < latest.occurrence;
                RETURN NULL;
            """,
        )
    ]
