"""Long commands: page by page, each its own transaction, so that they can be stopped and run again."""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from campaigns.models import Sequence

PAGE = 200


def sequence_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise CommandError(f"--sequence: {text!r} is not an id") from None


class SequencesCommand(BaseCommand):
    """Walks over sequences and says what it changed. A dry run does the work and rolls it back."""

    has_sequence = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="change nothing, say what would be done")
        if self.has_sequence:
            parser.add_argument("--sequence", metavar="ID", help="this one only")

    def chosen(self, options: dict[str, Any], rows: Any) -> Any:
        if not options.get("sequence"):
            return rows
        pk = sequence_id(options["sequence"])
        if not Sequence.objects.filter(pk=pk).exists():
            raise CommandError(f"there is no sequence {pk}")
        return rows.filter(pk=pk)

    def walk(self, rows: Any, act: Callable[[list[UUID]], Counter[str]], *, dry_run: bool) -> Counter[str]:
        keys = list(rows.order_by("pk").values_list("pk", flat=True))
        done: Counter[str] = Counter()
        for page in pages(keys):
            with transaction.atomic():
                done.update(act(page))
                transaction.set_rollback(dry_run)
            self.show(min(len(keys), keys.index(page[-1]) + 1), len(keys))
        return done

    def show(self, at: int, total: int) -> None:
        """A bar on a terminal, lines otherwise; both beside the result, which goes to stdout."""
        if sys.stderr.isatty():
            filled = 40 * at // max(total, 1)
            self.stderr.write(
                f"\r[{'#' * filled}{' ' * (40 - filled)}] {at:,}/{total:,}", ending="\n" if at == total else ""
            )
        else:
            self.stderr.write(f"{at:,} of {total:,} sequences")

    def tell(self, done: Counter[str], *, dry_run: bool) -> None:
        said = ", ".join(f"{name} {count}" for name, count in sorted((+done).items())) or "nothing"
        self.stdout.write(f"{'would change' if dry_run else 'changed'}: {said}")


def pages(keys: list[UUID]) -> Iterator[list[UUID]]:
    for start in range(0, len(keys), PAGE):
        yield keys[start : start + PAGE]
