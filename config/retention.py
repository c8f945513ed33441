"""How long the house's own history is kept."""

from datetime import datetime, timedelta

from django.db import connection, transaction

from config.models import Decision
from config.triggers import PURGING

DECISIONS_KEPT = timedelta(days=730)
PAGE = 5000


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    return {"decisions": purge_append_only(Decision.objects.filter(created_at__lt=now - DECISIONS_KEPT), dry_run)}


def purge_append_only(rows, dry_run: bool) -> int:  # type: ignore[no-untyped-def]
    """Delete in pages, each its own transaction, so a stopped purge goes on where it was."""
    if dry_run:
        return int(rows.count())
    total = 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config(%s, 'on', true)", [PURGING])
            keys = list(rows.order_by("pk").values_list("pk", flat=True)[:PAGE])
            rows.model._base_manager.filter(pk__in=keys)._raw_delete(rows.db)
        total += len(keys)
        if len(keys) < PAGE:
            return total
