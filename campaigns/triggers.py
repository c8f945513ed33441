"""has_pending_work and the counters of a sequence, kept by statement triggers. The predicate is written here, once."""

from collections.abc import Callable

import pgtrigger

LIVE = ("active", "paused")
UNFINISHED = ("pending", "processing", "deferred")
# What each counter of a sequence counts of its executions.
COUNTS = {
    "total": "true",
    "sent": "status = 'sent'",
    "failed": "status = 'failed'",
    "skipped": "status = 'skipped'",
    "waiting": "status NOT IN ('sent', 'failed', 'skipped')",
}
COUNTED = tuple(COUNTS)


def listed(states: tuple[str, ...]) -> str:
    return ", ".join(f"'{state}'" for state in states)


def pending_work(sequence: str) -> str:
    """The predicate over the SQL expression `sequence`: a live enrollment has an unfinished execution.

    OFFSET 0 keeps the planner from turning it into a join of all live enrollments with all unfinished executions,
    which looks cheap where the tables are small and goes on being used, by the triggers, when they have grown.
    """
    unfinished = (
        "SELECT 1 FROM sequence_step_executions x"
        f" WHERE x.enrollment_id = e.id AND x.status IN ({listed(UNFINISHED)}) OFFSET 0"
    )
    return (
        "EXISTS (SELECT 1 FROM sequence_enrollments e"
        f" WHERE e.sequence_id = {sequence} AND e.status IN ({listed(LIVE)}) AND EXISTS ({unfinished}) OFFSET 0)"
    )


COUNT_OF_EACH = ", ".join(f"count(*) FILTER (WHERE {condition}) AS {name}" for name, condition in COUNTS.items())

# The counters from the rows of all sequences; the triggers only add up differences.
TRUE_COUNTS = f"""
    SELECT q.id, {", ".join(f"coalesce(x.{name}, 0) AS {name}" for name in COUNTS)},
           coalesce(e.enrollments, 0) AS enrollments
      FROM sequences q
      LEFT JOIN (SELECT sequence_id, count(*) AS enrollments FROM sequence_enrollments GROUP BY 1) e
        ON e.sequence_id = q.id
      LEFT JOIN (SELECT e.sequence_id, {COUNT_OF_EACH}
                   FROM (SELECT enrollment_id, status FROM sequence_step_executions) x
                   JOIN (SELECT id, sequence_id FROM sequence_enrollments) e ON e.id = x.enrollment_id
                  GROUP BY 1) x ON x.sequence_id = q.id
"""


def signed(operation: str, columns: str) -> str:
    """Rows that came count +1, rows that left -1: what stays the same cancels out, however often it is written."""
    came, left = f"SELECT {columns}, 1 AS sign FROM new_rows", f"SELECT {columns}, -1 AS sign FROM old_rows"
    return {"insert": came, "delete": left, "update": f"{came} UNION ALL {left}"}[operation]


def summed(condition: str) -> str:
    return f"coalesce(sum(sign) FILTER (WHERE {condition}), 0)"


SUMS = ", ".join(f"{summed(condition)} AS {name}" for name, condition in COUNTS.items())


# An execution's sequence is its enrollment's. While somebody moves an enrollment, nobody may derive it: movers hold the
# advisory locks of their enrollments alone, all others share theirs, so that the sequences locked below are the right
# ones at commit. A lock stands for a 64th of all enrollments: one open move holds up few others, and a statement over
# a million rows takes no more than 64.
def alone(rows: str) -> str:
    return f"""PERFORM pg_advisory_xact_lock(hashtext('campaigns.moved_enrollments'), part)
           FROM (SELECT DISTINCT uuid_hash(enrollment) & 63 AS part FROM ({rows}) r ORDER BY 1) parts;
        """


def shared(rows: str) -> str:
    return alone(rows).replace("xact_lock", "xact_lock_shared")


