"""What a sweep's pages, run record and decisions cost beside the bare statement that changes the same rows."""

import time
from collections.abc import Callable
from datetime import timedelta

from django.db import connection
from django.utils import timezone

from config import sweeping
from config.models import Decision
from devices.models import PC

ROWS, ROUNDS = 10_000, 3


def _silent_pcs() -> None:
    heard = timezone.now() - timedelta(hours=1)
    PC.objects.all().delete()
    PC.objects.bulk_create([PC(pc_number=f"PC-{n:06}", last_heartbeat_at=heard) for n in range(ROWS)])
    PC.objects.update(status=PC.Status.ONLINE)


def _timed(work: Callable[[], object]) -> float:
    """Rows a second, the best of three: the others measure what else the machine was doing."""
    seconds = []
    for _round in range(ROUNDS):
        _silent_pcs()
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return ROWS / min(seconds)


def _bare() -> None:
    with connection.cursor() as cursor:
        for _page in range(ROWS // 500):
            cursor.execute(
                "WITH ripe AS MATERIALIZED (SELECT id FROM pcs WHERE status = 'online' ORDER BY id LIMIT 500"
                " FOR UPDATE SKIP LOCKED), changed AS (UPDATE pcs SET status = 'offline' FROM ripe"
                " WHERE pcs.id = ripe.id RETURNING pcs.id)"
                " INSERT INTO decisions (rule, object_type, object_id, inputs, before, after, won, affected)"
                " SELECT 'bare', 'pcs', id::text, '{}', '{}', '{}', true, 1 FROM changed"
            )


def run() -> None:
    floor = _timed(_bare)
    ours = _timed(lambda: sweeping.run("devices.mark_silent_pcs"))
    assert Decision.objects.count() == 2 * ROUNDS * ROWS
    print(f"sweeps: {ROWS} rows, 500 a page")  # noqa: T201
    print(f"  bare SQL with decisions   {floor:10,.0f} rows/s")  # noqa: T201
    print(f"  devices.mark_silent_pcs   {ours:10,.0f} rows/s   {ours / floor:.2f} of the floor")  # noqa: T201
