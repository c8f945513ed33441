"""A client for locks over REST. Copy it or import it: it needs httpx and nothing of this project.

with LockClient("https://signalbox.example", token).hold("main", lock_type="MIGRATION", reason="v2") as lock:
    for batch in batches:
        lock.check()                      # raises LockLost once the lock is gone
        write(batch, fence=lock.fence)    # whoever stores it refuses a lower fence
"""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import httpx

GRACE = 3  # intervals of silence after which the server gives the lock to others
PREFIX = "/api/v1/branch-locks"


class LockError(Exception):
    """The server refused: `status` and `body` are its answer."""

    def __init__(self, message: str, status: int = 0, body: Any = None) -> None:
        super().__init__(message)
        self.status, self.body = status, body


class LockBusy(LockError):
    """Somebody else holds it; `conflicts` tells who, since when, why and until when."""

    @property
    def conflicts(self) -> list[dict[str, Any]]:
        return list((self.body or {}).get("conflicts", []))


class LockLost(LockError):
    """The lock is not ours any more, or we cannot know: stop writing."""


class HeldLock:
    """A lock in hand. Its heartbeats run in the background. Both its clocks are counted from when we asked, by our own
    monotonic clock: what the server's says is only ever compared with itself."""

    def __init__(
        self, client: "LockClient", answer: dict[str, Any], asked_at: float, ttl_seconds: float | None = None
    ) -> None:
        self.id: str = answer["lock_id"]
        self.fence: int = answer["fence"]
        self.expires_at: str = answer["expires_at"]
        self.interval: int = answer["heartbeat_interval"]
        self.progress: float | None = None
        self.estimated_remaining_hours: float | None = None
        self._client = client
        self._heard_at = asked_at
        # Without ttl_seconds a heartbeat tells.
        self._ends_at = None if ttl_seconds is None else asked_at + ttl_seconds
        self._lost: LockLost | None = None
        self._done = threading.Event()
        self._talking = threading.Lock()  # the answers of a heartbeat and of an extension are taken in as they came
        self._thread = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat {self.id}")

    @property
    def lost(self) -> bool:
        return self._lost is not None or self._silent() or self._over()

    @property
    def headers(self) -> dict[str, str]:
        """For gated writes to Signalbox itself."""
        return {"X-Lock-Id": self.id, "X-Lock-Fence": str(self.fence)}

    def check(self) -> None:
        """Before each write: raises LockLost when the lock is gone, over, or has been silent for too long."""
        if self._lost is not None:
            raise self._lost
        if self._silent():
            raise LockLost(f"no heartbeat of {self.id} has come through for {GRACE * self.interval} s")
        if self._over():
            raise LockLost(f"the time of {self.id} is over")

    def heartbeat(self) -> None:
        """Also sent in the background; call it to report progress at once."""
        said = {"progress": self.progress, "estimated_remaining_hours": self.estimated_remaining_hours}
        body = {
            "fence": self.fence,
            "service_name": self._client.service_name,
            "progress_info": {name: value for name, value in said.items() if value is not None},
        }
        with self._talking:
            asked_at = time.monotonic()
            answer = self._holding("POST", f"/locks/{self.id}/heartbeat/", body)
            self._heard_at, self.expires_at, self.interval = asked_at, answer["expires_at"], answer["next_interval"]
            self._ends_at = asked_at + _seconds(answer["last_heartbeat"], answer["expires_at"])

    def extend(self, hours: float, reason: str = "") -> None:
        body = {"fence": self.fence, "extension_hours": hours, "reason": reason}
        with self._talking:
            answer = self._holding("POST", f"/locks/{self.id}/extend-ttl/", body)
            if self._ends_at is not None:
                self._ends_at += _seconds(self.expires_at, answer["new_expires_at"])
            self.expires_at = answer["new_expires_at"]

    def release(self) -> None:
        self._stop()
        self._holding("DELETE", f"/locks/{self.id}/?fence={self.fence}")

    def _holding(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return self._client.call(method, path, body)
        except LockError as error:
            if error.status in (404, 409, 410):
                self._lost = LockLost(str(error), error.status, error.body)
                raise self._lost from None
            raise

    def _silent(self) -> bool:
        return self.interval > 0 and time.monotonic() - self._heard_at > GRACE * self.interval

    def _over(self) -> bool:
        return self._ends_at is not None and time.monotonic() > self._ends_at

    def _start(self) -> None:
        if self.interval > 0:
            self._thread.start()

    def _stop(self) -> None:
        self._done.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._client.timeout + 1)

    def _beat(self) -> None:
        # A third of the interval: two may get lost before the server even calls the lock unwell.
        while not self._done.wait(self.interval / 3):
            try:
                self.heartbeat()
            except LockLost:
                return
            except (LockError, httpx.HTTPError):
                continue  # away for a moment; check() knows for how long


