"""A batch over blocking connections: each thread takes the next message until none is left."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from messaging.providers.answers import SEND_BUDGET, Answer, Outgoing, network, unknown

log = structlog.get_logger("messaging.providers")
# A few messages are not worth a connection each.
SHARE = 8


def spread(
    pool: ThreadPoolExecutor, width: int, batch: Sequence[Outgoing], deliver: Callable[[Outgoing], Answer]
) -> list[Answer]:
    answers: list[Answer] = [network("not_started")] * len(batch)
    waiting = deque(enumerate(batch))
    deadline = time.monotonic() + SEND_BUDGET

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                place, message = waiting.popleft()
            except IndexError:
                return
            # Stands when a defect of ours ends this thread: the message may or may not have left.
            answers[place] = unknown("defect")
            answers[place] = deliver(message)

    for job in [pool.submit(work) for _ in range(min(width, -(-len(batch) // SHARE)))]:
        if error := job.exception():
            log.error("provider_defect", error=type(error).__name__)
    return answers
