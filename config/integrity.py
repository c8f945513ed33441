"""Named invariants. Each app lists its own in <app>/integrity.py; report, admin, command, API and metrics read them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from django.apps import apps
from django.db import models
from django.utils import timezone
from django.utils.functional import Promise

SAMPLES = 5
KEPT_FRESH = timedelta(minutes=11)  # two rounds of config.measure_integrity, and a little


@dataclass(frozen=True)
class Invariant:
    """`violations(now)` are the rows that break it; empty is how it should be. `healer(now)` mends and counts."""

    name: str
    severity: Literal["error", "warning", "info"]
    explanation: str | Promise
    violations: Callable[[datetime], models.QuerySet[Any]]
    healer: Callable[[datetime], Counter[str]] | None = None
    heals: str | Promise = ""
    letter: str = ""
    # The column or annotation that says since when a row breaks it, and what else an operator wants to know.
    since: str = ""
    outlook: Callable[[datetime], list[str]] | None = None


@dataclass(frozen=True)
class Reading:
    name: str
    severity: str
    count: int
    samples: list[str]
    healer: str | None

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@cache
def invariants() -> dict[str, Invariant]:
    found: dict[str, Invariant] = {}
    for config in apps.get_app_configs():
        if not find_spec(f"{config.name}.integrity") or config.name == "config":
            continue
        for invariant in getattr(import_module(f"{config.name}.integrity"), "INVARIANTS", []):
            if invariant.name in found:
                raise ValueError(f"two invariants are named {invariant.name}")
            found[invariant.name] = invariant
    return found


def find(name: str) -> Invariant:
    """By name or letter; KeyError when there is none."""
    for invariant in invariants().values():
        if name == invariant.name or (invariant.letter and name.upper() == invariant.letter):
            return invariant
    raise KeyError(name)


def measure(invariant: Invariant, now: datetime | None = None) -> Reading:
    rows = invariant.violations(now or timezone.now())
    samples = [str(key) for key in rows.order_by("pk").values_list("pk", flat=True)[:SAMPLES]]
    count = rows.count() if len(samples) == SAMPLES else len(samples)
    return Reading(invariant.name, invariant.severity, count, samples, _healer_name(invariant))


def broken_since(invariant: Invariant, now: datetime) -> datetime | None:
    """Since when the oldest of the violations stands."""
    if not invariant.since:
        return None
    return invariant.violations(now).aggregate(first=models.Min(invariant.since))["first"]


def report(now: datetime | None = None) -> list[Reading]:
    return [measure(invariant, now) for invariant in invariants().values()]


def keep_reading(name: str, now: datetime) -> Reading:
    """Measure one and keep the count for the dashboard and the trend."""
    from config.models import IntegrityReading

    reading = measure(invariants()[name], now)
    IntegrityReading.objects.create(name=name, count=reading.count, measured_at=now)
    return reading


def latest(now: datetime) -> list[Reading] | None:
    """The newest kept reading of each invariant; None if one was not measured lately. Raw for the LATERAL."""
    from config.models import IntegrityReading

    known = invariants()
    found = IntegrityReading.objects.raw(
        "SELECT reading.* FROM unnest(%s::text[]) AS wanted(name) CROSS JOIN LATERAL ("
        "SELECT * FROM integrity_readings WHERE name = wanted.name AND measured_at > %s"
        " ORDER BY measured_at DESC LIMIT 1) AS reading",
        [list(known), now - KEPT_FRESH],
    )
    readings = [Reading(row.name, known[row.name].severity, row.count, [], None) for row in found]
    return readings if len(readings) == len(known) else None


def trends(now: datetime, hours: int = 24) -> dict[str, list[int]]:
    """The worst count of each half hour, oldest first."""
    from config.models import IntegrityReading

    kept = IntegrityReading.objects.filter(measured_at__gt=now - timedelta(hours=hours), measured_at__lte=now)
    halves: dict[str, dict[int, int]] = {}
    for name, count, at in kept.order_by("measured_at").values_list("name", "count", "measured_at"):
        half = int(at.timestamp() // 1800)
        worst = halves.setdefault(name, {})
        worst[half] = max(worst.get(half, 0), count)
    return {name: list(worst.values()) for name, worst in halves.items()}


def heal(name: str, now: datetime | None = None) -> Counter[str]:
    invariant = find(name)
    if invariant.healer is None:
        raise ValueError(f"{invariant.name} has no healer: it needs a person")
    return invariant.healer(now or timezone.now())


def _healer_name(invariant: Invariant) -> str | None:
    if invariant.healer is None:
        return None
    return str(invariant.heals) or getattr(invariant.healer, "__name__", "heal")
