"""The last look before a call: may this message go to this recipient at this moment?"""

from datetime import UTC, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings

QUIET_FROM, QUIET_TO = time(21), time(8)
SWITCHED_OFF_WAIT = timedelta(minutes=5)


def refusal(kind: str, status: int, suppressed: bool, marketing_consent: bool) -> str | None:
    """Why the message must not be sent any more."""
    if status == -2:
        return "unsubscribed"
    if suppressed:
        return "suppressed"
    if status <= 0:
        return "not_sendable"
    if kind == "marketing" and not marketing_consent:
        return "no_consent"
    return None


def zone(name: str, token: str) -> ZoneInfo:
    """The recipient's; a Korean number without one is in Korea. A name that is none must not stop anybody."""
    try:
        return ZoneInfo(name or ("Asia/Seoul" if token.startswith("+82") else settings.TIME_ZONE))
    except (OSError, ValueError):
        return ZoneInfo(settings.TIME_ZONE)


def quiet_until(now: datetime, recipient_zone: Any) -> datetime | None:
    """The end of the recipient's night, or None by day."""
    local = now.astimezone(recipient_zone)
    if QUIET_TO <= local.time() < QUIET_FROM:
        return None
    day = local.date() + timedelta(days=1) if local.time() >= QUIET_FROM else local.date()
    return datetime.combine(day, QUIET_TO, recipient_zone).astimezone(UTC)
