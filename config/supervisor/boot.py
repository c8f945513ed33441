"""What must stand before the first child starts. Whatever is wrong is one sentence for the operator."""

import fcntl
import http.client
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import redis
from django import db
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from knox.auth import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed

from config.embedded.keeper import open_private
from config.management.commands.seed_demo import CONSOLE
from config.observe import PROBER

LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
DEMO_APPLICATION = "demo"
CLIENT = "demo-client"
# Everything a person trying the API may want; a device agent speaks for one PC and gets a client of its own.
CLIENT_GROUPS = ("operator", "message-sender", "campaign-manager", "lock-holder", "lock-admin", "reminder-client")


def take_lock(directory: Path) -> int:
    """One `up` per data directory. The kernel frees the lock at any kind of death; the pid inside is only to tell."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open_private(directory / "up.lock", os.O_RDWR)
    except OSError as error:
        raise CommandError(f"DATA_DIR: {directory} cannot be used: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 20).decode().strip() or "unknown"
        raise CommandError(
            f"DATA_DIR: {directory} is in use by another `up`, process {holder}: stop that one or set another DATA_DIR"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def addresses() -> list[str]:
    """Where to listen follows ALLOWED_HOSTS: while only loopback names are answered, nobody else need reach us."""
    if set(settings.ALLOWED_HOSTS) <= LOOPBACK:
        return [address for address in ("127.0.0.1", "::1") if _exists(address)]
    # Where `::` takes IPv4 as well, which is usual, 0.0.0.0 beside it would be "already in use".
    return ["::"] if _takes_both() or not _exists("0.0.0.0") else ["0.0.0.0"]


def _exists(address: str) -> bool:
    try:
        with _socket_for(address) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _takes_both() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            probe.listen(1)
            socket.create_connection(("127.0.0.1", probe.getsockname()[1]), timeout=1).close()
    except OSError:
        return False
    return True


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)


def check_port(port: int) -> None:
    """The children of an `up` killed a moment ago may hold it for a blink."""
    give_up = time.monotonic() + 2
    while (reason := _refusal(port)) and time.monotonic() < give_up:
        time.sleep(0.1)
    if reason:
        raise CommandError(f"PORT: {port} cannot be listened on ({reason}): set PORT or give --port")


def _refusal(port: int) -> str:
    for address in addresses():
        with _socket_for(address) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                return error.strerror or str(error)
    return ""


def check_broker() -> None:
    """A Redis that is away now would only show as a worker that never answers."""
    if not settings.REDIS_URL:
        return
    try:
        with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=5) as broker:
            broker.ping()
    except redis.RedisError as error:
        raise CommandError(f"REDIS_URL: the broker cannot be used: {' '.join(str(error).split())}") from error


@contextmanager
def alone() -> Iterator[None]:
    """One machine at a time prepares a shared database; the others wait and find it done."""
    try:
        with db.connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(hashtext('signalbox up'))")
    except db.Error as error:
        raise _unusable(error, "the database cannot be used") from error
    try:
        yield
    finally:
        db.connection.close()  # frees the lock, whatever state the connection is in


def prepare_database(demo: bool, out: OutputWrapper) -> None:
    out.write("Preparing the database …")
    try:
        call_command("migrate", verbosity=0, interactive=False)
        call_command("sync_schedules", stdout=StringIO())
    except db.Error as error:
        raise _unusable(error, "migrating failed") from error
    if demo and _empty():
        out.write("Loading demo data …")
        with db.transaction.atomic():  # all of it or, after a kill, none of it and again next time
            call_command("seed_demo", stderr=out)


def demo_environment(players: list[str]) -> dict[str, str]:
    """The demo's messages go to the console, and its players leave the log to whoever looks, unless told otherwise."""
    console = ",".join(f"{kind}={name}" for kind, name in CONSOLE.items())
    wanted = {"PROVIDERS": console, "QUIET_CLIENTS": ",".join(players)}
    return {name: value for name, value in wanted.items() if not os.environ.get(name, "").strip()}


def has_demo() -> bool:
    return apps.get_model("messaging", "Application").objects.filter(slug=DEMO_APPLICATION).exists()


def _unusable(error: db.Error, what: str) -> Exception:
    if isinstance(error, ImproperlyConfigured):
        return error  # the embedded server's own sentence
    reason = " ".join(str(error).split())
    return CommandError(f"DATABASE_URL: {what}: {reason}")


def _empty() -> bool:
    """A database nobody has used: not even a login was made, which is the last thing a first start does."""
    return not get_user_model().objects.exists()


def keep_secret(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(open_private(draft, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(f"{text}\n")
    draft.replace(path)


def kept_secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def admin_login() -> str:
    """The admin's name and password; one that a person changed since is theirs to know."""
    path = settings.DATA_DIR / "admin-password"
    users = get_user_model().objects
    password = kept_secret(path)
    admin = users.filter(username="admin").first()
    if admin is None:
        if not password:
            password = secrets.token_urlsafe(12)
            keep_secret(path, password)
        users.create_superuser("admin", password=password)
    elif not password or not admin.check_password(password):
        return "admin / (the password set by you)"
    return f"admin / {password}"


def client_token(demo: bool) -> str:
    """The token of the start before, or a new one when there was none or it was revoked or has run out."""
    path = settings.DATA_DIR / "client-token"
    token = kept_secret(path)
    if not (token and _opens(token)):
        groups = [f"--group={group}" for group in CLIENT_GROUPS]
        application = [f"--application={DEMO_APPLICATION}"] if demo else []
        out = StringIO()
        call_command("create_client", CLIENT, *groups, *application, stdout=out, stderr=StringIO())
        token = out.getvalue().strip()
        keep_secret(path, token)
    return token


def _opens(token: str) -> bool:
    try:
        TokenAuthentication().authenticate_credentials(token.encode())
    except AuthenticationFailed:
        return False
    return True


def answers(port: int, path: str) -> bool:
    """Whether our own web server says yes there."""
    host = next((name for name in settings.ALLOWED_HOSTS if not name.startswith((".", "*"))), "localhost")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path, headers={"Host": host, "User-Agent": PROBER})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
