"""What a person may do to alarms."""

from datetime import datetime
from random import random as system_random
from uuid import UUID

from django.db import transaction

from reminders.models import Alarm
from reminders.services.claiming import Owner, zones_of
from reminders.services.recording import taken_times
from reminders.services.settling import supersede
from reminders.services.times import Random, resolve_alarm_time_conflict


@transaction.atomic
def make_due(ids: list[UUID], now: datetime) -> int:
    """Due at once, as if registered again; a send in flight can no longer change them."""
    alarms = list(Alarm.objects.filter(pk__in=ids).select_for_update().order_by("pk"))
    supersede(alarms, now)
    for alarm in alarms:
        alarm.next_alarm_time, alarm.processed_at, alarm.retry_at, alarm.refusals = now, None, None, 0
        alarm.occurrence += 1
    Alarm.objects.bulk_update(alarms, ["next_alarm_time", "processed_at", "retry_at", "refusals", "occurrence"])
    return len(alarms)


@transaction.atomic
def release_claims(ids: list[UUID]) -> int:
    """For a worker that is known to be dead. The occurrence stays, so what it may have sent is not sent again."""
    claimed = Alarm.objects.filter(pk__in=ids, processed_at__isnull=False)
    keys = list(claimed.select_for_update().order_by("pk").values_list("pk", flat=True))
    return Alarm.objects.filter(pk__in=keys).update(processed_at=None)


@transaction.atomic
def reset_counts(ids: list[UUID]) -> int:
    """From the shortest distance again; the next time stays."""
    keys = list(Alarm.objects.filter(pk__in=ids).select_for_update().order_by("pk").values_list("pk", flat=True))
    return Alarm.objects.filter(pk__in=keys).update(sent_count=1)


def delete_alarm(alarm: Alarm) -> None:
    """The page stays; the tombstone is the database's work."""
    Alarm.objects.filter(pk=alarm.pk).delete()


@transaction.atomic
def part_twins(ids: list[UUID], now: datetime, random: Random = system_random) -> int:
    """Alarms that share their time with another of their user move on, all but one of each group."""
    owners = list(Alarm.objects.filter(pk__in=ids).values_list("application_id", "user_id").distinct())
    zones = zones_of(owners, lock=True)
    rows = Alarm.objects.filter(pk__in=ids, next_alarm_time__gt=now, processed_at=None).select_for_update()
    taken = taken_times(zones, now)
    seen: set[tuple[Owner, datetime]] = set()
    moved = []
    for alarm in rows.order_by("pk"):
        owner, at = (alarm.application_id, alarm.user_id), alarm.next_alarm_time
        assert at
        if (owner, at) in seen:
            alarm.next_alarm_time = resolve_alarm_time_conflict(at, taken[owner], zones[owner], random)
            taken[owner].add(alarm.next_alarm_time)
            moved.append(alarm)
        seen.add((owner, at))
    Alarm.objects.bulk_update(moved, ["next_alarm_time"])
    return len(moved)
