"""A fixed window per client, shared by all web processes over the table throttle_windows."""

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import connection
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle


@dataclass
class Count:
    total: int = 0  # as the table last said, with what this process has handed in since
    unsynced: int = 0
    synced_at: float = 0.0


class Windows:
    """This process's counts of the present window; those of the past one are dropped with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.window: tuple[int, int, int] | None = None
        self.counts: dict[str, Count] = {}

    def take(self, client: str, window: tuple[int, int, int], now: float) -> tuple[bool, int]:
        """Counts one request: whether it fits as far as this process knows, and how many to hand in now."""
        limit = window[0]
        with self.lock:
            if window != self.window:
                self.window, self.counts = window, {}
            count = self.counts.setdefault(client, Count())
            if count.total + count.unsynced >= limit:
                return False, 0
            count.unsynced += 1
            if count.unsynced < max(1, limit // 100) and now - count.synced_at < 1:
                return True, 0
            due, count.unsynced, count.synced_at = count.unsynced, 0, now
            count.total += due
            return True, due

    def learn(self, client: str, window: tuple[int, int, int], total: int) -> None:
        with self.lock:
            if window == self.window and client in self.counts:
                count = self.counts[client]
                count.total = max(count.total, total)


WINDOWS = Windows()


class ClientThrottle(BaseThrottle):
    """settings.API_RATE = (requests, seconds) per user, or per address without one.

    A process hands in its count at every hundredth part of the limit and at least every second: limits below 200 are
    exact, a big one costs a statement per hundred requests and may be overrun by 1 % per process. DRF asks before the
    handler opens its transaction, so the count stays when the request fails.
    """

    def allow_request(self, request: Request, view: Any) -> bool:
        limit, seconds = settings.API_RATE
        now = time.time()
        start = int(now // seconds) * seconds
        self.ends_in = start + seconds - now
        client = ident(request)
        window = (limit, seconds, start)
        fits, due = WINDOWS.take(client, window, now)
        if not due:
            return fits
        total = hand_in(client, start, due)
        WINDOWS.learn(client, window, total)
        return total <= limit

    def wait(self) -> float:
        return self.ends_in


def ident(request: Request) -> str:
    # Not X-Forwarded-For: whoever writes it would choose its own counter.
    user = request.user
    return f"user:{user.pk}" if user and user.is_authenticated else f"ip:{request.META.get('REMOTE_ADDR', '')}"


def hand_in(client: str, start: int, due: int) -> int:
    """Adds and reads in one statement, which the ORM's upsert cannot."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO throttle_windows AS old (client, window_start, count) VALUES (%s, %s, %s)
            ON CONFLICT (client, window_start) DO UPDATE SET count = old.count + EXCLUDED.count
            RETURNING count
            """,
            [client, datetime.fromtimestamp(start, UTC), due],
        )
        return int(cursor.fetchone()[0])
