import json
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from config.sweeping import run


class Command(BaseCommand):
    help = "Run sweeps here and now, in the order given; one JSON line each."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME")
        parser.add_argument("--list", action="store_true", help="print the sweeps and their schedules")
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--dry-run", action="store_true", help="change nothing, print what would be done")
        parser.add_argument("--now", metavar="TIME", help="go by this time; outside DEBUG only with --dry-run")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["list"]:
            for name, plan in settings.SWEEPS.items():
                self.stdout.write(f"{name}\t{plan['cron']}")
            return
        names = list(settings.SWEEPS) if options["all"] else options["names"]
        if options["all"] and options["names"]:
            raise CommandError("name the sweeps to run or give --all, not both")
        if not names:
            raise CommandError("name the sweeps to run, or give --all or --list")
        if unknown := [name for name in names if name not in settings.SWEEPS]:
            raise CommandError(f"no such sweep: {', '.join(unknown)} (see --list)")
        now = self._now(options)
        failed = False
        for name in names:
            summary = run(name, now=now, dry_run=options["dry_run"], wait=True) or {}
            self.stdout.write(json.dumps(summary, ensure_ascii=False))
            failed |= bool(summary.get("error"))
        if failed:
            raise CommandError("a sweep told of an error; see above")

    def _now(self, options: dict[str, Any]) -> Any:
        if options["now"] is None:
            return None
        if not settings.DEBUG and not options["dry_run"]:
            raise CommandError("--now asks what would happen then: outside DEBUG it needs --dry-run")
        try:
            now = parse_datetime(options["now"])
        except ValueError:
            now = None
        # Sweeps reckon from it by years; outside these Python's calendar would end.
        if now is None or not 1970 <= now.year <= 9000:
            raise CommandError("--now: expected an ISO 8601 time such as 2026-11-18T09:00:00Z")
        return now if timezone.is_aware(now) else timezone.make_aware(now)
