import json
import logging
from contextlib import redirect_stderr
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.migrations.recorder import MigrationRecorder
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone
from django.utils.log import log_response
from gunicorn.config import Config

from config.models import Canary
from config.observe import PROBER, configure_logging, redact
from config.supervisor.lines import Lines


def away(*_args, **_kwargs):
    raise OperationalError("connection refused")


@pytest.mark.parametrize("path", ["/healthz", "/healthz/"])
def test_health_needs_no_database(path):
    answer = Client().get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_read_only(path):
    assert Client(enforce_csrf_checks=True).post(path).status_code == 405


@pytest.mark.django_db
def test_ready_needs_a_worker_that_answered_lately():
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {"database": True, "migrations": True, "worker": False}
    Canary.objects.create(host="a", asked_at=timezone.now(), answered_at=timezone.now())
    assert Client().get("/readyz").status_code == 200


@pytest.mark.django_db
def test_ready_needs_every_migration_and_asks_little(django_assert_max_num_queries):
    Canary.objects.create(host="a", asked_at=timezone.now(), answered_at=timezone.now())
    Client().get("/readyz")
    with django_assert_max_num_queries(4):
        assert Client().get("/readyz").json()["checks"]["migrations"]
    MigrationRecorder.Migration.objects.filter(app="devices").last().delete()
    answer = Client().get("/readyz")
    assert answer.json()["checks"] == {"database": True, "migrations": False, "worker": True}


@pytest.mark.django_db
def test_an_open_connection_is_no_sign_of_a_database(monkeypatch):
    monkeypatch.setattr(CursorWrapper, "execute", away)
    answer = Client().get("/readyz")
    assert answer.json()["checks"] == {"database": False, "migrations": False, "worker": False}


@pytest.mark.django_db
def test_metrics_are_for_those_who_may_read_them(make_client):
    assert Client().get("/metrics").status_code == 401
    assert make_client("device-agent").get("/metrics").status_code == 403
    text = make_client("viewer", username="prometheus").get("/metrics").content.decode()
    assert 'signalbox_rows{app="devices",kind="pcs.status",state="online"} 0.0' in text
    assert 'signalbox_sweep_last_run_age_seconds{sweep="devices.mark_silent_pcs"} +Inf' in text
    assert 'signalbox_sweep_runs{outcome="error",sweep="devices.mark_silent_pcs"} 0.0' in text
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


def test_of_the_databases_complaint_about_a_row_the_row_is_left_out():
    said = "refused\nDETAIL:  Failing row contains (7, Dear Kim,\nyour code is 123)."
    assert redact(said) == "refused"
    chained = (
        f"{said}\n\nThe above exception was the direct cause of the following exception:\n\nIntegrityError: {said}"
    )
    assert redact(chained).endswith("IntegrityError: refused") and "code" not in redact(chained)


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


@pytest.fixture
def lines(settings):
    """What the log says, each line by itself; the configuration of the other tests comes back."""
    before, console, stream = logging.root.handlers[:], settings.LOGGING, StringIO()
    settings.LOGGING = {"format": "json"}
    with redirect_stderr(stream):
        configure_logging(settings.LOGGING)
        yield lambda: stream.getvalue().splitlines()
    configure_logging(console)
    logging.root.handlers[:] = before


@pytest.mark.parametrize("debug", [True, False])
def test_a_refusal_leaves_no_line_with_its_path(lines, settings, debug):
    settings.DEBUG = debug
    log_response("%s: %s", "Service Unavailable", "/u/a-links-token/", response=HttpResponse(status=503))
    assert lines() == []


def test_an_exception_leaves_a_line_without_its_path(lines):
    try:
        raise RuntimeError("kim@example.com")
    except RuntimeError as error:
        log_response("%s: %s", "Error", "/u/a-links-token/", response=HttpResponse(status=500), exception=error)
    [line] = lines()
    assert "RuntimeError" in line and "a-links-token" not in line and "kim" not in line


def test_the_web_servers_own_lines_are_like_the_others(lines, capsys):
    Lines(Config())
    logging.getLogger("gunicorn.error").warning("Invalid request from ip=%s: %s", "192.0.2.7", "no HTTP")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "Invalid request from [ip]: no HTTP"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/readyz", 503),
        ("/api/v1/tasks/", 503),
        ("/admin/", 503),
        ("/u/abc", 404),
        ("/metrics", 503),
    ],
)
def test_with_the_database_away_a_session_is_told_so(monkeypatch, client, path, status):
    client.cookies["sessionid"] = "a" * 32
    monkeypatch.setattr(CursorWrapper, "execute", away)
    monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", away)
    answer = client.get(path)
    assert answer.status_code == status
    assert (status == 503) == ("Retry-After" in answer.headers)


@pytest.mark.django_db
def test_a_quiet_clients_successes_leave_no_line_but_its_failures_do(caplog, client, settings):
    settings.QUIET_CLIENTS = ["player"]
    client.force_login(User.objects.create_superuser("player"))
    with caplog.at_level(logging.INFO, logger="http"):
        assert client.get("/api/v1/messages/").status_code == 200
        assert client.get("/api/v1/nothing/").status_code == 404
    assert [record.msg["status"] for record in caplog.records if record.name == "http"] == [404]