# Locking in id order excludes deadlocks between statements; waiting for the lock before the UPDATE takes its snapshot
# lets the second of two transactions see what the first has done. NO KEY: foreign key checks do not wait for us.
APPLY = f"""
    PERFORM 1 FROM sequences WHERE id = ANY(ids) ORDER BY id FOR NO KEY UPDATE;
    UPDATE sequences s
       SET has_pending_work = v.value,
           pending_work_changed_at = CASE WHEN s.has_pending_work IS DISTINCT FROM v.value
                                          THEN clock_timestamp() ELSE s.pending_work_changed_at END,
           {", ".join(f"{name}_count = s.{name}_count + v.{name}" for name in COUNTED)},
           enrollments_count = s.enrollments_count + v.enrollments
      FROM (SELECT q.id, CASE WHEN d.work THEN {pending_work("q.id")} ELSE q.has_pending_work END AS value,
                   {", ".join(f"d.{name}" for name in COUNTED)}, d.enrollments
              FROM unnest(ids, works, {", ".join(f"d_{name}" for name in COUNTED)}, d_enrollments)
                   AS d(id, work, {", ".join(COUNTED)}, enrollments)
              JOIN sequences q ON q.id = d.id AND q.id = ANY(ids)) v
     WHERE s.id = v.id AND s.id = ANY(ids) AND (s.has_pending_work IS DISTINCT FROM v.value OR v.enrollments <> 0
           OR {" OR ".join(f"v.{name} <> 0" for name in COUNTED)});
"""
DECLARE = [
    ("seqscan", "text := current_setting('enable_seqscan')"),
    ("nestloop", "text := current_setting('enable_nestloop')"),
    ("ids", "uuid[]"),
    ("works", "boolean[]"),
    *((f"d_{name}", "bigint[]") for name in (*COUNTED, "enrollments")),
]
COLLECT = f"""
    SELECT array_agg(g.sequence_id), array_agg(g.work), {", ".join(f"array_agg(g.{name})" for name in COUNTED)},
           array_agg(g.enrollments)
      INTO ids, works, {", ".join(f"d_{name}" for name in COUNTED)}, d_enrollments
"""


# The foreign key would take this lock at commit, when we hold the sequences; whoever moves the enrollment at that time
# holds its row and waits for the sequences. Taken first, and in id order, it lets the two wait in line.
LOCK_PARENTS = """PERFORM 1 FROM sequence_enrollments WHERE id = ANY (ARRAY(SELECT enrollment_id FROM new_rows))
         ORDER BY id FOR KEY SHARE;
        """
PARENTS = "SELECT sum(uuid_hash(id)::bigint * uuid_hash(enrollment_id)) FROM"
# An update that moves nothing takes no such lock; the sums tell for a fraction of what comparing the rows would cost.
LOCKS = {
    "insert": LOCK_PARENTS,
    "update": f"IF ({PARENTS} new_rows) <> ({PARENTS} old_rows) THEN {LOCK_PARENTS} END IF;\n        ",
    "delete": "",
}


def derived(lock: str, changed: str, belonging: str, collected: str) -> str:
    """Behind the `lock`: collect what the `changed` rows and those `belonging` to them mean for which sequences, apply.

    What belongs to them is read by an array of ids: sorted, in one pass through the index, it costs a quarter of a
    join that looks for each. A plan is made once per connection, maybe for one row in small tables. So that it serves
    many in large ones there is no sequential scan, where each row would be compared with the whole array, and no
    nested loop.
    """
    return f"""
        PERFORM set_config('enable_seqscan', 'off', true), set_config('enable_nestloop', 'off', true);
        {lock}
        WITH changed AS MATERIALIZED ({changed}), belonging AS MATERIALIZED ({belonging})
        {COLLECT} FROM ({collected}) g;
        IF ids IS NOT NULL THEN {APPLY} END IF;
        PERFORM set_config('enable_seqscan', seqscan, true), set_config('enable_nestloop', nestloop, true);
        RETURN NULL;
    """


