"""Each variable of the environment, broken: one clear line that names it, and a start that stops."""

import os
import subprocess
import sys

import pytest
from django.conf import settings


def manage(*args, **env):
    clean = {key: value for key, value in os.environ.items() if key not in ("DJANGO_SETTINGS_MODULE", "DATABASE_URL")}
    return subprocess.run(
        [sys.executable, "manage.py", *args],
        cwd=settings.BASE_DIR,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEBUG", "perhaps"),
        ("PORT", "http"),
        ("PORT", "70000"),
        ("WEB_WORKERS", "0"),
        ("Q_WORKERS", "many"),
        ("PUBLIC_URL", "signalbox.example"),
        ("PUBLIC_URL", "http://host:notaport"),
        ("CSRF_TRUSTED_ORIGINS", "signalbox.example"),
        ("REDIS_URL", "memcached://x"),
        ("LANGUAGE_CODE", "fr"),
        ("TIME_ZONE", "Mars/Olympus"),
        ("LOG_FORMAT", "xml"),
        ("SENTRY_DSN", "nope"),
        ("SENTRY_DSN", "https://signalbox.example/1"),
        ("ALLOWED_HOSTS", ","),
        ("ALLOWED_HOSTS", "https://signalbox.example"),
        ("ALLOWED_HOSTS", "signalbox.example:8000"),
        ("API_RATE", "fast"),
        ("HSTS_SECONDS", "-1"),
        ("DATABASE_URL", "mysql://x/y"),
        ("DATABASE_URL", "postgresql://host"),
        ("DATA_DIR", "/proc/nowhere"),
    ],
)
def test_a_bad_value_stops_the_start_with_its_name_in_one_line(name, value):
    done = manage("check", **{"SECRET_KEY": "" if name == "DATA_DIR" else "k" * 60, name: value})
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: {name}: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_database_of_ones_own_needs_a_secret_key():
    done = manage("check", SECRET_KEY="", DATABASE_URL="postgresql://u@localhost/x")
    assert done.stderr.startswith("error: SECRET_KEY: required")


def test_a_short_secret_key_is_refused():
    assert "SECRET_KEY" in manage("check", SECRET_KEY="short").stderr


def test_production_settings_are_clean_under_deploy_checks():
    done = manage(
        "check", "--deploy", "--fail-level", "WARNING", SECRET_KEY=os.urandom(40).hex(), PUBLIC_URL="https://s.example"
    )
    assert done.returncode == 0, done.stderr
