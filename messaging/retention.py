"""What goes for good. Content is cleared long before, by the sweeps; here whole messages go, with their history."""

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q

from config.retention import purge_append_only
from config.triggers import PURGING
from messaging.models import (
    Message,
    MessageAttempt,
    MessageEvent,
    QuotaUsage,
    SubscriptionEvent,
    TrackedLink,
    WebhookDelivery,
    WebhookInbox,
)

PAGE = 2000
WEBHOOKS_KEPT = timedelta(days=90)


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    before = now - settings.MESSAGES_KEPT
    old_events = SubscriptionEvent.objects.filter(occurred_at__lt=before)
    old_usage = QuotaUsage.objects.filter(day__lt=before.date())
    return {
        "messages": _purge_messages(before, dry_run),
        "subscription events": purge_append_only(old_events, dry_run),
        "days of quota usage": old_usage.count() if dry_run else old_usage.delete()[0],
        **_purge_webhooks(now - WEBHOOKS_KEPT, dry_run),
        "tracked links": _purge_pages(TrackedLink.objects.filter(created_at__lt=before), dry_run),
    }


def _purge_webhooks(before: datetime, dry_run: bool) -> dict[str, int]:
    """Nothing that is still to be told, or to be applied, is that old."""
    told = WebhookDelivery.objects.filter(Q(delivered_at__lt=before) | Q(given_up_at__lt=before))
    heard = WebhookInbox.objects.filter(applied_at__lt=before)
    return {"webhook deliveries": _purge_pages(told, dry_run), "provider events": _purge_pages(heard, dry_run)}


def _purge_pages(rows: Any, dry_run: bool) -> int:
    if dry_run:
        return int(rows.count())
    total = 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:PAGE]):
        rows.model.objects.filter(pk__in=keys).delete()
        total += len(keys)
    return total


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
