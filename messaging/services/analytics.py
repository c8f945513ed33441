"""Figures about messages, from roll-ups that agree with the rows, and the means to keep them so."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Sum

from messaging.models import Application, MessageRollup
from messaging.triggers import rollups as sql

GROUPS = ("day", "hour", "channel", "kind", "campaign", "tag", "retry")
FOLD_PAGE = 50_000
# What the integrity report compares at most: it is asked for every minute. `recompute_rollups` compares everything.
CHECKED_MESSAGES = 50_000
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FIRST, LAST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)

SIGNATURE_KEYS = {
    "day": "to_char(day AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    "hour": "to_char(hour AT TIME ZONE 'UTC', 'HH24')",
    "channel": "channel_type",
    "kind": "kind",
    "campaign": "NULLIF(campaign, '')",
    "retry": "retries",
}
CELL_KEYS = {
    "day": "to_char(starts_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    "hour": "to_char(starts_at AT TIME ZONE 'UTC', 'HH24')",
    "campaign": "NULLIF(key, '')",
}
DIMENSIONS = {"day": "all", "hour": "all"}


@dataclass(frozen=True)
class Span:
    """A range of time, cut into what whole days, whole hours and single rows have to answer."""

    start: datetime
    end: datetime
    by: str = "day"

    def pieces(self) -> dict[str, list[tuple[datetime, datetime]]]:
        # Only the whole has cells by the hour, and the hour of the day is not in the cells by the day.
        step = HOUR if self.by in ("day", "hour") else DAY
        first, last = _up(self.start, step), _down(self.end, step)
        if first >= last:
            return {"rows": [(self.start, self.end)], "hour": [], "day": []}
        days = (last, last) if self.by == "hour" else (_up(first, DAY), _down(last, DAY))
        hours = [(first, days[0]), (days[1], last)] if days[0] < days[1] else [(first, last)]
        return {"rows": _real([(self.start, first), (last, self.end)]), "hour": _real(hours), "day": _real([days])}


def _real(spans: Sequence[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    return [(start, end) for start, end in spans if start < end]


def _down(at: datetime, step: timedelta) -> datetime:
    return at - (at - FIRST) % step


def _up(at: datetime, step: timedelta) -> datetime:
    return at if at == _down(at, step) else _down(at, step) + step


def message_figures(
    applications: Sequence[UUID], start: datetime, end: datetime, group_by: str, tag: str = ""
) -> dict[str, Any]:
    """{totals, results} of the messages created from `start` to just before `end`."""
    found: dict[str | None, Counted] = defaultdict(Counted)
    totals = Counted()
    start, end = _within(start), _within(end)
    if start < end and applications:
        for key, measure, bucket, n, total in _figures(list(applications), start, end, group_by, tag):
            found[key].add(measure, bucket, n, total)
            totals.add(measure, bucket, n, total)
    ordered = sorted((key for key in found if found[key].counts["created"]), key=lambda key: (key is None, key or ""))
    return {"totals": totals.row(), "results": [{"key": key, **found[key].row()} for key in ordered]}


def accepted_by_day(start: datetime, end: datetime) -> dict[str, list[int]]:
    """channel → accepted messages of each UTC day, from the folded figures alone: the last minute may be missing."""
    rows = MessageRollup.objects.filter(
        tier="day", dimension="channel", measure="sent", starts_at__gte=start, starts_at__lt=end,
        application_id__in=list(Application.objects.values_list("pk", flat=True)),
    )  # fmt: skip
    days = (end - start).days
    found: dict[str, list[int]] = defaultdict(lambda: [0] * days)
    for channel, day, n in rows.order_by().values_list("key", "starts_at").annotate(sum=Sum("n")):
        found[channel][(day - start).days] = int(n)
    return dict(found)


def _within(at: datetime) -> datetime:
    return min(max(at.astimezone(UTC) if FIRST < at < LAST else at, FIRST), LAST)


def _figures(applications: list[UUID], start: datetime, end: datetime, group_by: str, tag: str) -> list[Any]:
    if group_by == "tag":
        query, params = _tagged(applications, Span(start, end, group_by).pieces(), tag)
    else:
        query, params = _grouped(applications, Span(start, end, group_by).pieces(), group_by)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT key, measure, bucket, sum(n), sum(total) FROM ({query}) AS figures"
            f" GROUP BY key, measure, bucket HAVING sum(n) <> 0",
            params,
        )
        return cursor.fetchall()


def _grouped(applications: list[UUID], pieces: dict[str, Any], group_by: str) -> tuple[str, list[Any]]:
    """One statement, hence one snapshot: a fold in the middle neither hides nor doubles anything."""
    parts: list[str] = []
    params: list[Any] = []
    for tier in ("day", "hour"):
        for start, end in pieces[tier]:
            parts.append(
                f"SELECT {CELL_KEYS.get(group_by, 'key')} AS key, measure, bucket, n, total FROM message_rollups"
                " WHERE application_id = ANY(%s) AND tier = %s AND dimension = %s"
                " AND starts_at >= %s AND starts_at < %s"
            )
            params += [applications, tier, DIMENSIONS.get(group_by, group_by), start, end]
            parts.append(
                _measured(
                    "SELECT * FROM message_rollup_deltas WHERE application_id = ANY(%s) AND hour >= %s AND hour < %s",
                    SIGNATURE_KEYS[group_by],
                )
            )
            params += [applications, start, end]
    for start, end in pieces["rows"]:
        parts.append(_measured(sql.signatures(ROWS), SIGNATURE_KEYS[group_by]))
        params += [applications, start, end]
    return " UNION ALL ".join(parts), params


ROWS = (
    f"SELECT {', '.join(sql.COUNTED)}, 1 AS n FROM messages"
    " WHERE application_id = ANY(%s) AND created_at >= %s AND created_at < %s"
)


def _measured(signatures: str, key: str) -> str:
    return sql.measured(signatures, {"key": key}, key)


def _tagged(applications: list[UUID], pieces: dict[str, Any], tag: str) -> tuple[str, list[Any]]:
    """By segment where every message of the days has one, else from the rows."""
    days: list[tuple[datetime, datetime]] = pieces["day"]
    rows = list(pieces["rows"])
    if days and _unsegmented(applications, *days[0]):
        days, rows = [], [*rows, *days]
    parts: list[str] = []
    params: list[Any] = []
    for start, end in days:
        parts.append(
            "SELECT NULLIF(g.tags->>%s, '') AS key, measure, bucket, n, total FROM message_rollups r"
            " JOIN message_segments g ON g.id::text = r.key"
            " WHERE r.application_id = ANY(%s) AND tier = 'day' AND dimension = 'segment'"
            " AND starts_at >= %s AND starts_at < %s"
        )
        parts.append(
            _measured(
                "SELECT d.*, NULLIF(g.tags->>%s, '') AS tag FROM message_rollup_deltas d"
                " LEFT JOIN message_segments g ON g.id = d.segment"
                " WHERE d.application_id = ANY(%s) AND hour >= %s AND hour < %s",
                "tag",
            )
        )
        params += [tag, applications, start, end] * 2
    for start, end in rows:
        parts.append(_measured(sql.signatures(TAGGED_ROWS), "NULLIF(campaign, '')"))
        params += [tag, applications, start, end]
    return " UNION ALL ".join(parts), params


# The tags the recipient had when the message was made; where they were not kept, those of today.
TAGGED_ROWS = (
    f"SELECT {', '.join(f'm.{name}' for name in sql.COUNTED if name != 'campaign')},"
    " COALESCE(g.tags, s.tags)->>%s AS campaign, 1 AS n"
    " FROM messages m JOIN subscriptions s ON s.id = m.subscription_id"
    " LEFT JOIN message_segments g ON g.id = m.segment"
    " WHERE m.application_id = ANY(%s) AND m.created_at >= %s AND m.created_at < %s"
)


def _unsegmented(applications: list[UUID], start: datetime, end: datetime) -> bool:
    """Whether some messages of these whole days are in no segment: then the segments do not add up to the whole."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT EXISTS (SELECT 1 FROM message_rollup_deltas
                            WHERE application_id = ANY(%(applications)s) AND hour >= %(start)s AND hour < %(end)s
                              AND segment IS NULL)
                OR (SELECT COALESCE(sum(CASE dimension WHEN 'all' THEN n ELSE -n END), 0) <> 0 FROM message_rollups
                     WHERE application_id = ANY(%(applications)s) AND tier = 'day' AND dimension IN ('all', 'segment')
                       AND measure = 'created' AND starts_at >= %(start)s AND starts_at < %(end)s)
            """,
            {"applications": applications, "start": start, "end": end},
        )
        return bool(cursor.fetchone()[0])


# --- from counts to rates ----------------------------------------------------------------------------------------


class Counted:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.histograms: dict[str, dict[int, tuple[int, Decimal]]] = defaultdict(dict)

    def add(self, measure: str, bucket: int, n: Decimal, total: Decimal) -> None:
        if measure.endswith("_latency"):
            held = self.histograms[measure].get(bucket, (0, Decimal(0)))
            self.histograms[measure][bucket] = (held[0] + int(n), held[1] + total)
        else:
            self.counts[measure] += int(n)

    def row(self) -> dict[str, Any]:
        c = self.counts
        tried = c["sent"] + c["failed"] + c["errored"]
        return {
            **{name: c[name] for name in COUNT_FIELDS},
            "send_rate": _rate(c["sent"], tried),
            "reach_rate": _rate(c["received"], c["sent"]),
            "conversion_rate": _rate(c["converted"], c["received"]),
            "overall_conversion_rate": _rate(c["converted"], tried),
            "latencies": {name: latency(self.histograms[f"{name}_latency"]) for name in sql.LATENCIES},
            "retry_effectiveness": {name: self._effect(name) for name in ("network", "outage", "rate_limited")},
        }

    def _effect(self, failure: str) -> dict[str, Any]:
        retried, sent = self.counts[f"{failure}_retried"], self.counts[f"{failure}_sent"]
        return {"retried": retried, "sent": sent, "rate": _rate(sent, retried)}


COUNT_FIELDS = (
    "created", "sent", "received", "converted", "failed", "errored", "pending", "cancelled", "failed_after_send",
)  # fmt: skip


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def latency(histogram: dict[int, tuple[int, Decimal]]) -> dict[str, Any]:
    """Seconds. Within a bucket values differ by less than 5 %, and its mean stands for all of them."""
    kept = [(n, float(total) / n / 1e6, total) for _bucket, (n, total) in sorted(histogram.items()) if n > 0]
    count = sum(n for n, _value, _total in kept)
    if not count:
        return {"count": 0, "p50": None, "p95": None, "mean": None}
    mean = float(sum(total for _n, _value, total in kept)) / count / 1e6
    steps = [(n, value) for n, value, _total in kept]
    shares = {"p50": 0.5, "p95": 0.95}
    return {
        "count": count,
        **{name: round(_percentile(steps, count, share), 6) for name, share in shares.items()},
        "mean": round(mean, 6),
    }


def _percentile(steps: list[tuple[int, float]], count: int, share: float) -> float:
    """As percentile_cont: between the two neighbours of the rank."""
    rank = share * (count - 1)
    low, high = _at(steps, int(rank)), _at(steps, min(int(rank) + 1, count - 1))
    return low + (high - low) * (rank - int(rank))


def _at(steps: list[tuple[int, float]], place: int) -> float:
    for n, value in steps:
        if place < n:
            return value
        place -= n
    return steps[-1][1]


# --- keeping the roll-ups ----------------------------------------------------------------------------------------


def fold_deltas(limit: int = FOLD_PAGE) -> int:
    """Move the oldest deltas into the roll-ups; the number taken. One statement: a reader sees all of it or nothing.

    The picked ones are materialized: as a plain subquery the planner may run it again for each row, and each time it
    passes over what is locked and finds others, beyond the limit.
    """
    source = sql.cells("SELECT * FROM taken")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH picked AS MATERIALIZED (
                SELECT id FROM message_rollup_deltas ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED),
            taken AS (DELETE FROM message_rollup_deltas WHERE id IN (SELECT id FROM picked) RETURNING *),
            added AS ({sql.add_cells(source)})
            SELECT count(*) FROM taken
            """,
            [limit],
        )
        return int(cursor.fetchone()[0])


