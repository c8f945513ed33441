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
        ("PUBLIC_URL", "http://host:0"),
        ("PUBLIC_URL", "https://signalbox.example/?next=1"),
        ("PUBLIC_URL", "https://user:password@signalbox.example"),
        ("PUBLIC_URL", "https://signal box.example"),
        ("CSRF_TRUSTED_ORIGINS", "signalbox.example"),
        ("CSRF_TRUSTED_ORIGINS", "https://signalbox.example/app"),
        ("CSRF_TRUSTED_ORIGINS", ","),
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
        ("API_RATE", "10/month"),
        ("HSTS_SECONDS", "-1"),
        ("DATABASE_URL", "mysql://x/y"),
        ("DATABASE_URL", "postgresql://host"),
        ("DATABASE_URL", "postgresql://host/name?sslmod=require"),
        ("DATA_DIR", "/proc/nowhere"),
        ("DATA_DIR", "~nobody-of-this-name/var"),
    ],
)
def test_a_bad_value_stops_the_start_with_its_name_in_one_line(name, value):
    done = manage("check", **{"SECRET_KEY": "" if name == "DATA_DIR" else "k" * 60, name: value})
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: {name}: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [["migrate"], ["sweep", "--all"], ["integrity"]])
def test_a_database_that_is_away_is_told_in_one_line_by_every_command(command):
    done = manage(*command, SECRET_KEY="k" * 60, DATABASE_URL="postgresql://nobody@127.0.0.1:1/x")
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: DATABASE_URL: the database cannot be used: ")


def test_a_public_address_with_a_path_is_trusted_by_its_origin():
    code = "from config import settings; print(settings.CSRF_TRUSTED_ORIGINS, settings.PUBLIC_URL)"
    env = {**os.environ, "PUBLIC_URL": "https://signalbox.example/app/", "SECRET_KEY": "k" * 60}
    done = subprocess.run([sys.executable, "-c", code], cwd=settings.BASE_DIR, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["['https://signalbox.example']", "https://signalbox.example/app"]


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
