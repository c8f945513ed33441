import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from config import integrity


class Command(BaseCommand):
    help = "Count what breaks an invariant; --heal does what the admin's button does."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--heal", metavar="NAME", help="an invariant's name or letter")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["heal"]:
            self._heal(options["heal"])
        readings = integrity.report()
        if options["json"]:
            self.stdout.write(json.dumps([reading.as_json() for reading in readings]))
            return
        for reading in readings:
            mark = "ok" if reading.count == 0 else reading.severity
            samples = f"  e.g. {', '.join(reading.samples)}" if reading.samples else ""
            self.stdout.write(f"{mark:8} {reading.count:8} {reading.name}{samples}")

    def _heal(self, name: str) -> None:
        try:
            counts = integrity.heal(name)
        except KeyError:
            raise CommandError(f"no such invariant: {name}") from None
        except ValueError as error:
            raise CommandError(str(error)) from None
        self.stderr.write(f"healed {name}: {dict(counts)}")
