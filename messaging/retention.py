"""What goes for good. Content is cleared long before, by the sweeps; here whole messages go, with their history."""

from datetime import datetime

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q

from config.retention import purge_append_only
from config.triggers import PURGING
from messaging.models import Message, MessageAttempt, MessageEvent, QuotaUsage, SubscriptionEvent

PAGE = 2000


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    before = now - settings.MESSAGES_KEPT
    old_events = SubscriptionEvent.objects.filter(occurred_at__lt=before)
    old_usage = QuotaUsage.objects.filter(day__lt=before.date())
    return {
        "messages": _purge_messages(before, dry_run),
        "subscription events": purge_append_only(old_events, dry_run),
        "days of quota usage": old_usage.count() if dry_run else old_usage.delete()[0],
    }


def _purge_messages(before: datetime, dry_run: bool) -> int:
    """Failed and archived, or received and expired. Converted ones stay: they are the statistics."""
    over = Message.objects.filter(Q(archived_at__lt=before) | Q(expired_at__lt=before))
    if dry_run:
        return over.count()
    total = 0
    while keys := list(over.order_by("pk").values_list("pk", flat=True)[:PAGE]):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config(%s, 'on', true)", [PURGING])
            MessageEvent.objects.filter(message__in=keys).delete()
            MessageAttempt.objects.filter(message__in=keys).delete()
            Message.objects.filter(pk__in=keys).delete()
        total += len(keys)
    return total
