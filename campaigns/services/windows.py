"""Arithmetic of sending windows and allowances. No queries: `now` and the counts are arguments."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from campaigns.models import Sender
from campaigns.models.senders import EVERY_DAY

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
# Behind absurd gaps and queues nobody waits beyond what a date can say.
FURTHEST = timedelta(days=365)
# A tick hands out the slots until the next one.
TICK = timedelta(minutes=1)
# Ticks come a little early or late; a slot missed by less than that would cost its sender a whole tick.
EARLY = timedelta(seconds=1)


@lru_cache(maxsize=1024)
def zone(name: str) -> ZoneInfo:
    """A zone that does not exist (rows written by hand) must not stop the rest: it counts as UTC."""
    try:
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        return ZoneInfo("UTC")


def opening(sender: Sender, lead_zone: str, at: datetime) -> datetime:
    """The first moment from `at` on at which the window is open; `at` itself when it is."""
    place = zone(lead_zone if sender.window_zone == Sender.WindowZone.LEAD else sender.time_zone)
    days = set(sender.window_days) & set(EVERY_DAY) or set(EVERY_DAY)
    if days == set(EVERY_DAY) and sender.window_from is None and sender.window_to is None:
        return at
    today = at.astimezone(place).date()
    # From yesterday: a window that ends before it begins stays open over midnight.
    for ahead in range(-1, 9):
        opens, closes = _bounds(sender, today + ahead * DAY, place)
        if (today + ahead * DAY).isoweekday() in days and at < closes:
            return max(at, opens)
    raise AssertionError("a window with a day opens within nine days")


def _bounds(sender: Sender, day: date, place: ZoneInfo) -> tuple[datetime, datetime]:
    begins, ends = sender.window_from or time(0), sender.window_to or time(0)
    closing = day + DAY if ends <= begins else day
    opens, closes = (datetime.combine(*moment, place).astimezone(UTC) for moment in ((day, begins), (closing, ends)))
    return opens, closes


def is_open(sender: Sender, lead_zone: str, at: datetime) -> bool:
    return opening(sender, lead_zone, at) == at


@dataclass(frozen=True)
class Periods:
    """The calendar day and hour a sender's limits count in, in its own zone."""

    day_start: datetime
    day_end: datetime
    hour_start: datetime
    hour_end: datetime


def periods(sender: Sender, now: datetime) -> Periods:
    local = now.astimezone(zone(sender.time_zone))
    today = datetime.combine(local.date(), time(0), local.tzinfo)
    tomorrow = datetime.combine(local.date() + DAY, time(0), local.tzinfo)
    # The hour begins at its full minute in local time; counted in UTC, so a change of the clocks cannot stretch it.
    hour = now.astimezone(UTC) - timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
    return Periods(today.astimezone(UTC), tomorrow.astimezone(UTC), hour, hour + HOUR)


def daily_limit(sender: Sender, now: datetime) -> int | None:
    """The day's limit, lowered while the sender is new: `ramp_start` on its first day, `ramp_step` more each day."""
    limits = [] if sender.daily_limit is None else [sender.daily_limit]
    if sender.ramp_start is not None:
        place = zone(sender.time_zone)
        age = (now.astimezone(place).date() - sender.created_at.astimezone(place).date()).days
        limits.append(sender.ramp_start + max(0, age) * (sender.ramp_step or 0))
    return min(limits) if limits else None


@dataclass(frozen=True)
class Allowance:
    """How many more this sender may send now; None is no limit. `again_at`: when a used-up one is renewed.

    `last_at`: when its last message went or goes.
    """

    left: int | None
    again_at: datetime
    used_today: int
    used_this_hour: int
    daily: int | None
    hourly: int | None
    last_at: datetime | None = None


def allowance(
    sender: Sender, now: datetime, used_today: int, used_this_hour: int, last_at: datetime | None = None
) -> Allowance:
    when = periods(sender, now)
    daily, hourly = daily_limit(sender, now), sender.hourly_limit
    left_today = None if daily is None else max(0, daily - used_today)
    left_hour = None if hourly is None else max(0, hourly - used_this_hour)
    left = min((left for left in (left_today, left_hour) if left is not None), default=None)
    # What is left after this tick is sent decides which limit renews first.
    again_at = when.day_end if left is not None and left == left_today else when.hour_end
    return Allowance(left, again_at, used_today, used_this_hour, daily, hourly, last_at)


def turn_at(allowed: Allowance, at: datetime, ahead: int) -> datetime | None:
    """When the one behind `ahead` others may go, from `at` on, as the limits renew; None where they let nobody go."""
    if allowed.left is None:
        return at
    by_the_hour = allowed.hourly is not None and (allowed.daily is None or allowed.hourly * 24 <= allowed.daily)
    period, each = (HOUR, allowed.hourly or 0) if by_the_hour else (DAY, allowed.daily or 0)
    renewed = at >= allowed.again_at
    left = each if renewed else allowed.left
    if ahead < left:
        return at
    if not each:
        return None
    behind = (at - allowed.again_at) // period + 1 if renewed else 0
    return allowed.again_at + min((behind + (ahead - left) // each) * period, FURTHEST)


def slots(sender: Sender, now: datetime, last_at: datetime | None) -> Iterator[datetime]:
    """The moments this sender's messages may go, the gap and its random part between them; endless.

    The dice are the last message's: whoever asks again before the next slot is told the same one.
    """
    dice = random.Random(f"{sender.pk}{last_at}")  # noqa: S311  spreads sends, guards nothing
    at = now if last_at is None else max(now, last_at + gap(sender, dice))
    while True:
        yield at
        at += gap(sender, dice)


def gap(sender: Sender, dice: random.Random) -> timedelta:
    jitter = dice.uniform(0, sender.gap_jitter_seconds) if sender.gap_jitter_seconds > 0 else 0
    return timedelta(seconds=max(0, sender.min_gap_seconds) + jitter)


def longest_gap(sender: Sender) -> timedelta:
    return timedelta(seconds=max(0, sender.min_gap_seconds) + max(0, sender.gap_jitter_seconds))


def pace(sender: Sender) -> timedelta:
    """How far apart its messages are on the whole: what takes longer than a tick waits for the tick after it."""
    mean = max(0, sender.min_gap_seconds) + max(0, sender.gap_jitter_seconds) / 2
    ticks = mean / TICK.total_seconds()
    return TICK * (ticks if ticks <= 1 else math.ceil(ticks))


def spaced(sender: Sender) -> bool:
    return sender.min_gap_seconds > 0 or sender.gap_jitter_seconds > 0