def _seconds(start: str, end: str) -> float:
    """Between two times of the server's clock."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


class LockClient:
    def __init__(self, url: str, token: str, *, service_name: str = "python-client", timeout: float = 10) -> None:
        self.service_name, self.timeout = service_name, timeout
        self._http = httpx.Client(
            base_url=url.rstrip("/") + PREFIX, headers={"Authorization": f"Token {token}"}, timeout=timeout
        )

    def acquire(self, branch: str, *, lock_type: str, reason: str = "held by a script", **terms: Any) -> HeldLock:
        """`terms` are the fields of POST /acquire/. Raises LockBusy when somebody else holds it."""
        scope = "RESOURCE" if "resource_id" in terms else "RESOURCE_TYPE" if "resource_type" in terms else "BRANCH"
        body = {"branch_name": branch, "lock_type": lock_type, "lock_scope": scope, "reason": reason, **terms}
        # One key for all tries of this call: a lost answer is asked for again, not acquired twice.
        key, asked_at, patience = uuid.uuid4().hex, time.monotonic(), self.timeout + body.get("wait_seconds", 0)
        for last in (False, True):
            try:
                answer = self.call("POST", "/acquire/", body, key=key, timeout=patience)
                break
            except httpx.TransportError:
                if last:
                    raise
        lock = HeldLock(self, answer, asked_at, body.get("ttl_seconds"))
        if body.get("wait_seconds") or (lock.interval == 0 and lock._ends_at is None):
            self._begin_now(lock)
        return lock

    def _begin_now(self, lock: HeldLock) -> None:
        """When a lock that was waited for began, and when one with the default TTL ends, only the server knows: a
        heartbeat sets its clocks from here."""
        try:
            lock.heartbeat()
        except (LockError, httpx.HTTPError):
            self._try_to_release(lock)
            raise

    @contextmanager
    def hold(
        self, branch: str, *, lock_type: str, reason: str = "held by a script", **terms: Any
    ) -> Iterator[HeldLock]:
        """Acquire, heartbeat in the background, release. Leaving raises LockLost if the lock was lost on the way."""
        # With heartbeats, unless told otherwise: a killed process frees its lock in minutes, not at the end of the TTL.
        lock = self.acquire(branch, lock_type=lock_type, reason=reason, **{"enable_heartbeat": True, **terms})
        lock._start()
        try:
            yield lock
        except BaseException:
            lock._stop()
            self._try_to_release(lock)
            raise
        lock._stop()
        lock.check()
        lock.release()

    def call(self, method: str, path: str, body: Any = None, *, key: str = "", timeout: float | None = None) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        answer = self._http.request(method, path, json=body, headers=headers, timeout=timeout or self.timeout)
        if answer.is_success:
            return answer.json() if answer.content else None
        told = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None
        errors = told.get("errors") if isinstance(told, dict) else None
        message = errors[0]["detail"] if errors else answer.reason_phrase
        kind = LockBusy if isinstance(told, dict) and "conflicts" in told else LockError
        raise kind(f"{answer.status_code}: {message}", answer.status_code, told)

    def _try_to_release(self, lock: HeldLock) -> None:
        """On the way out of an error, which matters more than ours; the TTL frees the lock otherwise."""
        try:
            lock.release()
        except (LockError, httpx.HTTPError):
            pass

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "LockClient":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
