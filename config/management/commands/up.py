import os
import socket
import time
from argparse import ArgumentParser
from typing import Any

from django import db
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from config import embedded
from config.management.commands.live_demo import PLAYERS
from config.observe import Told
from config.supervisor import boot
from config.supervisor.processes import Child, Interrupted, Signals, supervise
from config.supervisor.vigil import Vigil
from config.supervisor.watch import Watch

READY_WITHIN = 120.0
STOP_WITHIN = 9.5  # seconds from the signal to the end; what the children leave of them is the embedded server's


class Command(BaseCommand):
    help = "Start everything: database, schema, schedules, demo data, web server, workers. Ctrl-C stops it all."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--no-demo", action="store_true", help="leave an empty database empty")
        parser.add_argument("--no-worker", action="store_true", help="web server only; another machine runs the sweeps")
        parser.add_argument("--port", type=int, metavar="N", help="instead of PORT")

    def handle(self, *args: Any, **options: Any) -> None:
        signals = Signals()
        if settings.LOG_FORMAT == "json":
            self.stderr = OutputWrapper(Told("up"))  # type: ignore[arg-type]
        port = options["port"] if options["port"] is not None else settings.PORT
        if not 1 <= port <= 65535:
            raise CommandError("--port: expected a whole number from 1 to 65535")
        try:
            self._up(signals, port, not options["no_demo"], not options["no_worker"])
        except (Interrupted, CommandError, db.Error):
            # Interrupted in the middle of a statement, the connection may complain on its way out.
            if signals.orderly or not signals.stop:
                raise
        finally:
            signals.orderly = True  # from here on a second Ctrl-C changes nothing
            db.connections.close_all()
            if settings.DATABASES["default"]["ENGINE"] == "config.embedded":
                taken = time.monotonic() - signals.asked_at if signals.asked_at else 0.0
                embedded.leave(settings.DATA_DIR, max(0.5, STOP_WITHIN - taken))
        self.stderr.write("Stopped; the data stay.")

    def _up(self, signals: Signals, port: int, demo: bool, worker: bool) -> None:
        self.lock = boot.take_lock(settings.DATA_DIR)
        boot.check_port(port)
        boot.check_broker()
        with boot.alone():
            boot.prepare_database(demo, self.stderr)
            facts = [("Admin", boot.admin_login()), ("Token", boot.client_token(demo))]
        # Children with another port than ours also have another address to put into links.
        environment = {"PORT": str(port)}
        alive = demo and worker and boot.has_demo()
        if alive:
            environment |= boot.demo_environment(PLAYERS)
        lane = f"{settings.Q_CLUSTER['name']}@{socket.gethostname()}:{port}"
        web = Child("web", web_arguments(port), environment)
        cluster = Child("cluster", [lane], environment) if worker else None
        watch = Watch(cluster, lane, signals)
        watch.start()
        pulse = Pulse(self, port, cluster, watch, facts)
        play = [Child("demo", [f"http://127.0.0.1:{port}"], environment)] if alive else []
        children = [web, *([cluster] if cluster else []), *play]
        Vigil(children, web, lambda: boot.answers(port, "/healthz"), signals).start()
        try:
            supervise(children, signals, pulse)
        finally:
            watch.join(timeout=1)


class Pulse:
    """Between two looks at the children: carry out the watch's verdict, and announce when all is ready."""

    def __init__(
        self, command: BaseCommand, port: int, cluster: Child | None, watch: Watch, facts: list[tuple[str, str]]
    ) -> None:
        self.command, self.port, self.cluster, self.watch, self.facts = command, port, cluster, watch, facts
        self.announced = False
        self.give_up = time.monotonic() + READY_WITHIN

    def __call__(self) -> None:
        if self.watch.verdict and self.cluster:
            pid, reason = self.watch.verdict
            self.watch.verdict = None
            if self.cluster.pid == pid:
                self.command.stderr.write(f"The worker cluster gives {reason}: restarting it.")
                self.cluster.bury()
        if not self.announced:
            self._announce()

    def _announce(self) -> None:
        if boot.answers(self.port, "/readyz" if self.cluster else "/healthz"):
            self.announced = True
            named = os.environ.get("PUBLIC_URL", "").strip()
            url = settings.PUBLIC_URL if named else f"http://localhost:{self.port}"
            for name, value in [("URL", f"{url}/"), *self.facts]:
                self.command.stdout.write(f"{name:6} {value}")
            self.command.stdout.flush()
        elif time.monotonic() > self.give_up:
            raise CommandError(f"not ready after {READY_WITHIN:.0f} s; the lines above say why")


def web_arguments(port: int) -> list[str]:
    binds = [f"--bind={f'[{address}]' if ':' in address else address}:{port}" for address in boot.addresses()]
    return [
        *binds,
        f"--workers={settings.WEB_WORKERS}",
        "--worker-class=gthread",
        # A request that waits for a lock keeps its thread (not its connection) for up to a minute, and whoever would
        # release that lock needs one too. Threads start as they are needed.
        f"--threads={settings.WEB_THREADS}",
        # Of the worker's main loop, which turns every second whatever its requests do; its start must fit as well.
        "--timeout=30",
        "--graceful-timeout=5",
        # Longer than the proxies in front keep theirs: who closes first decides whose next request is lost.
        "--keep-alive=75",
        # A cursor carries a value of its column, which in another script than ours is a long line of escapes.
        "--limit-request-line=8190",
        "--no-control-socket",
        "--log-level=warning",
        "--logger-class=config.supervisor.lines.Lines",
        "config.wsgi:application",
    ]
