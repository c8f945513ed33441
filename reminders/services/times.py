"""When an alarm comes again: distance, night, collisions. Pure functions of what they are given."""

from collections.abc import Callable, Container
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

NIGHT, MORNING = time(22), time(7)
LONGEST_STEP = 9
TRIES = 50
WEEK = timedelta(days=7)
SOONEST = timedelta(minutes=1)
LONGEST_WAIT = timedelta(minutes=60)

Random = Callable[[], float]


def is_night(at: datetime, zone: ZoneInfo) -> bool:
    local = at.astimezone(zone).time()
    return local >= NIGHT or local < MORNING


def after_sleep(at: datetime, zone: ZoneInfo) -> datetime:
    """The time itself by day, else 07:00 on the user's clock that morning, whatever the clocks do that night."""
    if not is_night(at, zone):
        return at
    local = at.astimezone(zone)
    date = local.date() + timedelta(days=local.time() >= NIGHT)
    return datetime.combine(date, MORNING, zone).astimezone(UTC)


def distance(sent_count: int) -> timedelta:
    """1, 2, 4 … 256 days for the 1st, 2nd, 3rd … 9th send, and 256 for good."""
    return timedelta(days=2 ** (min(sent_count, LONGEST_STEP) - 1))


def next_time(due: datetime | None, sent_count: int, now: datetime, zone: ZoneInfo) -> datetime:
    """Where the alarm goes after a send, as long as no other alarm of the user is there."""
    base = max(due or now, now)
    at = (base + distance(sent_count)).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return max(after_sleep(at, zone), now + SOONEST)


def resolve_alarm_time_conflict(
    initial: datetime, taken: Container[datetime], zone: ZoneInfo, random: Random
) -> datetime:
    """The first free time: `initial`, else some random hours on, at most 50 times, else so many weeks after it."""
    at = initial
    for _try in range(TRIES):
        if at not in taken:
            return at
        at = after_sleep(at + timedelta(hours=1 + int(random() * 23)), zone)
    at = after_sleep(initial + WEEK, zone)
    while at in taken:
        at = after_sleep(at + WEEK, zone)
    return at


def retry_time(refusals: int, now: datetime) -> datetime:
    """1, 2, 4 … 60 minutes after the 1st, 2nd, 3rd … refusal in a row."""
    return now + min(timedelta(minutes=2 ** min(refusals - 1, 6)), LONGEST_WAIT)
