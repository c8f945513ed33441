"""What follows from a row of task_devices, written by the database so that no path can forget it."""

import pgtrigger

COUNTED = [(name, "bigint") for name in ("changed", "claimed", "stopped", "closed", "broken")]

# What a change of status brings with it. Counted first, so that a claim pays nothing for the statements of an end.
# A person may have changed the row's attempt: whichever is open ends, and a number given again blocks no claim.
# A person ends a run by completed_at and knows no changed_at; a service writes the same time in both.
FOLLOWS = """
    SELECT count(*), count(*) FILTER (WHERE became.status = 'running'),
           count(*) FILTER (WHERE was.status = 'running' AND became.status <> 'running'),
           count(*) FILTER (WHERE became.status IN ('success', 'failed', 'cancelled')),
           count(*) FILTER (WHERE became.final AND became.retryable)
      INTO changed, claimed, stopped, closed, broken
      FROM {was} JOIN became USING (id)
     WHERE became.status <> was.status;

    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT became.id, told.event, became.attempt, coalesce(told.at, greatest(became.changed_at, became.completed_at))
      FROM {was} JOIN became USING (id)
     CROSS JOIN LATERAL (VALUES
        (1, CASE WHEN became.acked_at IS NOT NULL AND was.acked_at IS NULL THEN 'ACKED' END, became.acked_at),
        (2, CASE WHEN became.status = was.status THEN NULL
                 WHEN became.status = 'running' THEN 'SENT'
                 WHEN became.status = 'success' THEN 'SUCCEEDED'
                 WHEN became.status = 'cancelled' THEN 'CANCELLED'
                 WHEN became.failure_kind = 'timeout' THEN 'TIMEOUT'
                 ELSE 'FAILED' END, CASE WHEN became.status = 'running' THEN became.started_at END),
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
          FROM {was} JOIN became USING (id) JOIN pcs ON pcs.id = became.claimed_by_id
         WHERE became.status = 'running' AND was.status <> 'running'
        ON CONFLICT (task_device_id, attempt_no) DO UPDATE
           SET claimed_by = EXCLUDED.claimed_by, started_at = EXCLUDED.started_at, ended_at = NULL, outcome = NULL,
               error = NULL;

        UPDATE devices SET status = 'busy'
          FROM became
         WHERE devices.id = became.device_id AND became.status = 'running' AND devices.status = 'online';
    END IF;

    IF stopped > 0 THEN
        UPDATE task_device_attempts AS attempt
           SET ended_at = greatest(became.changed_at, became.completed_at), error = became.error,
               outcome = CASE WHEN became.status = 'success' THEN 'success' ELSE became.failure_kind END
          FROM {was} JOIN became USING (id)
         WHERE attempt.task_device_id = became.id AND attempt.ended_at IS NULL
           AND was.status = 'running' AND became.status <> 'running';

        UPDATE devices SET status = 'online'
          FROM {was} JOIN became USING (id)
         WHERE devices.id = became.device_id AND devices.status = 'busy'
           AND was.status = 'running' AND became.status <> 'running' AND NOT (became.final AND became.retryable);
    END IF;

    IF broken > 0 THEN
        UPDATE devices
           SET status = 'error', error_reason = coalesce(nullif(became.error, ''), became.failure_kind),
               errored_at = greatest(became.changed_at, became.completed_at), total_errors = devices.total_errors + 1
          FROM {was} JOIN became USING (id)
         WHERE devices.id = became.device_id AND became.final AND became.retryable AND NOT was.final;
    END IF;
"""

ON_UPDATE = f"""
    {FOLLOWS.format(was="was")}
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

# A new row counts towards its task's device_count. Ours are born pending or running; a person's SQL may bring in an
# end, which is taken as if it had been pending before, and the counts may have been written with the task already.
ON_INSERT = f"""
    INSERT INTO tasks_event (task_device_id, event, attempt_no, created_at)
    SELECT id, 'CREATED', 0, created_at FROM became ORDER BY created_at, id;

    IF EXISTS (SELECT FROM became WHERE status NOT IN ('pending', 'running')) THEN
        UPDATE tasks
           SET devices_taken = greatest(devices_taken, found.taken), devices_done = greatest(devices_done, found.done),
               devices_failed = greatest(devices_failed, found.failed)
          FROM (SELECT task_id, count(*) FILTER (WHERE status <> 'cancelled') AS taken,
                       count(*) FILTER (WHERE status = 'success') AS done,
                       count(*) FILTER (WHERE status = 'failed') AS failed
                  FROM task_devices WHERE task_id IN (SELECT task_id FROM became) GROUP BY task_id) AS found
         WHERE tasks.id = found.task_id;
    ELSE
        UPDATE tasks SET devices_taken = devices_taken + made.n
          FROM (SELECT task_id, count(*) AS n FROM became GROUP BY task_id) AS made
         WHERE tasks.id = made.task_id;
    END IF;
    {FOLLOWS.format(was="(SELECT id, 'pending' AS status, false AS final, NULL AS acked_at FROM became) AS was")}
    RETURN NULL;
