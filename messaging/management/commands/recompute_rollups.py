from argparse import ArgumentTypeError
from datetime import UTC, datetime, time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.dateparse import parse_date, parse_datetime

from messaging.services.analytics import recompute_rollups


def moment(text: str) -> datetime:
    try:
        day = parse_date(text)
        found = datetime.combine(day, time(), UTC) if day else parse_datetime(text)
    except ValueError:
        found = None
    if found is None:
        raise ArgumentTypeError(f"{text!r} is neither a date nor a time")
    return found if found.tzinfo else found.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = "Compare the roll-ups with the messages, UTC day by day, and correct what differs. May be stopped any time."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--from", dest="start", type=moment, help="first day (a date or a time); default: all")
        parser.add_argument("--to", dest="end", type=moment, help="the day to stop before; default: all")

    def handle(self, *args: Any, **options: Any) -> None:
        start, end = options["start"], options["end"]
        if start and end and start > end:
            raise CommandError("--from: the range ends before it begins")
        days = wrong = 0
        for day, corrected in recompute_rollups(start, end):
            days, wrong = days + 1, wrong + corrected
            self.stdout.write(f"{day:%Y-%m-%d}: {corrected} corrected")
        self.stdout.write(f"{days} days, {wrong} figures corrected")
