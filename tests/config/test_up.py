"""`manage.py up` as real processes: what it prints, what it refuses, what it heals, and what it leaves behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from django.conf import settings

from config.embedded import keeper

pytestmark = pytest.mark.xdist_group("up")  # each instance is a dozen processes; two at a time are enough for a machine

WORKERS = 2


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Up:
    def __init__(self, home: Path, *arguments: str, port: int | None = None, **environment: str) -> None:
        self.home, self.port = home, port or free_port()
        inherited = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "PORT", "PUBLIC_URL")}
        knobs = {"DATA_DIR": str(home), "Q_WORKERS": str(WORKERS), "WEB_WORKERS": "1"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", f"--port={self.port}", *arguments],
            cwd=settings.BASE_DIR,
            env={**inherited, **knobs, **environment},
            stdout=self.output,
            stderr=self.errors,
        )

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def complained(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def ready(self) -> "Up":
        until(lambda: "Token" in self.said() or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.complained()
        return self

    def ended(self) -> int:
        return self.process.wait(60)

    def get(self, path: str, **options: Any) -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", **options)
        except httpx.TransportError:
            return None

    def serves(self, path: str = "/healthz") -> bool:
        answer = self.get(path)
        return answer is not None and answer.status_code == 200

    @property
    def token(self) -> str:
        found = re.search(r"^Token\s+(\S+)$", self.said(), re.M)
        assert found
        return found[1]

    @property
    def password(self) -> str:
        found = re.search(r"^Admin\s+admin / (\S+)$", self.said(), re.M)
        assert found
        return found[1]

    def metric(self, name: str) -> float:
        answer = self.get("/metrics", headers={"Authorization": f"Token {self.token}"})
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.text if answer else "", re.M)
        return float(found[1]) if found else float("inf")

    def family(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline()).strip()
                found.setdefault(self._kind(title, process.ppid()), []).append(process.pid)
        return found

    def _kind(self, title: str, parent: int) -> str:
        if title.startswith("qcluster MainProcess"):
            return "cluster" if parent == self.process.pid else "sentinel"
        for mark, kind in (("gunicorn: ma", "web"), ("gunicorn: wo", "web worker"), (" idle", "worker")):
            if mark in title:
                return kind
        return title.rpartition(" ")[2]

    def complete(self) -> bool:
        kinds = {"web": 1, "web worker": 1, "cluster": 1, "sentinel": 1, "pusher": 1, "monitor": 1, "worker": WORKERS}
        family = self.family()
        return all(len(family.get(kind, [])) == count for kind, count in kinds.items())

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def server_gone(home: Path) -> bool:
    return not keeper.processes_in(home / "postgres") and not (home / "postgres" / "postmaster.pid").exists()


def clear(home: Path) -> None:
    until(lambda: not keeper.processes_in(home / "postgres"))
    shutil.rmtree(home.parent)


def new_home() -> Path:
    """Within reach of the server's own user, as pytest's temporary directories are not."""
    top = Path(tempfile.mkdtemp(prefix="signalbox-up-"))
    top.chmod(0o755)
    return top / "var"


@pytest.fixture
def home() -> Iterator[Path]:
    place = new_home()
    yield place
    clear(place)


@pytest.fixture(scope="module")
def lasting_home() -> Iterator[Path]:
    """For starts that need no first one: migrating is half of it."""
    place = new_home()
    yield place
    clear(place)


@pytest.fixture
def up(home: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str, **options: Any) -> Up:
        started.append(Up(options.pop("home", home), *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[Up]:
    place = new_home()
    one = Up(place)
    try:
        yield one.ready()
    finally:
        one.kill()
        clear(place)


def test_the_login_it_prints_opens_the_admin(running):
    with httpx.Client(base_url=f"http://localhost:{running.port}") as browser:
        browser.get("/admin/login/")
        form = {
            "username": "admin",
            "password": running.password,
            "csrfmiddlewaretoken": browser.cookies["csrftoken"],
            "next": "/admin/",
        }
        answer = browser.post("/admin/login/", data=form)
        assert (answer.status_code, answer.headers["location"]) == (302, "/admin/")
        assert browser.get("/admin/").status_code == 200
        assert browser.get("/static/console/console.css").status_code == 200


def test_the_token_it_prints_opens_the_api_and_all_is_ready(running):
    assert running.serves("/readyz")
    assert running.get("/api/v1/integrity/", headers={"Authorization": f"Token {running.token}"}).status_code == 200
    assert running.metric("signalbox_worker_canary_age_seconds") < 90


def test_secrets_are_for_the_owner_alone(running):
    for name in ("admin-password", "client-token", "up.lock"):
        assert (running.home / name).stat().st_mode & 0o777 == 0o600


def test_every_sweep_ran_at_the_start(running):
    for name in settings.SWEEPS:
        until(lambda name=name: running.metric(f'signalbox_sweep_last_run_age_seconds{{sweep="{name}"}}') < 600)


def test_a_second_one_on_the_same_directory_refuses_and_names_the_first(running):
    second = Up(running.home)
    assert second.ended() == 1
    [line] = second.complained().strip().splitlines()
    assert f"is in use by another `up`, process {running.process.pid}" in line
    assert running.serves()


@pytest.mark.parametrize("kind", ["web", "web worker", "pusher", "monitor", "worker", "sentinel", "cluster"])
def test_a_killed_process_is_healed(running, kind):
    until(running.complete)
    victims = running.family()[kind]  # all workers at once: one of them holds the queue's lock and takes it along
    killed_at = time.time()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(psutil.pid_exists, victims)) and running.complete() and running.serves())
    if not kind.startswith("web"):
        age = "signalbox_worker_canary_age_seconds"
        until(lambda: running.metric(age) < time.time() - killed_at)


def test_a_killed_database_server_is_healed(running):
    before = keeper.postmaster(running.home / "postgres")
    os.kill(before, signal.SIGKILL)
    until(lambda: keeper.postmaster(running.home / "postgres") not in (None, before))
    until(lambda: running.serves("/readyz"))


def test_killed_itself_it_leaves_nobody_and_the_next_start_goes_on_where_it_was(up, lasting_home):
    first = up("--no-demo", home=lasting_home).ready()
    family = psutil.Process(first.process.pid).children(recursive=True)
    assert len(family) >= WORKERS + 6
    first.kill()
    until(lambda: not any(process.is_running() for process in family))
    second = up("--no-worker", home=lasting_home, port=first.port).ready()
    assert (second.password, second.token) == (first.password, first.token)
    assert "cluster" not in second.family()
    second.process.send_signal(signal.SIGINT)
    second.process.send_signal(signal.SIGINT)
    assert second.ended() == 0
    assert "Traceback" not in second.complained()
    until(lambda: server_gone(lasting_home))


def test_stops_everything_on_sigterm(up, lasting_home):
    one = up("--no-demo", home=lasting_home).ready()
    until(one.complete)
    family = psutil.Process(one.process.pid).children(recursive=True)
    one.process.terminate()
    assert one.ended() == 0
    assert not any(process.is_running() for process in family)
    assert "Traceback" not in one.complained()
    assert "child_died" not in one.complained()
    until(lambda: server_gone(lasting_home))


def test_a_signal_during_the_preparations_stops_it_too(up, home):
    one = up("--no-demo")
    until(lambda: "Preparing" in one.complained())
    one.process.send_signal(signal.SIGINT)
    assert one.ended() == 0
    assert "Traceback" not in one.complained()
    until(lambda: server_gone(home))


def test_a_taken_port_is_named(up):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        one = up(port=other.getsockname()[1])
        assert one.ended() == 1
    [line] = one.complained().strip().splitlines()
    assert f"PORT: {one.port} cannot be listened on (Address already in use)" in line


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"PORT": "abc"}, "PORT"),
        ({"WEB_WORKERS": "0"}, "WEB_WORKERS"),
        ({"DATABASE_URL": "nonsense"}, "DATABASE_URL"),
        ({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x", "SECRET_KEY": "k" * 60}, "DATABASE_URL"),
        ({"DATA_DIR": "/proc/nowhere", "SECRET_KEY": "k" * 60}, "DATA_DIR"),
    ],
    ids=["port", "web workers", "nonsense for a database", "unreachable database", "impossible directory"],
)
def test_a_broken_environment_is_told_in_one_line(up, environment, named):
    one = up(**environment)
    assert one.ended() == 1
    lines = [line for line in one.complained().strip().splitlines() if not line.startswith("Stopped")]
    assert len(lines) == 1, lines
    assert f": {named}: " in lines[0]


def test_a_sweep_missing_from_the_table_fails_the_start(up, tmp_path):
    (tmp_path / "no_sweeper.py").write_text(
        "from config.settings import *\nSWEEPS = {k: v for k, v in SWEEPS.items() if k != 'devices.mark_silent_pcs'}\n"
    )
    one = up(PYTHONPATH=str(tmp_path), DJANGO_SETTINGS_MODULE="no_sweeper")
    assert one.ended() == 1
    assert "devices.mark_silent_pcs" in one.complained()
