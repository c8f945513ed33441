"""Claim, call, record. This thread alone speaks to the database; the calls run in threads of their own, one lane per
type of subscription, so a provider that hangs holds up nobody but itself."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from messaging.models import CHANNEL_OF
from messaging.providers import Answer, Provider, breaker_of, provider_for
from messaging.services import circuits
from messaging.services.claiming import Batch, claim_batch
from messaging.services.recording import record_batch

LARGEST_BATCH = 500
QUICK = 2.0  # seconds; a batch that took longer is followed by a smaller one
LOOK_AGAIN = 0.2  # seconds between looks at the other lanes while one is busy
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


def dispatch(clock: Callable[[], datetime], has_time: Callable[[], bool]) -> Counter[str]:
    """Send what is due until nothing is or the time is up; calls under way are always waited for and recorded."""
    counts: Counter[str] = Counter()
    open_lanes = lanes()
    calls: dict[Future[list[Answer]], tuple[Lane, Batch]] = {}
    with ThreadPoolExecutor(max(1, len(open_lanes)), thread_name_prefix="provider") as pool:
        while True:
            found = False
            for lane in open_lanes:
                if lane.ready and has_time():
                    found |= _start(lane, pool, calls, counts, clock())
            if not calls and not found:
                return counts
            for call in wait(calls, timeout=LOOK_AGAIN, return_when=FIRST_COMPLETED).done:
                _finish(call, *calls.pop(call), counts, clock())


def _start(
    lane: Lane,
    pool: ThreadPoolExecutor,
    calls: dict[Future[list[Answer]], tuple[Lane, Batch]],
    counts: Counter[str],
    now: datetime,
) -> bool:
    batch = lane.claim(now)
    counts.update(batch.counts)
    if batch.attempts:
        lane.busy = True
        calls[pool.submit(lane.provider.send, batch.outgoing)] = (lane, batch)
    return not batch.empty


def _finish(call: Future[list[Answer]], lane: Lane, batch: Batch, counts: Counter[str], now: datetime) -> None:
    lane.busy = False
    # A provider does not raise; should one, its batch counts as unknown and the other lanes are recorded all the same.
    answers = [BROKEN_OFF] * len(batch.outgoing) if call.exception() else call.result()
    results = [(sent.message_id, answer) for sent, answer in zip(batch.outgoing, answers, strict=True)]
    results += [(pk, UNREADABLE) for pk in batch.unreadable]
    lane.learn(results)
    counts.update(record_batch(batch, results, now=now))
