"""Roll-ups that cannot disagree with the rows: each statement on messages appends what it changed, summed up.

A message's *signature* is all that the analytics count of it. A statement that changes signatures writes, per distinct
one, how many messages left it (n < 0) or took it on. These deltas are only ever inserted, so parallel dispatchers never
wait for each other; a sweep folds them into message_rollups, and readers add up both.
"""

import pgtrigger

# Neighbouring bounds of the histograms differ by 5 %: ln(1.05).
LOG_STEP = 0.04879016416943205

COUNTED = (
    "application_id", "created_at", "channel_type", "kind", "campaign", "segment", "status", "sent_at", "received_at",
    "converted_at", "error_reason", "receipt_implied", "network_retries", "outage_retries", "rate_limited_retries",
)  # fmt: skip
LATENCIES = ("send", "receive", "convert", "total")
SIGNATURE = (
    "application_id", "hour", "channel_type", "kind", "campaign", "segment", "network_retries", "outage_retries",
    "rate_limited_retries", "status", "sent", "received", "converted", "cancelled",
    *(f"{name}_bucket" for name in LATENCIES),
)  # fmt: skip
SUMS = tuple(f"{name}_us" for name in LATENCIES)


def _microseconds(later: str, earlier: str, condition: str = "true") -> str:
    return (
        f"CASE WHEN {condition} AND {later} IS NOT NULL AND {earlier} IS NOT NULL"
        f" THEN GREATEST(0, (date_part('epoch', {later} - {earlier}) * 1e6)::bigint) END"
    )


def signatures(source: str) -> str:
    """SELECT of signatures and `n` from rows that have the counted columns of messages and `n`."""
    buckets = ", ".join(
        f"CASE WHEN {us} < 1 THEN 0 WHEN {us} >= 1 THEN 1 + floor(ln({us}::float8) / {LOG_STEP})::int END"
        f" AS {name}_bucket"
        for name, us in zip(LATENCIES, SUMS, strict=True)
    )
    return f"""
        SELECT application_id, date_trunc('hour', created_at, 'UTC') AS hour, channel_type, kind,
               COALESCE(campaign, '') AS campaign, segment,
               network_retries, outage_retries, rate_limited_retries, status,
               sent_at IS NOT NULL AS sent, received_at IS NOT NULL AS received, converted_at IS NOT NULL AS converted,
               status = 'failed' AND sent_at IS NULL AND error_reason = 'cancelled' AS cancelled,
               {buckets}, n, {", ".join(f"COALESCE({us}, 0) * n AS {us}" for us in SUMS)}
          FROM (SELECT *, {_microseconds("sent_at", "created_at")} AS send_us,
                       {_microseconds("received_at", "sent_at", "NOT receipt_implied")} AS receive_us,
                       {_microseconds("converted_at", "received_at", "NOT receipt_implied")} AS convert_us,
                       {_microseconds("converted_at", "created_at")} AS total_us
                  FROM ({source}) AS counted) AS timed
    """


def summed(source: str) -> str:
    """The same signatures added up; what cancels out is gone."""
    changed = " OR ".join(f"sum({name}) <> 0" for name in ("n", *SUMS))
    return f"""
        SELECT {", ".join(SIGNATURE)}, sum(n)::bigint AS n, {", ".join(f"sum({us}) AS {us}" for us in SUMS)}
          FROM ({source}) AS signed GROUP BY {", ".join(SIGNATURE)} HAVING {changed}
    """


# A row is born pending, with nothing to tell of it yet: no time to measure, no figure to set off.
BORN = f"""
    INSERT INTO message_rollup_deltas ({", ".join((*SIGNATURE, "n", *SUMS))})
    SELECT application_id, date_trunc('hour', created_at, 'UTC'), channel_type, kind, COALESCE(campaign, ''), segment,
           network_retries, outage_retries, rate_limited_retries, 'pending', false, false, false, false,
           {"NULL, " * len(LATENCIES)} count(*), {", ".join("0" for _name in SUMS)}
      FROM new_rows GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9;
"""


def _columns(alias: str) -> str:
    return ", ".join(f"{alias}.{name}" for name in COUNTED)


def _append(source: str) -> str:
    columns = ", ".join((*SIGNATURE, "n", *SUMS))
    return f"INSERT INTO message_rollup_deltas ({columns}) {summed(signatures(source))};"


def _hashed(statement: str) -> str:
    """The plan is kept from a session's first UPDATE, which may be of one row; kept as a nested loop it would take 500
    rows 250,000 steps. Planning anew each time, as the events do, would cost this long statement more than it does."""
    return f"""
        PERFORM set_config('enable_nestloop', 'off', true);
        {statement}
        PERFORM set_config('enable_nestloop', nested, true);
        RETURN NULL;
    """


