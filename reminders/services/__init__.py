from reminders.services.operating import delete_alarm, make_due, part_twins, release_claims, reset_counts
from reminders.services.registering import Registration, register_alarm
from reminders.services.sending import BATCH, schedule, send_batch
from reminders.services.settling import settle_deliveries
from reminders.services.syncing import PageChanges, PageText, Pull, pull_changes, sync_pages

__all__ = [
    "BATCH",
    "PageChanges",
    "PageText",
    "Pull",
    "Registration",
    "delete_alarm",
    "make_due",
    "part_twins",
    "pull_changes",
    "register_alarm",
    "release_claims",
    "reset_counts",
    "schedule",
    "send_batch",
    "settle_deliveries",
    "sync_pages",
]
