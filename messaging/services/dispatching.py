"""Claim, call, record. This thread alone speaks to the database; the calls run in threads of their own, one lane per
type of subscription, so a provider that hangs holds up nobody but itself."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from django.db import InterfaceError, OperationalError, connection

from messaging.models import CHANNEL_OF
from messaging.providers import Answer, Provider, breaker_of, provider_for
from messaging.services import circuits
from messaging.services.claiming import Batch, claim_batch
from messaging.services.recording import record_batch

LARGEST_BATCH = 500
QUICK = 2.0  # seconds; a batch that took longer is followed by a smaller one
LOOK_AGAIN = 0.2  # seconds between looks at the other lanes while one is busy
# Seconds in which a database that went away may come back before what providers answered is lost, and so unknown.
RECONNECT = 30.0
UNREADABLE = Answer("rejected", "permanent", "message", "address_unreadable", error_reason="address_unreadable")
BROKEN_OFF = Answer("unknown", code="call_broke_off", error_reason="outcome_unknown")


@dataclass
class Lane:
    """One type of subscription. It starts with a single message and widens while its provider answers: a dead or
    misconfigured provider costs one message, not a batch."""

    subscription_type: str
    provider: Provider
    size: int = 1
    busy: bool = False
    started: float = 0.0
    rests_until: float = 0.0

    @property
    def ready(self) -> bool:
        return not self.busy and time.monotonic() >= self.rests_until

    def claim(self, now: datetime) -> Batch:
        self.started = time.monotonic()
        breaker = breaker_of(self.provider)
        batch = claim_batch(self.subscription_type, self.provider.name, self.size, now=now, breaker=breaker)
        # Nothing due: not looked at again with every batch of a busy neighbour.
        self.rests_until = self.started + LOOK_AGAIN if batch.empty else 0.0
        return batch

    def learn(self, answers: list[tuple[UUID, Answer]]) -> None:
        if any(circuits.is_providers_fault(answer) or answer.outcome == "config" for _pk, answer in answers):
            self.size = 1
        elif time.monotonic() - self.started > QUICK:
            self.size = max(1, self.size // 2)
        else:
            self.size = min(self.size * 50, LARGEST_BATCH)


def lanes() -> list[Lane]:
    found = ((kind, provider_for(kind)) for kind in CHANNEL_OF)
    return [Lane(kind, provider) for kind, provider in found if provider is not None]


@dataclass
class Dispatch:
    """One run over all lanes."""

    clock: Callable[[], datetime]
    has_time: Callable[[], bool]
    failed: Callable[[str, Exception], None]
    counts: Counter[str] = field(default_factory=Counter)
    calls: dict[Future[list[Answer]], tuple[Lane, Batch]] = field(default_factory=dict)

    def run(self) -> None:
        open_lanes = lanes()
        with ThreadPoolExecutor(max(1, len(open_lanes)), thread_name_prefix="provider") as pool:
            while True:
                found = False
                for lane in open_lanes:
                    if lane.ready and self.has_time():
                        with self._alone(lane):
                            found |= self._start(lane, pool)
                if not self.calls and not found:
                    return
                for call in wait(self.calls, timeout=LOOK_AGAIN, return_when=FIRST_COMPLETED).done:
                    lane, batch = self.calls.pop(call)
                    with self._alone(lane):
                        self._finish(call, lane, batch)

    @contextmanager
    def _alone(self, lane: Lane) -> Iterator[None]:
        """What breaks a lane is told and stays its own: the others go on, and calls under way are recorded."""
        try:
            yield
        except Exception as error:
            lane.rests_until = math.inf
            _let_go_if_lost()
            self.failed(lane.subscription_type, error)

    def _start(self, lane: Lane, pool: ThreadPoolExecutor) -> bool:
        batch = lane.claim(self.clock())
        self.counts.update(batch.counts)
        if batch.attempts:
            lane.busy = True
            self.calls[pool.submit(lane.provider.send, batch.outgoing)] = (lane, batch)
        return not batch.empty

    def _finish(self, call: Future[list[Answer]], lane: Lane, batch: Batch) -> None:
        lane.busy = False
        # A provider does not raise; should one, its batch counts as unknown and the other lanes are recorded all the
        # same.
        answers = [BROKEN_OFF] * len(batch.outgoing) if call.exception() else call.result()
        results = [(sent.message_id, answer) for sent, answer in zip(batch.outgoing, answers, strict=True)]
        results += [(pk, UNREADABLE) for pk in batch.unreadable]
        lane.learn(results)
        self.counts.update(_record(batch, results, self.clock()))


def dispatch(
    clock: Callable[[], datetime], has_time: Callable[[], bool], failed: Callable[[str, Exception], None]
) -> Counter[str]:
    """Send what is due until nothing is or the time is up; calls under way are always waited for and recorded."""
    work = Dispatch(clock, has_time, failed)
    work.run()
    return work.counts


def _record(batch: Batch, results: list[tuple[UUID, Answer]], now: datetime) -> dict[str, int]:
    give_up = time.monotonic() + RECONNECT
    while True:
        try:
            return record_batch(batch, results, now=now)
        except (OperationalError, InterfaceError):
            if not _let_go_if_lost() or time.monotonic() > give_up:
                raise
            time.sleep(LOOK_AGAIN)


def _let_go_if_lost() -> bool:
    """Of a connection that broke; the next question opens another."""
    if connection.is_usable():
        return False
    connection.close()
    return True