ROLLUP_TRIGGERS = [
    pgtrigger.Trigger(
        name="rollup_created",
        level=pgtrigger.Statement,
        when=pgtrigger.After,
        operation=pgtrigger.Insert,
        referencing=pgtrigger.Referencing(new="new_rows"),
        func=f"{BORN} RETURN NULL;",
    ),
    # A claim or a lease moves nothing that is counted, and is passed over before anything is computed.
    pgtrigger.Trigger(
        name="rollup_moved",
        level=pgtrigger.Statement,
        when=pgtrigger.After,
        operation=pgtrigger.Update,
        referencing=pgtrigger.Referencing(old="old_rows", new="new_rows"),
        declare=[("nested", "text := current_setting('enable_nestloop')")],
        func=_hashed(
            _append(
                f"SELECT s.* FROM old_rows o JOIN new_rows w ON w.id = o.id"
                f" CROSS JOIN LATERAL (VALUES ({_columns('o')}, -1), ({_columns('w')}, 1))"
                f" AS s ({', '.join(COUNTED)}, n)"
                f" WHERE ({_columns('o')}) IS DISTINCT FROM ({_columns('w')})"
            )
        ),
    ),
    pgtrigger.Trigger(
        name="rollup_deleted",
        level=pgtrigger.Statement,
        when=pgtrigger.After,
        operation=pgtrigger.Delete,
        referencing=pgtrigger.Referencing(old="old_rows"),
        func=_append(f"SELECT {_columns('o')}, -1 AS n FROM old_rows o") + " RETURN NULL;",
    ),
]


# --- from signatures to figures ----------------------------------------------------------------------------------

COUNTS = {
    "created": "true",
    "sent": "sent",
    "received": "received",
    "converted": "converted",
    "failed": "status = 'failed' AND NOT sent AND NOT cancelled",
    "errored": "status = 'errored'",
    "pending": "status = 'pending'",
    "cancelled": "cancelled",
    "failed_after_send": "status = 'failed' AND sent",
    "network_retried": "network_retries > 0",
    "network_sent": "network_retries > 0 AND sent",
    "outage_retried": "outage_retries > 0",
    "outage_sent": "outage_retries > 0 AND sent",
    "rate_limited_retried": "rate_limited_retries > 0",
    "rate_limited_sent": "rate_limited_retries > 0 AND sent",
}
RETRIES = "(network_retries + outage_retries + rate_limited_retries)::text"
CELL = ("application_id", "tier", "dimension", "starts_at", "key", "measure", "bucket")


def measured(source: str, keys: dict[str, str], grouping: str) -> str:
    """(keys…, measure, bucket, n, total) of signatures, which are read once and counted side by side.

    `keys` are the output's names and expressions; `grouping` is what GROUP BY needs for them.
    """
    chosen = ", ".join(f"{expression} AS {name}" for name, expression in keys.items())
    counts = ", ".join(f"sum(n) FILTER (WHERE {test}) AS {name}" for name, test in COUNTS.items())
    histograms = " ".join(
        f"UNION ALL SELECT {chosen}, '{name}_latency', {name}_bucket, sum(n), sum({name}_us) FROM s"
        f" WHERE {name}_bucket IS NOT NULL GROUP BY {name}_bucket, {grouping}"
        for name in LATENCIES
    )
    return f"""
        (WITH s AS MATERIALIZED (
            SELECT *, {RETRIES} AS retries, date_trunc('day', hour, 'UTC') AS day FROM ({source}) AS signatures)
        SELECT {", ".join(f"w.{name}" for name in keys)}, m.measure, 0 AS bucket, m.n, 0::numeric AS total
          FROM (SELECT {chosen}, {counts} FROM s GROUP BY {grouping}) AS w
         CROSS JOIN LATERAL (VALUES {", ".join(f"('{name}', w.{name})" for name in COUNTS)}) AS m (measure, n)
         WHERE m.n IS NOT NULL
        {histograms})
    """


def cells(source: str) -> str:
    """The stored form. Only the whole is kept by the hour: by kind and campaign, cells would be as many as messages."""
    keys = {
        "application_id": "application_id",
        "tier": "CASE WHEN GROUPING(hour) = 0 THEN 'hour' ELSE 'day' END",
        "dimension": "CASE WHEN GROUPING(channel_type) = 0 THEN 'channel' WHEN GROUPING(kind) = 0 THEN 'kind'"
        " WHEN GROUPING(campaign) = 0 THEN 'campaign' WHEN GROUPING(retries) = 0 THEN 'retry'"
        " WHEN GROUPING(segment) = 0 THEN 'segment' ELSE 'all' END",
        "starts_at": "COALESCE(hour, day)",
        "key": "COALESCE(channel_type, kind, campaign, retries, segment::text, '')",
    }
    sets = "(hour), (day), (day, channel_type), (day, kind), (day, campaign), (day, retries), (day, segment)"
    found = measured(source, keys, f"application_id, GROUPING SETS ({sets})")
    # What is in no segment is not kept: a reader sees it by what is missing from the whole.
    return f"(SELECT * FROM ({found}) AS every_cell WHERE NOT (dimension = 'segment' AND key = ''))"


def add_cells(source: str) -> str:
    """Adds cells to the stored ones. In the order of their key, so two of these never wait for each other in a ring."""
    return f"""
        INSERT INTO message_rollups AS stored ({", ".join(CELL)}, n, total)
        SELECT {", ".join(CELL)}, sum(n), sum(total) FROM ({source}) AS added
         GROUP BY {", ".join(CELL)} HAVING sum(n) <> 0 OR sum(total) <> 0 ORDER BY {", ".join(CELL)}
        ON CONFLICT ({", ".join(CELL)}) DO UPDATE
           SET n = stored.n + EXCLUDED.n, total = stored.total + EXCLUDED.total
        RETURNING application_id
    """
