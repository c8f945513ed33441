"""What follows from a row of task_devices, written by the database so that no path can forget it."""

import pgtrigger

# A new row counts towards its task's device_count.
ON_INSERT = """
    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT id, 'CREATED', 0, created_at FROM became ORDER BY created_at, id;

    UPDATE tasks SET devices_taken = devices_taken + made.n
      FROM (SELECT task_id, count(*) AS n FROM became GROUP BY task_id) AS made
     WHERE tasks.id = made.task_id;
    RETURN NULL;
"""

# Counted first, so that a claim pays nothing for the statements of an end.
ON_UPDATE = """
    SELECT count(*), count(*) FILTER (WHERE became.status = 'running'),
           count(*) FILTER (WHERE was.status = 'running' AND became.status <> 'running'),
           count(*) FILTER (WHERE became.status IN ('success', 'failed', 'cancelled')),
           count(*) FILTER (WHERE became.final AND became.retryable)
      INTO changed, claimed, stopped, closed, broken
      FROM was JOIN became USING (id)
     WHERE became.status <> was.status;

    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT became.id, told.event, became.attempt, coalesce(told.at, became.changed_at)
      FROM was JOIN became USING (id)
     CROSS JOIN LATERAL (VALUES
        (1, CASE WHEN became.acked_at IS NOT NULL AND was.acked_at IS NULL THEN 'ACKED' END, became.acked_at),
        (2, CASE WHEN became.status = was.status THEN NULL
                 WHEN became.status = 'running' THEN 'SENT'
                 WHEN became.status = 'success' THEN 'SUCCEEDED'
                 WHEN became.status = 'cancelled' THEN 'CANCELLED'
                 WHEN became.failure_kind = 'timeout' THEN 'TIMEOUT'
                 ELSE 'FAILED' END, NULL),
        (3, CASE WHEN became.status = was.status THEN NULL
                 WHEN became.status = 'pending' THEN 'RETRY_SCHEDULED'
                 WHEN became.status = 'failed' THEN 'FAILED_FINAL' END, NULL)
     ) AS told (place, event, at)
     WHERE told.event IS NOT NULL
     ORDER BY became.id, told.place;

    IF changed = 0 THEN RETURN NULL; END IF;

    IF changed > 1 THEN
        PERFORM 1 FROM devices WHERE id IN (SELECT device_id FROM became) ORDER BY id FOR NO KEY UPDATE;
    END IF;

    IF claimed > 0 THEN
        INSERT INTO task_device_attempts (task_device_id, attempt_no, claimed_by, started_at)
        SELECT became.id, became.attempt, pcs.pc_number, became.started_at
          FROM was JOIN became USING (id) JOIN pcs ON pcs.id = became.claimed_by_id
         WHERE became.status = 'running' AND was.status <> 'running';

        UPDATE devices SET status = 'busy'
          FROM became
         WHERE devices.id = became.device_id AND became.status = 'running' AND devices.status = 'online';
    END IF;

    IF stopped > 0 THEN
        UPDATE task_device_attempts AS attempt
           SET ended_at = became.changed_at, error = became.error,
               outcome = CASE WHEN became.status = 'success' THEN 'success' ELSE became.failure_kind END
          FROM was JOIN became USING (id)
         WHERE attempt.task_device_id = became.id AND attempt.attempt_no = became.attempt
           AND was.status = 'running' AND became.status <> 'running';

        UPDATE devices SET status = 'online'
          FROM was JOIN became USING (id)
         WHERE devices.id = became.device_id AND devices.status = 'busy'
           AND was.status = 'running' AND became.status <> 'running' AND NOT (became.final AND became.retryable);
    END IF;

    IF broken > 0 THEN
        UPDATE devices
           SET status = 'error', error_reason = coalesce(nullif(became.error, ''), became.failure_kind),
               errored_at = became.changed_at, total_errors = devices.total_errors + 1
          FROM was JOIN became USING (id)
         WHERE devices.id = became.device_id AND became.final AND became.retryable AND NOT was.final;
    END IF;

    IF closed > 0 THEN
        UPDATE tasks
           SET devices_done = devices_done + ended.done, devices_failed = devices_failed + ended.failed,
               devices_taken = devices_taken - ended.cancelled
          FROM (SELECT became.task_id, count(*) FILTER (WHERE became.status = 'success') AS done,
                       count(*) FILTER (WHERE became.status = 'failed') AS failed,
                       count(*) FILTER (WHERE became.status = 'cancelled') AS cancelled
                  FROM was JOIN became USING (id)
                 WHERE became.status <> was.status GROUP BY became.task_id) AS ended
         WHERE tasks.id = ended.task_id;
    END IF;
    RETURN NULL;
"""


# A person's SQL knows the columns of the contract, not what else we keep beside them.
COMPLETE_END = """
    NEW.final := NEW.status = 'failed';
    NEW.failure_kind := coalesce(NEW.failure_kind, CASE NEW.status WHEN 'cancelled' THEN 'cancelled' ELSE 'error' END);
    RETURN NEW;
"""

COMPLETE_DEVICE = """
    IF NEW.status = 'offline' THEN
        NEW.offline_at := coalesce(NEW.offline_at, now());
    ELSE
        NEW.offline_at := NULL;
    END IF;
    IF NEW.status = 'error' THEN
        NEW.errored_at := coalesce(NEW.errored_at, now());
    END IF;
    RETURN NEW;
"""


def device_times() -> list[pgtrigger.Trigger]:
    """Since when a device is offline or in error, where the writer did not say it. Going to work costs no call."""
    return [
        pgtrigger.Trigger(
            name="device_born",
            when=pgtrigger.Before,
            operation=pgtrigger.Insert,
            condition=pgtrigger.Condition("NEW.status = 'offline' AND NEW.offline_at IS NULL"),
            func=COMPLETE_DEVICE,
        ),
        pgtrigger.Trigger(
            name="device_moved",
            when=pgtrigger.Before,
            operation=pgtrigger.Update,
            condition=pgtrigger.Condition(
                "((NEW.status = 'offline') <> (OLD.status = 'offline')"
                " OR NEW.status = 'error' AND NEW.errored_at IS NULL)"
            ),
            func=COMPLETE_DEVICE,
        ),
    ]


def row_history() -> list[pgtrigger.Trigger]:
    """Events, attempts, the device's busy and error states and the task's counts, for all rows of a statement at once.

    Times come from the row's own columns, because a sweep may go by another clock than the database's.
    """
    return [
        pgtrigger.Trigger(
            name="row_ended",
            when=pgtrigger.Before,
            operation=pgtrigger.Update,
            condition=pgtrigger.Condition(
                "NEW.status = 'failed' AND NOT NEW.final"
                " OR OLD.status = 'running' AND NEW.status IN ('pending', 'failed', 'cancelled')"
                " AND NEW.failure_kind IS NULL"
            ),
            func=COMPLETE_END,
        ),
        pgtrigger.Trigger(
            name="row_created",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=pgtrigger.Insert,
            referencing=pgtrigger.Referencing(new="became"),
            func=ON_INSERT,
        ),
        pgtrigger.Trigger(
            name="row_changed",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=pgtrigger.Update,
            referencing=pgtrigger.Referencing(old="was", new="became"),
            declare=[(name, "bigint") for name in ("changed", "claimed", "stopped", "closed", "broken")],
            func=ON_UPDATE,
        ),
    ]
