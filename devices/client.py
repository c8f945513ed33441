"""The reference agent: a PC of simulated devices that speaks only the REST API. Copy it; it needs nothing of ours."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Event
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

HEARTBEAT = 30.0
RENEWAL = 30.0
POLL = 1.0
# How long a stopping agent waits for its last jobs; what is left goes back when its lease lapses.
DRAIN = 8.0
VERSION = "reference-1"


class Refused(Exception):
    """The server says no for good: a wrong token or URL, or not our PC."""


class Away(Exception):
    """No answer, or one that says to ask again."""

    def __init__(self, text: str, wait: float = 0.5) -> None:
        super().__init__(text)
        self.wait = wait


class Server:
    """One kept-open connection to the API."""

    def __init__(self, url: str, token: str, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://localhost:8000, not {url!r}")
        self.host, self.port, self.secure = parts.hostname, parts.port, parts.scheme == "https"
        self.base = f"{parts.path.rstrip('/')}/api/v1"
        self.token, self.timeout = token, timeout
        self.connection: HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Token {self.token}", "Content-Type": "application/json"}
        if key:
            headers["Idempotency-Key"] = key
        # A connection kept open may have been closed by the other side meanwhile: that is no trouble, once.
        status, text, wait = self._exchange(path, body, headers, again=self.connection is not None)
        if status >= 500 or status == 429:
            raise Away(f"status {status}", wait)
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            # A page for people: of another site when refused, of a proxy that stands before ours when not.
            if status >= 300:
                return status, None
            raise Away("an answer that is not JSON") from None

    def _exchange(self, path: str, body: Any, headers: dict[str, str], again: bool) -> tuple[int, bytes, float]:
        try:
            connection = self.connection or self._connect()
            connection.request("POST", f"{self.base}{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), _seconds(answer.headers.get("Retry-After"))
        except (OSError, HTTPException) as error:
            self.close()
            if again:
                return self._exchange(path, body, headers, again=False)
            raise Away(f"{type(error).__name__}: {error}") from None

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self.secure else HTTPConnection
        self.connection = kind(self.host, self.port, timeout=self.timeout)
        return self.connection

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@dataclass
class Job:
    id: str
    token: str
    ends: float
    renews: float


class Agent:
    """Heartbeats, claims as many jobs as devices are idle, renews their leases and reports how they ended."""

    def __init__(
        self,
        server: Server,
        pc: str,
        devices: int,
        *,
        failure_rate: float = 0.1,
        job_seconds: float = 0.0,
        exit_when_idle: float | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.server, self.pc, self.devices = server, pc, devices
        self.failure_rate, self.job_seconds, self.exit_when_idle = failure_rate, job_seconds, exit_when_idle
        self.say = say
        self.stopping = Event()
        self.jobs: dict[str, Job] = {}
        self.counts: Counter[str] = Counter()

    def stop(self, *_signal: Any) -> None:
        """For signal handlers: claim no more, finish what runs, leave."""
        self.stopping.set()

    def run(self) -> Counter[str]:
        beats = idle_since = time.monotonic()
        while not self.stopping.is_set():
            now = time.monotonic()
            if now >= beats:
                self.beat()
                beats = now + HEARTBEAT
            self.work()
            if self.claim() or self.jobs:
                idle_since = time.monotonic()
            elif self.exit_when_idle is not None and time.monotonic() - idle_since >= self.exit_when_idle:
                break
            self.stopping.wait(self.pause(beats))
        self.drain()
        self.server.close()
        return self.counts

    def pause(self, beats: float) -> float:
        """Until something is due; a free device asks again every second."""
        due = [beats, *(min(job.ends, job.renews) for job in self.jobs.values())]
        return max(0.0, min(min(due) - time.monotonic(), POLL))

    def drain(self) -> None:
        until = time.monotonic() + DRAIN
        while self.jobs and time.monotonic() < until:
            self.work(patient=False)
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))

    def beat(self) -> None:
        listed = [
            {
                "serial": f"{self.pc}-{n:03}",
                "connection_id": f"sim:{n}",
                "model": "simulated",
                "battery": random.randint(20, 100),
                "labels": {"kind": "simulated"},
            }
            for n in range(1, self.devices + 1)
        ]
        body = {"agent_version": VERSION, "system": {"jobs": len(self.jobs)}, "devices": listed}
        status, answer = self.ask(f"/pcs/{self.pc}/heartbeat/", body)
        if status not in (0, 200):
            raise Refused(f"heartbeat of {self.pc}: {status} {_detail(answer)}")

    def claim(self) -> int:
        free = self.devices - len(self.jobs)
        if free < 1:
            return 0
        # The key makes a lost answer harmless: asked again, the same jobs and tokens come.
        status, answer = self.ask(f"/pcs/{self.pc}/claim/", {"max_to_claim": free}, key=uuid4().hex)
        if status != 200:
            return 0
        now = time.monotonic()
        for grant in answer["task_devices"]:
            self.jobs[grant["id"]] = Job(grant["id"], grant["token"], now + self.job_seconds, now + RENEWAL)
        self.counts["claimed"] += len(answer["task_devices"])
        return len(answer["task_devices"])

    def work(self, patient: bool = True) -> None:
        for job in list(self.jobs.values()):
            now = time.monotonic()
            if now >= job.ends:
                self.finish(job, patient)
            elif now >= job.renews:
                self.renew(job)

    def finish(self, job: Job, patient: bool = True) -> None:
        if random.random() < self.failure_rate:
            self.report(job, "fail", {"error": "simulated failure"}, patient)
        else:
            self.report(job, "complete", {"result": {"simulated": True}}, patient)

    def report(self, job: Job, verb: str, body: dict[str, Any], patient: bool = True) -> None:
        status, _answer = self.ask(f"/task-devices/{job.id}/{verb}/", {"token": job.token, **body}, patient=patient)
        self.counts[verb if status == 200 else "too_late"] += 1
        self.jobs.pop(job.id, None)

    def renew(self, job: Job) -> None:
        status, answer = self.ask(f"/task-devices/{job.id}/renew/", {"token": job.token})
        job.renews = time.monotonic() + RENEWAL
        if status == 409:
            # Cancelled, or given to another attempt: saying so at once frees the device.
            self.report(job, "fail", {"error": f"given up: {_detail(answer)}"})

    def ask(self, path: str, body: dict[str, Any], key: str = "", patient: bool = True) -> tuple[int, Any]:
        """Asks until there is an answer or we are told to stop; status 0 then."""
        while True:
            try:
                return self.server.post(path, body, key)
            except Away as away:
                self.say(f"{self.pc}: {away}")
                if not patient or self.stopping.wait(away.wait):
                    return 0, None


def _seconds(text: str | None) -> float:
    """Retry-After may also be a date; half a second is as good then."""
    return float(text) if text and text.isdecimal() else 0.5


def _detail(answer: Any) -> str:
    try:
        return str(answer["errors"][0]["detail"])
    except (KeyError, IndexError, TypeError):
        return "and no reason: is the URL right?"
