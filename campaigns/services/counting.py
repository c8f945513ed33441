"""The derived columns computed from the rows: the backfill of has_pending_work, and the counters."""

from collections import Counter
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction

from campaigns.services.rows import lock_sequences
from campaigns.triggers import COUNTED, TRUE_COUNTS, pending_work

RECOUNT = f"""
    UPDATE sequences s
       SET {", ".join(f"{name}_count = v.{name}" for name in COUNTED)}, enrollments_count = v.enrollments
      FROM ({TRUE_COUNTS}) v WHERE s.id = v.id AND s.id = ANY(%s::uuid[])
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
