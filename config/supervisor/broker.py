"""django-q2's brokers with a private lane: a canary must be answered by the cluster it was asked of, not by another."""

from datetime import timedelta
from time import sleep
from typing import Any

import redis
import structlog
from django import db
from django.utils import timezone
from django_q.brokers.orm import ORM
from django_q.brokers.redis_broker import Redis
from django_q.conf import Conf
from redis.exceptions import RedisError

log = structlog.get_logger("broker")
PATIENCE = 1.0  # seconds between two tries while the database or Redis is away
ANSWER_WITHIN = 2.0  # seconds for Redis to answer; a pop waits one of them for work

# Set by child.py before the cluster forks; a cluster started otherwise has the shared queue only.
lane = ""


class LaneORM(ORM):
    """Claims in one statement, oldest first, SKIP LOCKED: the original reads and claims apart and in no order."""

    def dequeue(self) -> list[tuple[int, str]] | None:
        try:
            return self._claim() or sleep(Conf.POLL)  # type: ignore[func-returns-value]
        except db.Error as error:
            # Left to the pusher this is ten seconds of sleep, its death and a new one.
            log.warning("broker_away", error=str(error))
            return sleep(PATIENCE)  # type: ignore[func-returns-value]

    def _claim(self) -> list[tuple[int, str]]:
        now = timezone.now()
        alias = self.get_connection().db
        with db.connections[alias].cursor() as cursor:
            cursor.execute(
                "WITH next AS MATERIALIZED (SELECT id FROM django_q_ormq WHERE key = ANY(%s) AND lock < %s"
                " ORDER BY (key = %s) DESC, id LIMIT %s FOR UPDATE SKIP LOCKED)"
                " UPDATE django_q_ormq SET lock = %s FROM next WHERE django_q_ormq.id = next.id"
                " RETURNING django_q_ormq.id, payload",
                [[lane, self.list_key], now, lane, Conf.BULK, now + timedelta(seconds=Conf.RETRY)],
            )
            return cursor.fetchall()


class LaneRedis(Redis):
    @staticmethod
    def get_connection(list_key: str | None = None) -> redis.Redis:
        """One that hangs must not hold up the requests that nudge."""
        return redis.Redis.from_url(Conf.REDIS, socket_timeout=ANSWER_WITHIN, socket_connect_timeout=ANSWER_WITHIN)

    def dequeue(self) -> list[tuple[None, Any]] | None:
        try:
            found = self.connection.blpop([*([f"django_q:{lane}:q"] if lane else []), self.list_key], 1)
        except RedisError as error:
            log.warning("broker_away", error=str(error))
            return sleep(PATIENCE)  # type: ignore[func-returns-value]
        return [(None, found[1])] if found else None
