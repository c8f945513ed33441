"""The retry table, as data. Counted per failure type on the message; 24 h overall is the last word."""

from datetime import datetime, timedelta

SECONDS = {
    "network": (30, 120, 300, 900, 900),
    "outage": (900,) * 24,
    "rate_limited": (60, 180, 300),
}
LEAST_WAIT, LONGEST_WAIT = 60.0, 300.0


def next_attempt(failure_type: str, used: int, at: datetime, retry_after: float | None = None) -> datetime | None:
    """When to try again after the failure at `at`, or None when the retries of this type are used up."""
    delays = SECONDS[failure_type]
    if used >= len(delays):
        return None
    seconds: float = delays[used]
    if failure_type == "rate_limited" and retry_after is not None:
        seconds = min(max(retry_after, LEAST_WAIT), LONGEST_WAIT)
    return at + timedelta(seconds=seconds)
