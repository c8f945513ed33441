"""has_pending_work and the counters of a sequence, kept by statement triggers. The predicate is written here, once."""

from collections.abc import Callable

import pgtrigger

LIVE = ("active", "paused")
UNFINISHED = ("pending", "processing", "deferred")
COUNTED = ("total", "sent", "failed", "skipped", "waiting")


def listed(states: tuple[str, ...]) -> str:
    return ", ".join(f"'{state}'" for state in states)


def pending_work(sequence: str) -> str:
    """The predicate over the SQL expression `sequence`: a live enrollment has an unfinished execution."""
    return (
        "EXISTS (SELECT 1 FROM sequence_enrollments e JOIN sequence_step_executions x ON x.enrollment_id = e.id"
        f" WHERE e.sequence_id = {sequence} AND e.status IN ({listed(LIVE)}) AND x.status IN ({listed(UNFINISHED)}))"
    )


# The counters from the rows of all sequences; the triggers only add up differences.
TRUE_COUNTS = """
    SELECT q.id, coalesce(x.total, 0) AS total, coalesce(x.sent, 0) AS sent, coalesce(x.failed, 0) AS failed,
           coalesce(x.skipped, 0) AS skipped, coalesce(x.waiting, 0) AS waiting,
           coalesce(e.enrollments, 0) AS enrollments
      FROM sequences q
      LEFT JOIN (SELECT sequence_id, count(*) AS enrollments FROM sequence_enrollments GROUP BY 1) e
        ON e.sequence_id = q.id
      LEFT JOIN (SELECT e.sequence_id, count(*) AS total, count(*) FILTER (WHERE x.status = 'sent') AS sent,
                        count(*) FILTER (WHERE x.status = 'failed') AS failed,
                        count(*) FILTER (WHERE x.status = 'skipped') AS skipped,
                        count(*) FILTER (WHERE x.status NOT IN ('sent', 'failed', 'skipped')) AS waiting
                   FROM sequence_step_executions x JOIN sequence_enrollments e ON e.id = x.enrollment_id
                  GROUP BY 1) x ON x.sequence_id = q.id
"""

# What a status means to the sequence: work (holds completion), waiting (for enrichment), or one of the three ends.
MEANING = f"CASE WHEN status IN ({listed(UNFINISHED)}) THEN 'work' ELSE status END"

# Rows that came (+1) or left (-1), told by their meaning; what stays the same cancels out, however often it is written.
CAME = "SELECT {columns}, 1 AS sign FROM ({new}) came"
LEFT = "SELECT {columns}, -1 AS sign FROM ({old}) gone"


def difference(operation: str, columns: str, selected: str) -> str:
    new, old = f"SELECT {selected} FROM new_rows", f"SELECT {selected} FROM old_rows"
    if operation == "insert":
        return CAME.format(columns=columns, new=new)
    if operation == "delete":
        return LEFT.format(columns=columns, old=old)
    came = CAME.format(columns=columns, new=f"{new} EXCEPT ALL {old}")
    return f"{came} UNION ALL {LEFT.format(columns=columns, old=f'{old} EXCEPT ALL {new}')}"


def sums(meaning: str = "c.meaning", sign: str = "c.sign") -> str:
    """Per sequence: how much each counter moves, as the arrays d_total … d_waiting."""
    return f"""
        coalesce(sum({sign}) FILTER (WHERE {meaning} IS NOT NULL), 0) AS total,
        coalesce(sum({sign}) FILTER (WHERE {meaning} = 'sent'), 0) AS sent,
        coalesce(sum({sign}) FILTER (WHERE {meaning} = 'failed'), 0) AS failed,
        coalesce(sum({sign}) FILTER (WHERE {meaning} = 'skipped'), 0) AS skipped,
        coalesce(sum({sign}) FILTER (WHERE {meaning} IN ('work', 'awaiting_enrichment')), 0) AS waiting
    """


# An execution's sequence is its enrollment's. While somebody moves enrollments, nobody may derive it: movers hold this
# advisory lock alone, all others share it, so that the sequences locked below are the right ones at commit.
SHARE = "PERFORM pg_advisory_xact_lock_shared(hashtext('campaigns.moved_enrollments'));"
ALONE = "PERFORM pg_advisory_xact_lock(hashtext('campaigns.moved_enrollments'));"

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
              JOIN sequences q ON q.id = d.id) v
     WHERE s.id = v.id AND (s.has_pending_work IS DISTINCT FROM v.value OR v.enrollments <> 0
           OR {" OR ".join(f"v.{name} <> 0" for name in COUNTED)});
    RETURN NULL;
"""
DECLARE = [
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
LOCK_PARENTS = """PERFORM 1 FROM sequence_enrollments WHERE id IN (SELECT enrollment_id FROM new_rows)
         ORDER BY id FOR KEY SHARE;
        """
PARENTS = "SELECT sum(uuid_hash(enrollment_id)::bigint) FROM"
# An update that moves nothing takes no such lock; the sums tell for a fraction of what comparing the rows would cost.
LOCKS = {
    "insert": LOCK_PARENTS,
    "update": f"IF ({PARENTS} new_rows) <> ({PARENTS} old_rows) THEN {LOCK_PARENTS} END IF;\n        ",
    "delete": "",
}


def executions_changed(operation: str) -> str:
    """First per enrollment, so that each is looked up once however many of its rows changed."""
    changes = difference(operation, "enrollment_id, meaning", f"id, enrollment_id, {MEANING} AS meaning")
    return f"""
        {LOCKS[operation]}{SHARE}
        {COLLECT}
          FROM (SELECT e.sequence_id, bool_or(c.work) AS work,
                       {", ".join(f"sum(c.{name}) AS {name}" for name in COUNTED)}, 0 AS enrollments
                  FROM (SELECT c.enrollment_id, bool_or(c.meaning = 'work') AS work, {sums()} FROM ({changes}) c
                         GROUP BY c.enrollment_id) c
                  JOIN sequence_enrollments e ON e.id = c.enrollment_id
                 GROUP BY e.sequence_id) g;
        IF ids IS NULL THEN RETURN NULL; END IF;
        {APPLY}
    """


def enrollments_changed(operation: str) -> str:
    """A moved, new or deleted enrollment takes its executions' counts with it; a changed one only the signal."""
    columns = "id, sequence_id, live"
    changes = difference(operation, columns, f"id, sequence_id, status IN ({listed(LIVE)}) AS live")
    places = difference(operation, "id, sequence_id", "id, sequence_id")
    moved = (
        f"IF EXISTS (SELECT 1 FROM old_rows o JOIN new_rows n USING (id) WHERE o.sequence_id <> n.sequence_id)"
        f" THEN {ALONE} ELSE {SHARE} END IF;"
        if operation == "update"
        else SHARE
    )
    return f"""
        {moved}
        {COLLECT}
          FROM (SELECT c.sequence_id, bool_or(c.work) AS work, {sums()}, sum(c.enrollments) AS enrollments
                  FROM (SELECT sequence_id, true AS work, NULL AS meaning, 0 AS sign, 0 AS enrollments
                          FROM ({changes}) seen WHERE live
                        UNION ALL
                        SELECT sequence_id, false, NULL, 0, sign FROM ({places}) placed
                        UNION ALL
                        SELECT p.sequence_id, false, {MEANING.replace("status", "x.status")}, p.sign, 0
                          FROM ({places}) p JOIN sequence_step_executions x ON x.enrollment_id = p.id) c
                 GROUP BY c.sequence_id) g;
        IF ids IS NULL THEN RETURN NULL; END IF;
        {APPLY}
    """


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
