import logging

import pytest
from django.test import Client
from django.utils import timezone

from config.models import Canary
from config.observe import PROBER, redact


def test_health_needs_no_database():
    answer = Client().get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_ready_needs_a_worker_that_answered_lately():
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {"database": True, "migrations": True, "worker": False}
    Canary.objects.create(host="a", asked_at=timezone.now(), answered_at=timezone.now())
    assert Client().get("/readyz").status_code == 200


@pytest.mark.django_db
def test_metrics_are_for_those_who_may_read_them(make_client):
    assert Client().get("/metrics").status_code == 401
    assert make_client("device-agent").get("/metrics").status_code == 403
    text = make_client("viewer", username="prometheus").get("/metrics").content.decode()
    assert 'signalbox_rows{app="devices",kind="pcs.status",state="online"} 0.0' in text
    assert 'signalbox_sweep_last_run_age_seconds{sweep="devices.mark_silent_pcs"} +Inf' in text
    assert "signalbox_worker_canary_age_seconds +Inf" in text


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1.2", True), ("x" * 65, False), ("a b", False), ("evil\nline", False)]
)
def test_a_request_id_is_kept_when_harmless_and_made_otherwise(given, kept):
    answer = Client().get("/healthz", headers={"X-Request-ID": given})
    assert (answer["X-Request-ID"] == given) == kept
    assert answer["X-Request-ID"]


@pytest.mark.parametrize(
    "secret",
    ["kim@example.com", "+821012345678", "Token abcdef0123456789", "password=hunter22", '"token": "abcdefgh"'],
)
def test_no_secret_or_address_survives_in_a_log_line(secret):
    line = redact(f"before {secret} after")
    assert secret.split()[-1].strip('"') not in line
    assert line.startswith("before ")
    assert line.endswith(" after")


@pytest.mark.django_db
def test_a_request_leaves_one_line_without_query_or_body(caplog, client):
    with caplog.at_level(logging.INFO, logger="http"):
        client.get("/healthz?email=kim@example.com")
    [record] = [record for record in caplog.records if record.name == "http"]
    assert "kim" not in str(record.msg)


def test_an_unknown_address_of_the_api_is_a_404_in_its_form(client):
    answer = client.get("/api/v1/nowhere/")
    assert answer.status_code == 404 and answer.json()["errors"][0]["code"] == "not_found"
    assert client.get("/nowhere/")["Content-Type"].startswith("text/html")


@pytest.mark.django_db
def test_the_supervisors_own_probes_leave_none(caplog, client):
    with caplog.at_level(logging.INFO, logger="http"):
        client.get("/healthz", headers={"User-Agent": PROBER})
        client.get("/api/v1/nothing/", headers={"User-Agent": PROBER})
    assert len([record for record in caplog.records if record.name == "http"]) == 1
