import json
from collections import Counter
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from config import integrity
from config.integrity import Invariant
from config.models import IntegrityReading
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


def test_latest_is_what_the_sweep_kept_and_nothing_when_one_is_missing_or_old(small_pcs):
    now = timezone.now()
    assert integrity.latest(now) is None
    integrity.keep_readings(now - timedelta(minutes=8))
    kept = integrity.keep_readings(now)
    assert [(r.name, r.count) for r in integrity.latest(now)] == [(r.name, r.count) for r in kept]
    assert integrity.latest(now + timedelta(minutes=12)) is None
    first = next(iter(integrity.invariants().values()))
    IntegrityReading.objects.filter(name=first.name).delete()
    assert integrity.latest(now) is None
    integrity.keep_readings(now, only=first)
    assert integrity.latest(now) is not None