"""

# A person's SQL knows the columns of the contract, not what else we keep beside them.
COMPLETE_ROW = """
    IF NEW.status = 'running' THEN
        NEW.attempt := greatest(NEW.attempt, 1);
        NEW.claimed_by_id := coalesce(NEW.claimed_by_id, (SELECT pc_id FROM devices WHERE id = NEW.device_id));
        RETURN NEW;
    END IF;
    NEW.lease_expires_at := NULL;
    NEW.final := NEW.status = 'failed';
    IF NEW.status = 'cancelled' THEN
        NEW.failure_kind := coalesce(NEW.failure_kind, 'cancelled');
    ELSIF NEW.status <> 'success' THEN
        NEW.failure_kind := coalesce(NEW.failure_kind, 'error');
    END IF;
    IF NEW.status <> 'pending' THEN
        NEW.completed_at := coalesce(NEW.completed_at, now());
    END IF;
    IF TG_OP = 'UPDATE' AND NEW.changed_at = OLD.changed_at THEN
        NEW.changed_at := coalesce(NEW.completed_at, now());
    END IF;
    RETURN NEW;
"""

UNFINISHED = (
    "NEW.status = 'failed' AND NOT NEW.final"
    " OR NEW.status <> OLD.status AND ("
    "NEW.status = 'running' AND (NEW.claimed_by_id IS NULL OR NEW.attempt = 0)"
    " OR NEW.status <> 'running' AND NEW.lease_expires_at IS NOT NULL"
    " OR NEW.status IN ('success', 'failed', 'cancelled') AND NEW.completed_at IS NULL"
    " OR OLD.status = 'running' AND NEW.status IN ('pending', 'failed', 'cancelled') AND NEW.failure_kind IS NULL)"
)

COMPLETE_TASK = """
    NEW.devices_taken := greatest(NEW.devices_taken, NEW.devices_done + NEW.devices_failed);
    IF NEW.status = 'running' THEN
        NEW.started_at := coalesce(NEW.started_at, now());
    ELSIF NEW.status <> 'pending' THEN
        NEW.completed_at := coalesce(NEW.completed_at, now());
    END IF;
    RETURN NEW;
"""

COMPLETE_PC = """
    NEW.last_heartbeat_at := now();
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
    IF TG_OP = 'INSERT' THEN
        NEW.listed := NEW.listed OR NEW.status IN ('online', 'busy');
    END IF;
    RETURN NEW;
"""


def _completed(name: str, born: str, moved: str, func: str) -> list[pgtrigger.Trigger]:
    """The conditions hold only for what a service would not write, so going to work costs no call."""
    return [
        pgtrigger.Trigger(
            name=f"{name}_born",
            when=pgtrigger.Before,
            operation=pgtrigger.Insert,
            condition=pgtrigger.Condition(born),
            func=func,
        ),
        pgtrigger.Trigger(
            name=f"{name}_moved",
            when=pgtrigger.Before,
            operation=pgtrigger.Update,
            condition=pgtrigger.Condition(moved),
            func=func,
        ),
    ]


def pc_times() -> list[pgtrigger.Trigger]:
    """Somebody who says a PC is online has heard of it just now; without a time it would be online for ever."""
    unheard = "NEW.status = 'online' AND NEW.last_heartbeat_at IS NULL"
    return _completed("pc", unheard, f"OLD.status <> 'online' AND {unheard}", COMPLETE_PC)


def device_times() -> list[pgtrigger.Trigger]:
    """Since when a device is offline or in error, where the writer did not say it; one brought in as up is listed."""
    return _completed(
        "device",
        "NEW.status <> 'offline' OR NEW.offline_at IS NULL",
        "((NEW.status = 'offline') <> (OLD.status = 'offline') OR NEW.status = 'error' AND NEW.errored_at IS NULL)",
        COMPLETE_DEVICE,
    )


def task_times() -> list[pgtrigger.Trigger]:
    """When it started or ended, and that devices done or failed were taken."""
    undated = (
        "NEW.status = 'running' AND NEW.started_at IS NULL"
        " OR NEW.status NOT IN ('pending', 'running') AND NEW.completed_at IS NULL"
    )
    return _completed(
        "task",
        f"NEW.devices_taken < NEW.devices_done + NEW.devices_failed OR {undated}",
        f"OLD.status <> NEW.status AND ({undated})",
        COMPLETE_TASK,
    )


def row_history() -> list[pgtrigger.Trigger]:
    """Events, attempts, the device's busy and error states and the task's counts, for all rows of a statement at once.

    Times come from the row's own columns, because a sweep may go by another clock than the database's.
    """
    unfinished = (
        "NEW.status NOT IN ('pending', 'running')"
        " OR NEW.status = 'running' AND (NEW.claimed_by_id IS NULL OR NEW.attempt = 0)"
    )
    return [
        *_completed("row", unfinished, UNFINISHED, COMPLETE_ROW),
        pgtrigger.Trigger(
            name="row_created",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=pgtrigger.Insert,
            referencing=pgtrigger.Referencing(new="became"),
            declare=COUNTED,
            func=ON_INSERT,
        ),
        pgtrigger.Trigger(
            name="row_changed",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=pgtrigger.Update,
            referencing=pgtrigger.Referencing(old="was", new="became"),
            declare=COUNTED,
            func=ON_UPDATE,
        ),
    ]
