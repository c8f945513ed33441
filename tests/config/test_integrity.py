import json
from collections import Counter
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from config import integrity, sweeping
from config.integrity import Invariant
from config.models import IntegrityReading
from config.sweeps import measure_integrity
from devices.models import PC
from tests.factories import PCFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def small_pcs(monkeypatch):
    def heal(_now):
        return Counter(grown=PC.objects.filter(max_slots=1).update(max_slots=20))

    one = Invariant(
        "devices.small", "warning", "PCs with one slot", lambda now: PC.objects.filter(max_slots=1), heal, "grow", "Z"
    )
    two = Invariant("devices.none", "error", "never", lambda now: PC.objects.none())
    monkeypatch.setattr(integrity, "invariants", lambda: {one.name: one, two.name: two})


def test_every_registered_invariant_can_be_measured():
    for reading in integrity.report():
        assert reading.count == 0, reading


def test_counts_and_samples_what_breaks_it(small_pcs):
    PCFactory.create_batch(7, max_slots=1)
    PCFactory(max_slots=2)
    small, none = integrity.report()
    assert (small.name, small.severity, small.count, len(small.samples), small.healer) == (
        "devices.small",
        "warning",
        7,
        5,
        "grow",
    )
    assert (none.count, none.samples, none.healer) == (0, [], None)


@pytest.mark.parametrize("name", ["devices.small", "Z", "z"])
def test_heals_by_name_or_letter_and_reports_after_it(small_pcs, name):
    PCFactory(max_slots=1)
    out = StringIO()
    call_command("integrity", "--json", "--heal", name, stdout=out, stderr=StringIO())
    assert [row["count"] for row in json.loads(out.getvalue())] == [0, 0]


@pytest.mark.parametrize(("name", "message"), [("nope", "no such invariant"), ("devices.none", "no healer")])
def test_says_why_it_cannot_heal(small_pcs, name, message):
    with pytest.raises(CommandError, match=message):
        call_command("integrity", "--heal", name, stdout=StringIO())


def test_the_api_gives_the_commands_list_to_those_who_may_see_it(small_pcs, make_client):
    PCFactory(max_slots=1)
    answer = make_client("viewer").get("/api/v1/integrity/")
    assert answer.status_code == 200
    assert [row["name"] for row in answer.json()] == ["devices.small", "devices.none"]
    assert set(answer.json()[0]) == {"name", "severity", "count", "samples", "healer"}
    assert make_client("device-agent", username="other").get("/api/v1/integrity/").status_code == 403


def test_one_invariant_that_takes_too_long_does_not_hide_the_others(monkeypatch):
    names = list(integrity.invariants())

    def slow(name, now, keep=integrity.keep_reading):
        if name == names[1]:
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = 1")
                cursor.execute("SELECT pg_sleep(60)")
        return keep(name, now)

    monkeypatch.setattr("config.sweeps.keep_reading", slow)
    ran = sweeping.run("config.measure_integrity")
    assert ran["error"].startswith(f"{names[1]}: OperationalError")
    assert ran["counts"]["measured"] == len(names) - 1


def test_a_measurement_out_of_time_is_continued_behind_the_last_one(monkeypatch):
    names, seen = list(integrity.invariants()), []
    first = sweeping.Sweep("config.measure_integrity", timezone.now())

    def one(name, now):
        seen.append(name)
        first.ends = 0
        return integrity.measure(integrity.find(name), now)

    monkeypatch.setattr("config.sweeps.keep_reading", one)
    measure_integrity(first)
    assert first.counts["out_of_time"] == 1
    measure_integrity(sweeping.Sweep("config.measure_integrity", timezone.now(), cursor=first.cursor))
    assert seen == [*names, names[0]]


def test_latest_is_what_the_sweep_kept_and_nothing_when_one_is_missing_or_old(small_pcs):
    now = timezone.now()
    assert integrity.latest(now) is None
    for name in integrity.invariants():
        integrity.keep_reading(name, now - timedelta(minutes=8))
    kept = [integrity.keep_reading(name, now) for name in integrity.invariants()]
    assert [(r.name, r.count) for r in integrity.latest(now)] == [(r.name, r.count) for r in kept]
    assert integrity.latest(now + timedelta(minutes=12)) is None
    first = next(iter(integrity.invariants()))
    IntegrityReading.objects.filter(name=first).delete()
    assert integrity.latest(now) is None
    integrity.keep_reading(first, now)
    assert integrity.latest(now) is not None
