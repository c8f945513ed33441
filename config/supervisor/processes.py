"""The children of `up`: each leads a process group of its own, is restarted when it dies, and stopped with the rest."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import structlog
from django.conf import settings

log = structlog.get_logger("up")
PULSE = 0.2
GRACE = 6.0  # seconds between SIGTERM and SIGKILL: with the embedded server's stop this stays within ten
# A child that keeps dying waits longer each time; one that was killed never so long that it misses its ten seconds.
FIRST_WAIT, LONGEST_WAIT, LONGEST_WAIT_WHEN_KILLED = 0.5, 30.0, 2.0
SETTLED = 20.0  # seconds of life after which a death is a new story


class Child:
    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name, self.arguments, self.environment = name, arguments, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = self.due_at = 0.0
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self) -> None:
        self.started_at = time.monotonic()
        command = [sys.executable, "-m", "config.supervisor.child", str(os.getpid()), self.name, *self.arguments]
        # A session of its own: Ctrl-C in a terminal reaches `up` alone, which stops the children in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={**os.environ, **self.environment},
            cwd=settings.BASE_DIR,
            start_new_session=True,
        )

    def ended(self) -> bool:
        """Looks without reaping, so that the group's number stays ours until `bury`."""
        assert self.process
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def bury(self) -> None:
        """Kill what is left of the group and plan the next start."""
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        if time.monotonic() - self.started_at > SETTLED:
            self.deaths = 0
        longest = LONGEST_WAIT if code > 0 else LONGEST_WAIT_WHEN_KILLED
        wait = min(longest, FIRST_WAIT * 2 ** (self.deaths - 1)) if self.deaths else 0.0
        self.deaths += 1
        self.due_at = time.monotonic() + wait
        log.warning("child_died", child=self.name, pid=self.process.pid, code=code, restart_in=wait)
        self.process = None

    def attend(self) -> None:
        if self.process is None:
            if time.monotonic() >= self.due_at:
                self.start()
        elif self.ended():
            self.bury()

    def ask_to_stop(self) -> None:
        if self.process:
            os.kill(self.process.pid, signal.SIGTERM)

    def finish(self) -> None:
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Interrupted(KeyboardInterrupt):
    """A signal came while there was nothing yet to stop in order. Of this kind, because psycopg ends its query then."""


class Signals:
    """SIGINT, SIGTERM and SIGHUP ask for a stop. Before `orderly` they end the preparations at once."""

    def __init__(self) -> None:
        self.stop = False
        self.asked_at = 0.0
        self.orderly = False
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._caught)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, self._caught)

    def _caught(self, _number: int, _frame: FrameType | None) -> None:
        # Only a flag: a handler that takes a lock can meet itself. A second Ctrl-C finds the flag set.
        first, self.stop = not self.stop, True
        if first:
            self.asked_at = time.monotonic()
        if first and not self.orderly:
            raise Interrupted


def supervise(children: Sequence[Child], signals: Signals, every_pulse: Callable[[], Any]) -> None:
    """Keep the children alive until a signal comes, then stop them; `every_pulse` may raise to stop them too."""
    signals.orderly = True
    try:
        while not signals.stop:
            for child in children:
                child.attend()
            every_pulse()
            time.sleep(PULSE)
    finally:
        signals.stop = True
        _stop(children)


def _stop(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()
    give_up = time.monotonic() + GRACE
    while time.monotonic() < give_up and not all(child.process is None or child.ended() for child in children):
        time.sleep(0.05)
    for child in children:
        child.finish()