def executions_changed(operation: str) -> str:
    """First per enrollment, so that each is looked up once however many of its rows changed."""
    changed = f"""
            SELECT * FROM (SELECT enrollment_id, {summed(f"status IN ({listed(UNFINISHED)})")} AS work, {SUMS}
                             FROM ({signed(operation, "enrollment_id, status")}) r GROUP BY enrollment_id) c
             WHERE work <> 0 OR {" OR ".join(f"{name} <> 0" for name in COUNTED)}"""
    belonging = (
        "SELECT id, sequence_id FROM sequence_enrollments WHERE id = ANY (ARRAY(SELECT enrollment_id FROM changed))"
    )
    collected = f"""
            SELECT e.sequence_id, bool_or(c.work <> 0) AS work,
                   {", ".join(f"sum(c.{name}) AS {name}" for name in COUNTED)}, 0 AS enrollments
              FROM changed c JOIN belonging e ON e.id = c.enrollment_id GROUP BY e.sequence_id"""
    lock = f"{LOCKS[operation]}{shared(signed(operation, 'enrollment_id AS enrollment'))}"
    return derived(lock, changed, belonging, collected)


def enrollments_changed(operation: str) -> str:
    """A moved, new or deleted enrollment takes its executions' counts with it; a changed one only the signal."""
    # A join of the two would be a nested loop: the first pair is all that is asked for.
    moved = "EXISTS (SELECT id, sequence_id FROM new_rows EXCEPT SELECT id, sequence_id FROM old_rows)"
    rows = signed(operation, "id AS enrollment")
    lock = f"IF {moved} THEN {alone(rows)} ELSE {shared(rows)} END IF;" if operation == "update" else shared(rows)
    changed = f"""
            SELECT * FROM (SELECT id, sequence_id, sum(sign) AS placed, {summed(f"status IN ({listed(LIVE)})")} AS live
                             FROM ({signed(operation, "id, sequence_id, status")}) r GROUP BY id, sequence_id) c
             WHERE placed <> 0 OR live <> 0"""
    belonging = """
            SELECT enrollment_id, status FROM sequence_step_executions
             WHERE enrollment_id = ANY (ARRAY(SELECT id FROM changed WHERE placed <> 0))"""
    collected = f"""
            SELECT sequence_id, bool_or(work) AS work, {SUMS}, sum(enrollments) AS enrollments
              FROM (SELECT sequence_id, live <> 0 AS work, NULL AS status, 0 AS sign, placed AS enrollments FROM changed
                    UNION ALL
                    SELECT c.sequence_id, false, x.status, c.placed, 0
                      FROM changed c JOIN belonging x ON x.enrollment_id = c.id) r
             GROUP BY sequence_id"""
    return derived(lock, changed, belonging, collected)


def truncated(enrollments: bool) -> str:
    zero = [f"{name}_count" for name in COUNTED] + (["enrollments_count"] if enrollments else [])
    stale = " OR ".join(["has_pending_work", *(f"{column} <> 0" for column in zero)])
    return f"""
        PERFORM 1 FROM sequences WHERE {stale} ORDER BY id FOR NO KEY UPDATE;
        UPDATE sequences SET has_pending_work = false, {", ".join(f"{column} = 0" for column in zero)},
               pending_work_changed_at = CASE WHEN has_pending_work THEN clock_timestamp()
                                              ELSE pending_work_changed_at END
         WHERE {stale};
        RETURN NULL;
    """


OPERATIONS = {
    "insert": (pgtrigger.Insert, pgtrigger.Referencing(new="new_rows")),
    "update": (pgtrigger.Update, pgtrigger.Referencing(old="old_rows", new="new_rows")),
    "delete": (pgtrigger.Delete, pgtrigger.Referencing(old="old_rows")),
}


def signal_triggers(body: Callable[[str], str], *, enrollments: bool) -> list[pgtrigger.Trigger]:
    found = [
        pgtrigger.Trigger(
            name=f"signal_{name}",
            level=pgtrigger.Statement,
            when=pgtrigger.After,
            operation=operation,
            referencing=referencing,
            declare=DECLARE,
            func=body(name),
        )
        for name, (operation, referencing) in OPERATIONS.items()
    ]
    truncate = pgtrigger.Trigger(
        name="signal_truncate",
        level=pgtrigger.Statement,
        when=pgtrigger.After,
        operation=pgtrigger.Truncate,
        func=truncated(enrollments),
    )
    return [*found, truncate]
