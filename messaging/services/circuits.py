"""A provider that fails for everybody is left alone for five minutes, then asked with one message.

Only its own messages wait, pending and without attempts; other providers go on.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import structlog
from django.conf import settings

from config.decisions import decide, record
from messaging.models import ProviderCircuit, ProviderFailure
from messaging.providers import Answer

log = structlog.get_logger("messaging.circuits")


def open_circuit(provider: str, reason: str, answer: Answer, *, now: datetime) -> datetime:
    """Opens it, or keeps it open, until the answered time: the next probe."""
    probe_at = now + settings.CIRCUIT_OPEN
    circuit, opened = ProviderCircuit.objects.update_or_create(
        provider=provider,
        defaults={"reason": reason, "code": answer.code[:100], "detail": answer.raw, "probe_at": probe_at},
        create_defaults={
            "reason": reason,
            "code": answer.code[:100],
            "detail": answer.raw,
            "probe_at": probe_at,
            "opened_at": now,
        },
    )
    if opened:
        log.error("circuit_opened", provider=provider, reason=reason, code=answer.code)
        evidence = {"reason": reason, "code": answer.code}
        record([decide("open_circuit", circuit, before={}, after={"probe_at": probe_at.isoformat()}, inputs=evidence)])
    return probe_at


def close_circuit(provider: str) -> bool:
    circuit = ProviderCircuit.objects.filter(provider=provider).first()
    if circuit is None:
        return False
    record([decide("close_circuit", circuit, before={"reason": circuit.reason}, after={})])
    circuit.delete()
    return True


def take_probe(provider: str, *, now: datetime) -> bool | None:
    """None: closed, go on. True: open, and the caller sends the one probe. False: open, leave it alone."""
    circuit = ProviderCircuit.objects.filter(provider=provider).first()
    if circuit is None:
        return None
    # Of several dispatchers one moves the time; the others find it moved.
    taken = (
        ProviderCircuit.objects.filter(provider=provider).probeable(now).update(probe_at=now + settings.CIRCUIT_OPEN)
    )
    return bool(taken)


def return_probe(provider: str, *, now: datetime) -> None:
    """There was nothing to probe with."""
    ProviderCircuit.objects.filter(provider=provider).update(probe_at=now)


def is_providers_fault(answer: Answer) -> bool:
    """A call without an answer counts: a provider that hangs is as dead as one that refuses."""
    return answer.outcome == "unknown" or (
        answer.scope == "provider" and answer.outcome not in ("accepted", "rejected")
    )


def is_set_up(answer: Answer) -> bool:
    """Refused for everybody until somebody mends it. With scope `message` one alone waits: were a country that is not
    enabled to stop the provider, each probe would be that same message, and nobody else's would go for a day."""
    return answer.outcome == "config" and answer.scope != "message"


def note_answers(
    provider: str, answers: Sequence[tuple[UUID, Answer]], *, probe: bool, now: datetime
) -> datetime | None:
    """Counts failures in a row, opens or closes the breaker; the next probe when it is open."""
    broken = [answer for _pk, answer in answers if is_set_up(answer)]
    if broken:
        return open_circuit(provider, "config", broken[0], now=now)
    trailing: list[tuple[UUID, Answer]] = []
    for pk, answer in answers:
        trailing = [*trailing, (pk, answer)] if is_providers_fault(answer) else []
    if len(trailing) < len(answers):
        ProviderFailure.objects.filter(provider=provider).delete()
        if probe:
            close_circuit(provider)
    return _count(provider, trailing, probe, now)


def _count(provider: str, failures: list[tuple[UUID, Answer]], probe: bool, now: datetime) -> datetime | None:
    if not failures:
        return None
    ProviderFailure.objects.bulk_create(
        [ProviderFailure(provider=provider, message_id=pk, occurred_at=now) for pk, _answer in failures],
        ignore_conflicts=True,
    )
    in_a_row = ProviderFailure.objects.filter(provider=provider)[: settings.CIRCUIT_FAILURES].count()
    if probe or in_a_row >= settings.CIRCUIT_FAILURES:
        return open_circuit(provider, "outage", failures[-1][1], now=now)
    return None
