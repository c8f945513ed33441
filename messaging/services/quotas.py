"""What an application may still send today and this month (UTC). Counted only while it has a quota."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from django.db import connection
from django.db.models import F

from messaging.models import Application, QuotaUsage


class Allowance:
    """What is left of an application's quota, its usage row locked until the transaction ends."""

    def __init__(self, application: Application, now: datetime) -> None:
        self.application, self.now = application, now
        self.today = now.astimezone(UTC).date()
        self.taken = 0
        self.daily, self.monthly = self._left()

    def take(self) -> bool:
        if any(left is not None and left <= self.taken for left in (self.daily, self.monthly)):
            return False
        self.taken += 1
        return True

    def give_back(self, count: int) -> None:
        self.taken -= count

    def charge(self) -> None:
        if self.taken:
            QuotaUsage.objects.filter(application=self.application, day=self.today).update(used=F("used") + self.taken)

    def retry_after(self) -> float:
        month_full = self.monthly is not None and self.monthly <= self.taken
        next_day = _next_month(self.today) if month_full else self.today + timedelta(days=1)
        return (datetime(next_day.year, next_day.month, next_day.day, tzinfo=UTC) - self.now).total_seconds()

    def _left(self) -> tuple[int | None, int | None]:
        month = self.today.replace(day=1)
        used = _locked_usage(self.application.pk, self.today, month)
        daily, monthly = self.application.daily_quota, self.application.monthly_quota
        return (
            None if daily is None else daily - used.get(self.today, 0),
            None if monthly is None else monthly - sum(used.values()),
        )


def allowances(applications: Iterable[Application], now: datetime) -> dict[UUID, Allowance]:
    """In the order of the ids, so two batches over the same applications cannot block each other for good."""
    found = {application.pk: application for application in applications if limited(application)}
    return {pk: Allowance(found[pk], now) for pk in sorted(found)}


def limited(application: Application) -> bool:
    return application.daily_quota is not None or application.monthly_quota is not None


def _next_month(day: date) -> date:
    return (day.replace(day=28) + timedelta(days=4)).replace(day=1)


def _locked_usage(application_id: UUID, today: date, month: date) -> dict[date, int]:
    rows = QuotaUsage.objects.filter(application_id=application_id, day=today)
    if not rows.select_for_update().exists():
        _start_day(application_id, today, month)
        list(rows.select_for_update())
    used = QuotaUsage.objects.filter(application_id=application_id, day__gte=month, day__lte=today)
    return dict(used.values_list("day", "used"))


def _start_day(application_id: UUID, today: date, month: date) -> None:
    """Today's row, and those of days nobody counted, from the messages that are there; the first to do it wins."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO quota_usage (application_id, day, used)
            SELECT %(application)s, day, sum(used) FROM (
                SELECT (created_at AT TIME ZONE 'UTC')::date AS day, 1 AS used FROM messages
                 WHERE application_id = %(application)s AND NOT (error_reason = 'cancelled' AND attempt_count = 0
                       AND status = 'failed') IS TRUE
                   AND created_at >= GREATEST(%(month)s, (SELECT max(day) + 1 FROM quota_usage
                                                           WHERE application_id = %(application)s))::timestamp
                                     AT TIME ZONE 'UTC'
                   AND created_at < (%(today)s::date + 1)::timestamp AT TIME ZONE 'UTC'
                UNION ALL SELECT %(today)s::date, 0) AS counted
             GROUP BY day
            ON CONFLICT (application_id, day) DO NOTHING
            """,
            {"application": application_id, "today": today, "month": month},
        )


def refund(charged: Iterable[tuple[UUID, datetime]]) -> None:
    """(application, created_at) of messages that were cancelled before any attempt."""
    counts = Counter((application, created.astimezone(UTC).date()) for application, created in charged)
    for (application, day), count in sorted(counts.items()):
        QuotaUsage.objects.filter(application_id=application, day=day).update(used=F("used") - count)
