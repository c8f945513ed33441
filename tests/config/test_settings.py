"""Each variable of the environment, broken: one clear line that names it, and a start that stops."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


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


def read(monkeypatch, **env):
    """What settings.py makes of this environment."""
    for name in {"DATABASE_URL", *env}:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(settings.BASE_DIR / "config" / "settings.py"))


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
        ("REDIS_URL", "redis://host/main"),
        ("REDIS_URL", "redis://host/0?speed=high"),
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
        ("DATABASE_URL", "postgresql://host:0/name"),
        ("DATABASE_URL", "postgresql://user:pass%00word@host/name"),
        ("SMTP_URL", "smtp://host:0"),
        ("DATA_DIR", "/proc/nowhere"),
        ("DATA_DIR", "~nobody-of-this-name/var"),
    ],
)
def test_a_bad_value_is_refused_by_its_name_in_one_line(monkeypatch, name, value):
    with pytest.raises(ImproperlyConfigured) as refused:
        read(monkeypatch, **{"SECRET_KEY": "" if name == "DATA_DIR" else "k" * 60, name: value})
    assert re.fullmatch(f"{name}: .+", str(refused.value))


def test_a_refusal_stops_the_start_in_one_line():
    done = manage("check", SECRET_KEY="k" * 60, PORT="http")
    assert done.returncode != 0
    assert done.stderr == "error: PORT: expected a whole number from 1 to 65535, not 'http'\n"


@pytest.mark.parametrize("command", [["migrate"], ["sweep", "--all"], ["integrity"]])
def test_a_database_that_is_away_is_told_in_one_line_by_every_command(command):
    done = manage(*command, SECRET_KEY="k" * 60, DATABASE_URL="postgresql://nobody@127.0.0.1:1/x")
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: DATABASE_URL: the database cannot be used: ")


@pytest.mark.parametrize("text", ["https://signalbox.example/App/", "HTTPS://Signalbox.Example/App"])
def test_a_public_address_with_a_path_is_trusted_by_its_origin(monkeypatch, text):
    found = read(monkeypatch, PUBLIC_URL=text, SECRET_KEY="k" * 60)
    assert found["CSRF_TRUSTED_ORIGINS"] == ["https://signalbox.example"]
    assert found["PUBLIC_URL"] == "https://signalbox.example/App"
    assert found["SESSION_COOKIE_SECURE"]


@pytest.mark.parametrize("key", ["", "  "])
def test_a_database_of_ones_own_needs_a_secret_key(monkeypatch, key):
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY: required"):
        read(monkeypatch, SECRET_KEY=key, DATABASE_URL="postgresql://u@localhost/x")


@pytest.mark.parametrize("key", ["short", " " * 20 + "short" + " " * 20])
def test_a_short_secret_key_is_refused(monkeypatch, key):
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY: at least 32"):
        read(monkeypatch, SECRET_KEY=key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works in other people's directories")
def test_a_key_that_root_made_in_somebodys_directory_is_theirs(monkeypatch, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    key = read(monkeypatch, SECRET_KEY="", DATA_DIR=str(tmp_path))["SECRET_KEY"]
    kept = tmp_path / "secret-key"
    assert (kept.read_text(), kept.stat().st_uid, kept.stat().st_mode & 0o777) == (key, 65534, 0o600)
    assert os.listdir(tmp_path) == ["secret-key"]


def test_a_blank_value_is_none(monkeypatch):
    blank = dict.fromkeys(("DATABASE_URL", "REDIS_URL", "PORT", "ALLOWED_HOSTS", "TIME_ZONE"), "  ")
    found = read(monkeypatch, SECRET_KEY="k" * 60, **blank)
    assert (found["DATABASE"]["ENGINE"], found["REDIS_URL"], found["PORT"]) == ("config.embedded", "", 8000)


def test_production_settings_are_clean_under_deploy_checks():
    done = manage(
        "check", "--deploy", "--fail-level", "WARNING", SECRET_KEY=os.urandom(40).hex(), PUBLIC_URL="https://s.example"
    )
    assert done.returncode == 0, done.stderr
