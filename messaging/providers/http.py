"""What all providers over HTTP share: one event loop per process, reused connections, the meaning of a broken one."""

import asyncio
import json
import os
import ssl
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

import certifi
import httpx
import structlog
from django.conf import settings
from django.utils import timezone
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, StreamReset

from messaging.providers.answers import (
    SEND_BUDGET,
    Answer,
    Outgoing,
    config,
    network,
    outage,
    rate_limited,
    rejected,
    storable,
    unknown,
)

log = structlog.get_logger("messaging.providers")
T = TypeVar("T")
# Beyond the timeout of a single read: a stream of HTTP/2 may starve while its neighbours are served.
GRACE = 5


@dataclass(frozen=True)
class Reply:
    status: int
    headers: httpx.Headers
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def body(self) -> dict[str, Any]:
        """Empty when the answer is not a JSON object."""
        try:
            found = json.loads(self.text)
            if "\\u" in self.text:
                spelt = json.dumps(found, ensure_ascii=False)
                found = json.loads(storable(spelt.replace("\\u0000", "")))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class NoReply(Exception):
    """The exchange ended without an answer, or before there was a message in it."""

    def __init__(self, answer: Answer, raw: str = "") -> None:
        super().__init__(answer.code)
        self.answer = answer
        self.raw = raw


class Exchange:
    """Follows one request over the wire: only a request that left completely may have been heard."""

    def __init__(self) -> None:
        self.sent = False

    async def trace(self, event: str, _info: dict[str, Any]) -> None:
        if event.endswith("send_request_headers.started"):
            self.sent = False  # httpx repeats by itself what a GOAWAY says was never processed
        elif event.endswith("send_request_body.complete"):
            self.sent = True

    def broken(self, error: Exception) -> NoReply:
        code = type(error).__name__
        heard = self.sent and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and not _refused(error)
        return NoReply(unknown(code) if heard else network(code), f"{code}: {error}")


def _refused(error: Exception) -> bool:
    """HTTP/2 lets a server say that it did not begin to process a request."""
    event = error.__cause__.args[0] if error.__cause__ and error.__cause__.args else None
    if isinstance(event, StreamReset):
        return event.error_code == ErrorCodes.REFUSED_STREAM
    return isinstance(event, ConnectionTerminated) and event.last_stream_id == 0


class Pace:
    """At most so many starts a second."""

    def __init__(self, per_second: float) -> None:
        self.gap = 1 / per_second
        self.next = 0.0

    async def turn(self, deadline: float) -> bool:
        now = time.monotonic()
        start = max(self.next, now)
        if start > deadline:
            return False
        self.next = start + self.gap
        await asyncio.sleep(start - now)
        return True


class HttpProvider:
    """Subclasses say how to ask (`request`) and what an answer means (`judge`)."""

    name = ""
    base_url = ""
    concurrency = 32
    per_second = 1000.0
    http2 = False
    idempotent = False
    receipts = True

    def __init__(self) -> None:
        self.pace = Pace(self.per_second)
        self._home: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        return run(self._send_all(batch))

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        return None

    async def request(self, message: Outgoing) -> Reply:
        raise NotImplementedError

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        raise NotImplementedError

    async def deliver(self, message: Outgoing) -> Answer:
        started = time.monotonic()
        try:
            reply = await self.request(message)
        except NoReply as failure:
            return failure.answer.about(message, failure.raw, started)
        return self.judge(reply, message).about(message, reply.text, started)

    async def exchange(self, method: str, url: str, **parts: Any) -> Reply:
        """One request and its reply; NoReply tells whether it may have been heard."""
        wire = Exchange()
        try:
            async with asyncio.timeout(settings.PROVIDER_TIMEOUT + GRACE):
                response = await self._client().request(
                    method, self.base_url + url, extensions={"trace": wire.trace}, **parts
                )
        except (httpx.HTTPError, TimeoutError, ssl.SSLError, OSError) as error:
            raise wire.broken(error) from error
        return Reply(response.status_code, response.headers, response.text)

    async def _send_all(self, batch: Sequence[Outgoing]) -> list[Answer]:
        deadline = time.monotonic() + SEND_BUDGET
        results = await asyncio.gather(*(self._in_turn(m, deadline) for m in batch), return_exceptions=True)
        return [
            self._surprised(result, message) if isinstance(result, BaseException) else result
            for message, result in zip(batch, results, strict=True)
        ]

    async def _in_turn(self, message: Outgoing, deadline: float) -> Answer:
        async with self._gate():
            if not await self.pace.turn(deadline):
                return network("not_started")
            return await self.deliver(message)

    def _surprised(self, error: BaseException, message: Outgoing) -> Answer:
        """A defect of ours must not take the batch with it, nor let a message go out twice."""
        log.error("provider_defect", provider=self.name, message_id=str(message.message_id), error=type(error).__name__)
        return unknown("defect")

    def _client(self) -> httpx.AsyncClient:
        return self._at_home()[1]

    def _gate(self) -> asyncio.Semaphore:
        return self._at_home()[2]

    def _at_home(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore]:
        """Connections belong to a loop, and the loop to a process."""
        loop = asyncio.get_running_loop()
        if self._home is None or self._home[0] is not loop:
            self._home = (loop, self._new_client(), asyncio.Semaphore(self.concurrency))
        return self._home

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            http2=self.http2,
            verify=tls_context(),
            timeout=httpx.Timeout(settings.PROVIDER_TIMEOUT, pool=None),
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            trust_env=False,
            headers={"User-Agent": "signalbox"},
        )


def tls_context() -> ssl.SSLContext:
    return _tls_context(settings.PROVIDER_CA_FILE)


@cache
def _tls_context(own_ca: str) -> ssl.SSLContext:
    """Kept: reading the certificates of all authorities takes longer than a handshake."""
    context = ssl.create_default_context(cafile=certifi.where())
    if own_ca:
        context.load_verify_locations(cafile=own_ca)
    return context


def by_status(reply: Reply, code: str = "") -> Answer:
    """What an HTTP status says where the provider's own code says nothing."""
    code = code or f"http_{reply.status}"
    match reply.status:
        case 401 | 403 | 404 | 405:
            return config(code)
        case 429:
            return rate_limited(code, retry_after(reply.headers, timezone.now()))
        case status if status >= 500 or status == 408:
            return outage(code)
        case status if status >= 400:
            return rejected("message", code, "rejected")
        case status if status >= 300:
            return config(code)
        case _:
            return unknown("malformed")


def retry_after(headers: httpx.Headers, now: datetime) -> float | None:
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    at = http_date(text)
    return max(0.0, (at - now).total_seconds()) if at else None


def http_date(text: str) -> datetime | None:
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def never_sent(answer: Answer) -> Answer:
    """An errand before the message, such as fetching a token, cannot leave the message's outcome open."""
    return network(answer.code) if answer.outcome == "unknown" else answer


_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on the process's loop, whose connections outlive the call."""
    return asyncio.run_coroutine_threadsafe(work, _loop_of_this_process()).result()


def _loop_of_this_process() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="providers", daemon=True).start()
        return _loop


def _forget_loop() -> None:
    """After a fork the thread that ran the loop is gone, and the lock may have been held."""
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)