def drifted_applications(now: datetime) -> list[UUID]:
    """Whose stored figures differ from their messages. Of a big table the latest hours are compared, by the hour."""
    start, whole = _checked_from()
    tiers = ["day", "hour"] if whole else ["hour"]
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT DISTINCT application_id FROM ({_drift()}) AS drift WHERE tier = ANY(%s)",
            [*_drift_params(start, LAST), tiers],
        )
        return [row[0] for row in cursor.fetchall()]


def heal_drift(now: datetime) -> Counter[str]:
    start, _whole = _checked_from()
    return Counter({"corrected": sum(corrected for _day, corrected in recompute_rollups(start, LAST))})


def recompute_rollups(start: datetime | None = None, end: datetime | None = None) -> Iterator[tuple[datetime, int]]:
    """Day by day, each its own transaction: (day, number of figures that were wrong). Safe beside everything else."""
    at = _down(_within(start or FIRST), DAY)
    until = _up(_within(end or LAST), DAY)
    while (day := _next_day(at, until)) is not None:
        yield day, _correct(day, day + DAY)
        at = day + DAY


def _correct(start: datetime, end: datetime) -> int:
    """Adds the difference instead of replacing, in one statement: what others fold or write meanwhile stays right."""
    with transaction.atomic(), connection.cursor() as cursor:
        # Two corrections at once would both add the same difference.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('messaging.recompute_rollups'))")
        cursor.execute(sql.add_cells(_difference()), _drift_params(start, end))
        return cursor.rowcount


