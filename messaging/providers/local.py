"""Providers that speak to nobody: the row is the delivery, a line in the log, or nothing at all."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import structlog

from messaging.providers.answers import Answer, Outgoing, accepted

log = structlog.get_logger("messaging.console")


class Null:
    """Accepts at once: for benchmarks, and for channels whose row is the delivery."""

    concurrency = 10_000
    idempotent = True
    receipts = True

    def __init__(self, name: str = "null") -> None:
        self.name = name

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        return [accepted(str(message.message_id)) for message in batch]

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        return accepted(str(message_id))


class Console(Null):
    """For the demo: each message becomes a line of the log, without address and content, which a log never holds."""

    concurrency = 500

    def __init__(self) -> None:
        super().__init__("console")

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        for message in batch:
            log.info(
                "message",
                message_id=str(message.message_id),
                type=message.subscription_type,
                kind=message.kind,
                characters=len(message.title) + len(message.body),
            )
        return super().send(batch)
