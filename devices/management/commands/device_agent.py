import signal
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from devices.client import Agent, Refused, Server


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"expected a number, not {text!r}") from None
        if not low <= value <= high:
            raise ArgumentTypeError(f"expected {low:g} to {high:g}")
        return value

    return parse


class Command(BaseCommand):
    help = "Play a PC of simulated devices over the REST API, until stopped or idle."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--pc", required=True, metavar="PC-01")
        parser.add_argument("--devices", type=number(1, 200, int), default=20, metavar="N")
        parser.add_argument("--url", required=True, metavar="http://localhost:8000")
        parser.add_argument("--token", required=True, help="of a client made with create_client --pc")
        parser.add_argument("--failure-rate", type=number(0, 1), default=0.1, metavar="0.1")
        parser.add_argument("--job-seconds", type=number(0, 86400), default=0.0, metavar="SECONDS")
        parser.add_argument("--exit-when-idle", type=number(0, 86400), metavar="SECONDS")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            server = Server(options["url"], options["token"])
        except ValueError as error:
            raise CommandError(f"--url: {error}") from None
        agent = Agent(
            server,
            options["pc"],
            options["devices"],
            failure_rate=options["failure_rate"],
            job_seconds=options["job_seconds"],
            exit_when_idle=options["exit_when_idle"],
            say=self.stderr.write,
        )
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, agent.stop)
        try:
            counts = agent.run()
        except Refused as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{options['pc']}: " + (", ".join(f"{k} {v}" for k, v in sorted(counts.items())) or "idle"))
