"""The logger `alarm`, and what an engineer on duty should hear of through Sentry where it is configured."""

from typing import Any

import sentry_sdk
import structlog

log = structlog.get_logger("alarm")


def report(event: str, **facts: Any) -> None:
    log.warning(event, **facts)
    # Does nothing unless SENTRY_DSN is set.
    sentry_sdk.capture_message(f"alarm: {event}", level="warning", extras=facts)
