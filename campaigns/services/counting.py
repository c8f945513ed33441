"""The derived columns computed from the rows: the backfill of has_pending_work, and the counters."""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction

from campaigns.services.rows import lock_sequences
from campaigns.triggers import COUNTED, pending_work

RECOUNT = f"""
    UPDATE sequences s
       SET {", ".join(f"{name}_count = v.{name}" for name in COUNTED)}, enrollments_count = v.enrollments
      FROM (SELECT q.id, count(x.id) AS total, count(x.id) FILTER (WHERE x.status = 'sent') AS sent,
                   count(x.id) FILTER (WHERE x.status = 'failed') AS failed,
                   count(x.id) FILTER (WHERE x.status = 'skipped') AS skipped,
                   count(x.id) FILTER (WHERE x.status NOT IN ('sent', 'failed', 'skipped')) AS waiting,
                   count(DISTINCT e.id) AS enrollments
              FROM sequences q
              LEFT JOIN sequence_enrollments e ON e.sequence_id = q.id
              LEFT JOIN sequence_step_executions x ON x.enrollment_id = e.id
             WHERE q.id = ANY(%s::uuid[])
             GROUP BY q.id) v
     WHERE s.id = v.id
"""
BACKFILL = f"""
    UPDATE sequences s SET has_pending_work = v.value, pending_work_changed_at = clock_timestamp()
      FROM (SELECT q.id, {pending_work("q.id")} AS value FROM sequences q WHERE q.id = ANY(%s::uuid[])) v
     WHERE s.id = v.id AND s.has_pending_work IS DISTINCT FROM v.value
"""


def recount(ids: Collection[UUID], now: datetime) -> Counter[str]:
    with transaction.atomic(), connection.cursor() as cursor:
        locked = [row.pk for row in lock_sequences(ids)]
        cursor.execute(RECOUNT, [locked])
        return Counter(recounted=cursor.rowcount)


def backfill(ids: Collection[UUID]) -> int:
    """Layer 3: whoever holds the lock sees what the triggers of others will not count again."""
    with transaction.atomic(), connection.cursor() as cursor:
        locked = [row.pk for row in lock_sequences(ids)]
        cursor.execute(BACKFILL, [locked])
        return cursor.rowcount
