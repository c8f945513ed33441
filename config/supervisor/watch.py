"""Is the worker cluster alive? Its processes may all be there and yet wait for a lock that died with one of them."""

import threading
import time
from datetime import timedelta

import psutil
import structlog
from django import db
from django.conf import settings
from django.utils import timezone
from django_q.brokers import get_broker
from django_q.models import Schedule
from django_q.tasks import async_task
from redis.exceptions import RedisError

from config import embedded
from config.supervisor import canary
from config.supervisor.processes import Child, Signals

log = structlog.get_logger("up")
LOOK = 0.5
START_LIMIT = 30.0  # seconds a cluster may take from its start to its first answer
LOSS_LIMIT = 3.0  # … to its next answer after one of its processes vanished
LIMIT = 90.0  # … to any other answer: all workers may be busy for the length of two sweeps
EVERY = 30.0
OVERDUE = timedelta(seconds=90)  # schedules are looked at every 30 s; three looks missed is a ticker that hangs


class Watch(threading.Thread):
    """A thread of its own: a database that hangs must not keep the supervisor from its children or from stopping."""

    def __init__(self, cluster: Child | None, lane: str, signals: Signals) -> None:
        super().__init__(name="watch", daemon=True)
        self.cluster, self.lane, self.signals = cluster, lane, signals
        self.verdict: tuple[int, str] | None = None  # (pid of the cluster, what is wrong with it)
        self._forget(None)

    def _forget(self, pid: int | None) -> None:
        self.pid = pid
        self.family: set[psutil.Process] = set()
        self.complete = False
        self.question: tuple[object, float, float] | None = None  # asked at, when it must be answered, since when
        self.next_question = self.next_look_at_schedules = time.monotonic() + EVERY

    def run(self) -> None:
        while not self.signals.stop:
            try:
                self._look()
            except (db.Error, RedisError) as error:
                # Nobody can answer without the database, so nobody is blamed for it.
                log.warning("watch_blind", error=" ".join(str(error).split()))
                db.connection.close()
                self._forget(None)
            time.sleep(LOOK)
        db.connection.close()

    def _look(self) -> None:
        if db.connection.settings_dict["ENGINE"] == "config.embedded":
            embedded.serve(settings.DATA_DIR)  # a killed server or keeper comes back now, not at somebody's next query
        if self.cluster is None or self.cluster.pid is None:
            return
        db.close_old_connections()
        if self.cluster.pid != self.pid:
            self._forget(self.cluster.pid)
            self._tick_all()
            self._ask(START_LIMIT)
        self._look_at_family()
        self._look_at_answer()
        self._look_at_schedules()

    def _tick_all(self) -> None:
        """Every sweep once at the start: the cluster's own first look at the schedules comes half a minute later."""
        if get_broker().queue_size() < len(settings.SWEEPS):  # a cluster that keeps dying must not pile them up
            for name in settings.SWEEPS:
                async_task("config.sweeping.tick", name, task_name=f"start {name}")

    def _ask(self, limit: float) -> None:
        now = time.monotonic()
        self.question = (canary.ask(self.lane), now + limit, now)
        self.next_question = now + EVERY

    def _look_at_family(self) -> None:
        try:
            family = set(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return  # the supervisor sees that itself
        lost = self.family - family
        self.family = family
        if lost and self.complete and not self.signals.stop:
            log.warning("cluster_lost_process", pids=[process.pid for process in lost])
            self._ask(LOSS_LIMIT)
        self.complete = self.complete or len(family) >= settings.Q_WORKERS + 3  # sentinel, pusher, monitor

    def _look_at_answer(self) -> None:
        now = time.monotonic()
        if self.question is None:
            if now > self.next_question:
                self._ask(LIMIT)
            return
        asked_at, deadline, since = self.question
        if canary.answered(self.lane, asked_at):  # type: ignore[arg-type]
            self.question = None
        elif now > deadline and (now > since + LIMIT or not self._busy()):
            self._condemn(f"no sign of life for {now - since:.0f} s")

    def _busy(self) -> bool:
        """No worker is free to answer: each tells in its title what it does (setproctitle)."""
        return self.complete and not any(_title(process).endswith(" idle") for process in self.family)

    def _look_at_schedules(self) -> None:
        """The one process the canary does not pass through is the sentinel, which ticks."""
        if time.monotonic() < self.next_look_at_schedules:
            return
        self.next_look_at_schedules = time.monotonic() + EVERY
        if Schedule.objects.filter(next_run__lt=timezone.now() - OVERDUE).exists():
            uptime = time.monotonic() - self.cluster.started_at if self.cluster else 0
            if uptime > LIMIT:
                self._condemn("its schedules stand still")

    def _condemn(self, reason: str) -> None:
        self.verdict = (self.pid or 0, reason)
        self.question = None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