def _next_day(at: datetime, until: datetime) -> datetime | None:
    """The first day with messages, cells or deltas; over the index of each application, not over the table."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT min(found) FROM (
                SELECT (SELECT min(created_at) FROM messages WHERE application_id = a.id AND created_at >= %(at)s)
                       AS found FROM applications a
                UNION ALL SELECT min(starts_at) FROM message_rollups WHERE tier = 'day' AND starts_at >= %(at)s
                UNION ALL SELECT min(hour) FROM message_rollup_deltas WHERE hour >= %(at)s) AS candidates
            """,
            {"at": at},
        )
        found = cursor.fetchone()[0]
    return _down(found.astimezone(UTC), DAY) if found is not None and found < until else None


def _difference() -> str:
    """Cells by which the rows exceed what is stored and what is still to be folded."""
    span = "created_at >= %s AND created_at < %s"
    rows = sql.signatures(f"SELECT {', '.join(sql.COUNTED)}, 1 AS n FROM messages WHERE {span}")
    columns = ", ".join(sql.CELL)
    return f"""
        {sql.cells(rows)}
        UNION ALL SELECT {columns}, -n, -total FROM message_rollups WHERE starts_at >= %s AND starts_at < %s
        UNION ALL SELECT {columns}, -n, -total FROM (
            {sql.cells("SELECT * FROM message_rollup_deltas WHERE hour >= %s AND hour < %s")}) AS unfolded
    """


def _drift() -> str:
    columns = ", ".join(sql.CELL)
    wrong = "HAVING sum(n) <> 0 OR sum(total) <> 0"
    return f"SELECT {columns} FROM ({_difference()}) AS difference GROUP BY {columns} {wrong}"


def _drift_params(start: datetime, end: datetime) -> list[datetime]:
    return [start, end] * 3


def _checked_from() -> tuple[datetime, bool]:
    """The first of the latest whole hours that together hold CHECKED_MESSAGES at most, and whether that is all."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT min(starts_at) FILTER (WHERE running <= %(most)s), COALESCE(max(running), 0) <= %(most)s FROM (
                SELECT starts_at, sum(sum(n)) OVER (ORDER BY starts_at DESC) AS running FROM message_rollups
                 WHERE tier = 'hour' AND dimension = 'all' AND measure = 'created' GROUP BY starts_at) AS hours
            """,
            {"most": CHECKED_MESSAGES},
        )
        start, whole = cursor.fetchone()
    return (FIRST if whole else start.astimezone(UTC) if start else LAST), whole
