"""Does the web server answer, and does every process run? A hung one is killed: of the dead there are restarts."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import structlog

from config.supervisor.processes import Child, Signals

log = structlog.get_logger("up")
LOOK = 1.0
LISTEN = 5.0
STOPPED_LIMIT = 5.0  # seconds a process may be stopped (SIGSTOP; one held by a debugger is another matter)
# Longer than any request may take: with every thread taken by those who wait for a lock, 60 s go by without an answer.
SILENT_LIMIT = 90.0


class Vigil(threading.Thread):
    """A thread of its own, without the database: neither that nor a web server that hangs may keep `up` busy."""

    def __init__(self, children: Sequence[Child], web: Child, answers: Callable[[], bool], signals: Signals) -> None:
        super().__init__(name="vigil", daemon=True)
        self.children, self.web, self.answers, self.signals = children, web, answers, signals
        self.stopped: dict[psutil.Process, float] = {}
        self.heard: tuple[int | None, float] = (None, 0.0)  # of which web server, when

    def run(self) -> None:
        next_time = 0.0
        while not self.signals.stop:
            self.look_at_processes()
            if time.monotonic() >= next_time:
                next_time = time.monotonic() + LISTEN
                self.listen_to_web()
            time.sleep(LOOK)

    def look_at_processes(self) -> None:
        now = time.monotonic()
        stopped = {process for child in self.children for process in _family(child) if _is_stopped(process)}
        self.stopped = {process: self.stopped.get(process, now) for process in stopped}
        for process, since in self.stopped.items():
            if now - since >= STOPPED_LIMIT and not self.signals.stop:
                log.warning("child_stopped", pid=process.pid, seconds=round(now - since))
                _kill(process.pid)

    def listen_to_web(self) -> None:
        now, pid = time.monotonic(), self.web.pid
        if pid is None:
            return
        if pid != self.heard[0] or self.answers():
            self.heard = (pid, now)
        elif now - self.heard[1] >= SILENT_LIMIT and not self.signals.stop:
            log.warning("web_silent", pid=pid, seconds=round(now - self.heard[1]))
            _kill(pid)


def _family(child: Child) -> list[psutil.Process]:
    try:
        head = psutil.Process(child.pid) if child.pid else None
        return [head, *head.children(recursive=True)] if head else []
    except psutil.NoSuchProcess:
        return []


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _kill(pid: int) -> None:
    """Its own kind of death for each: gunicorn and the cluster replace their processes, `up` its children."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
