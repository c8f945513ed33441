from datetime import datetime, timedelta

from config.retention import purge_append_only
from reminders.models import AlarmDelivery, DeletedAlarm

KEPT = timedelta(days=730)


def purge(now: datetime, dry_run: bool) -> dict[str, int]:
    """A client that has not pulled for two years starts anew; an occurrence's number never comes back."""
    return {
        "alarm_deleted": purge_append_only(DeletedAlarm.objects.filter(deleted_at__lt=now - KEPT), dry_run),
        "alarm_delivery": purge_append_only(
            AlarmDelivery.objects.filter(claimed_at__lt=now - KEPT, state__in=["sent", "failed"]), dry_run
        ),
    }
