"""Exact times: the distances, the night at its edges and over clock changes, collisions."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from reminders.services.times import (
    after_sleep,
    distance,
    is_night,
    next_time,
    resolve_alarm_time_conflict,
    retry_time,
)

SEOUL, NEW_YORK, KOLKATA = ZoneInfo("Asia/Seoul"), ZoneInfo("America/New_York"), ZoneInfo("Asia/Kolkata")
KATHMANDU, ADELAIDE = ZoneInfo("Asia/Kathmandu"), ZoneInfo("Australia/Adelaide")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")


def utc(*parts):
    return datetime(*parts, tzinfo=UTC)


@pytest.mark.parametrize(
    ("sent_count", "days"),
    [
        (1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 64), (8, 128), (9, 256), (10, 256), (11, 256),
        (12, 256), (13, 256), (14, 256), (15, 256),
    ],
)  # fmt: skip
def test_the_distance_doubles_to_256_days_and_stays(sent_count, days):
    assert distance(sent_count) == timedelta(days=days)
    now = utc(2026, 3, 4, 3, 25, 10, 5)  # 12:25 in Seoul
    assert next_time(now, sent_count, now, SEOUL) == utc(2026, 3, 4, 3) + timedelta(days=days)


def test_a_far_late_alarm_counts_from_now():
    now = utc(2026, 3, 4, 3, 25)
    assert next_time(utc(2024, 1, 1, 5), 3, now, SEOUL) == utc(2026, 3, 8, 3)


def test_an_alarm_without_a_time_counts_from_now():
    assert next_time(None, 1, utc(2026, 3, 4, 3, 59, 59), SEOUL) == utc(2026, 3, 5, 3)


def test_a_due_time_ahead_of_now_is_the_base():
    assert next_time(utc(2026, 3, 4, 8), 1, utc(2026, 3, 4, 3), SEOUL) == utc(2026, 3, 5, 8)


@pytest.mark.parametrize(
    ("at", "moved"),
    [
        (utc(2026, 3, 4, 12, 59, 59, 999999), None),  # 21:59:59.999999
        (utc(2026, 3, 4, 13), utc(2026, 3, 4, 22)),  # 22:00 → 07:00 the next day
        (utc(2026, 3, 4, 15), utc(2026, 3, 4, 22)),  # 00:00
        (utc(2026, 3, 4, 21, 59, 59, 999999), utc(2026, 3, 4, 22)),  # 06:59:59.999999
        (utc(2026, 3, 4, 22), None),  # 07:00
    ],
)
def test_the_night_in_seoul_ends_at_seven(at, moved):
    assert after_sleep(at, SEOUL) == (moved or at)
    assert is_night(at, SEOUL) == (moved is not None)


@pytest.mark.parametrize(
    ("at", "moved"),
    [
        # Clocks go forward on 2026-03-08: 07:00 is 11:00 UTC, not 12:00.
        (utc(2026, 3, 8, 3), utc(2026, 3, 8, 11)),  # 22:00 EST the evening before
        (utc(2026, 3, 8, 6, 59), utc(2026, 3, 8, 11)),  # 01:59 EST
        (utc(2026, 3, 8, 7), utc(2026, 3, 8, 11)),  # 03:00 EDT
        (utc(2026, 3, 8, 11), utc(2026, 3, 8, 11)),
        (utc(2026, 3, 8, 2, 59), utc(2026, 3, 8, 2, 59)),  # 21:59 EST
        # Back on 2026-11-01: 07:00 is 12:00 UTC, not 11:00.
        (utc(2026, 11, 1, 2), utc(2026, 11, 1, 12)),  # 22:00 EDT the evening before
        (utc(2026, 11, 1, 5, 30), utc(2026, 11, 1, 12)),  # 01:30 the first time
        (utc(2026, 11, 1, 6, 30), utc(2026, 11, 1, 12)),  # 01:30 the second time
        (utc(2026, 11, 1, 11), utc(2026, 11, 1, 12)),  # 06:00 EST
        (utc(2026, 11, 2, 3), utc(2026, 11, 2, 12)),  # 22:00 EST
    ],
)
def test_the_night_in_new_york_over_clock_changes(at, moved):
    assert after_sleep(at, NEW_YORK) == moved


@pytest.mark.parametrize(
    ("zone", "at", "moved"),
    [
        (KOLKATA, utc(2026, 3, 4, 16, 29), utc(2026, 3, 4, 16, 29)),  # 21:59
        (KOLKATA, utc(2026, 3, 4, 16, 30), utc(2026, 3, 5, 1, 30)),  # 22:00
        (KOLKATA, utc(2026, 3, 5, 1), utc(2026, 3, 5, 1, 30)),  # 06:30
        (KOLKATA, utc(2026, 3, 5, 1, 30), utc(2026, 3, 5, 1, 30)),  # 07:00
        (KATHMANDU, utc(2026, 3, 4, 20), utc(2026, 3, 5, 1, 15)),  # 01:45
        (KATHMANDU, utc(2026, 3, 4, 16, 14), utc(2026, 3, 4, 16, 14)),  # 21:59
        (KATHMANDU, utc(2026, 3, 4, 16, 15), utc(2026, 3, 5, 1, 15)),  # 22:00
        (ADELAIDE, utc(2026, 4, 4, 12), utc(2026, 4, 4, 21, 30)),  # 22:30; clocks go back that night
        (LORD_HOWE, utc(2026, 4, 4, 12), utc(2026, 4, 4, 20, 30)),  # 23:00; that night they go back by half an hour
        (LORD_HOWE, utc(2026, 10, 3, 12), utc(2026, 10, 3, 20)),  # 22:30; and here forward
    ],
)
def test_the_night_where_the_offset_is_no_full_hour(zone, at, moved):
    assert after_sleep(at, zone) == moved


def test_the_hour_is_cut_in_utc_before_the_night_is_looked_at():
    # 22:29 in Kolkata one day on would be night; cut to the hour it is 21:30 and stays.
    now = utc(2026, 3, 4, 16, 59)
    assert next_time(now, 1, now, KOLKATA) == utc(2026, 3, 5, 16)


def free(at, *taken, random=lambda: 0.0, zone=SEOUL):
    return resolve_alarm_time_conflict(at, set(taken), zone, random)


def test_a_free_time_stays():
    at = utc(2026, 3, 5, 3)
    assert free(at, at + timedelta(seconds=1)) == at


@pytest.mark.parametrize(
    ("random", "hours", "expected"),
    [
        (0.0, 1, utc(2026, 3, 5, 4)),
        (0.5, 12, utc(2026, 3, 5, 22)),  # 00:00 in Seoul → 07:00
        (0.999999, 23, utc(2026, 3, 6, 2)),
    ],
)
def test_a_taken_time_moves_by_1_to_23_hours_and_out_of_the_night(random, hours, expected):
    at = utc(2026, 3, 5, 3)  # 12:00
    assert after_sleep(at + timedelta(hours=hours), SEOUL) == expected
    assert free(at, at, random=lambda: random) == expected


def test_it_goes_on_until_a_time_is_free():
    at = utc(2026, 3, 5, 3)
    values = iter([0.0, 0.05, 0.1])  # 1, 2 and 3 hours
    taken = [at, at + timedelta(hours=1), at + timedelta(hours=3)]
    assert free(at, *taken, random=lambda: next(values)) == at + timedelta(hours=6)


class Always:
    """Every time is taken but these."""

    def __init__(self, *free):
        self.free, self.asked = free, 0

    def __contains__(self, at):
        self.asked += 1
        return at not in self.free


def test_after_fifty_tries_a_week_later():
    at = utc(2026, 3, 5, 3)
    week = utc(2026, 3, 12, 3)
    taken = Always(week)
    assert resolve_alarm_time_conflict(at, taken, SEOUL, lambda: 0.0) == week
    assert taken.asked == 51


def test_and_again_a_week_while_that_is_taken():
    at = utc(2026, 3, 5, 3)
    assert resolve_alarm_time_conflict(at, Always(utc(2026, 3, 26, 3)), SEOUL, lambda: 0.0) == utc(2026, 3, 26, 3)


def test_the_week_later_is_kept_out_of_the_night():
    at = utc(2026, 10, 28, 11)  # 07:00 EDT; a week on the same instant is 06:00 EST
    assert resolve_alarm_time_conflict(at, Always(utc(2026, 11, 4, 12)), NEW_YORK, lambda: 0.0) == utc(2026, 11, 4, 12)


@pytest.mark.parametrize(
    ("refusals", "minutes"), [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 60), (8, 60), (5000, 60)]
)
def test_refusals_are_tried_again_after_1_to_60_minutes(refusals, minutes):
    now = utc(2026, 3, 4, 3)
    assert retry_time(refusals, now) == now + timedelta(minutes=minutes)
