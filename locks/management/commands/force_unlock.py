import getpass
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError

from locks.models import NAME, REASON, BranchLock
from locks.services import force_unlock


class Command(BaseCommand):
    help = "End locks whoever holds them: all a branch holds now, or those named. Recorded with the reason."

    def add_arguments(self, parser: ArgumentParser) -> None:
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--branch", metavar="NAME")
        which.add_argument("--lock", metavar="ID", nargs="+", action="extend")
        parser.add_argument("--reason", required=True, metavar="TEXT")
        parser.add_argument("--dry-run", action="store_true", help="change nothing, print what would be ended")

    def handle(self, *args: Any, **options: Any) -> None:
        reason = options["reason"].strip()
        if not 1 <= len(reason) <= REASON or "\x00" in reason:
            raise CommandError(f"--reason: expected 1 to {REASON} characters")
        if options["branch"] is not None and (len(options["branch"]) > NAME or "\x00" in options["branch"]):
            raise CommandError(f"--branch: expected 1 to {NAME} characters")
        found = self._held(options["branch"], self._ids(options["lock"]))
        if options["dry_run"]:
            for lock in found:
                self.stdout.write(f"would release {lock.pk} on {lock.branch.name}: {lock} held by {lock.locked_by}")
            self.stdout.write(f"would release {len(found)} locks")
            return
        # The ids just read, so that a lock granted meanwhile survives.
        ended = self._end([lock.pk for lock in found], reason)
        names = {lock.pk: lock.branch.name for lock in found}
        for lock in ended:
            self.stdout.write(f"released {lock.pk} on {names[lock.pk]}: {lock} held by {lock.locked_by}")
        self.stdout.write(f"released {len(ended)} locks")

    def _end(self, ids: list[UUID], reason: str) -> list[BranchLock]:
        try:
            return force_unlock(f"command {getpass.getuser()}", reason, lock_ids=ids)
        except OperationalError as error:
            raise CommandError(f"nothing was released, try again: {str(error).splitlines()[0]}") from error

    def _held(self, branch: str | None, lock_ids: list[UUID] | None) -> list[BranchLock]:
        rows = BranchLock.objects.active().select_related("branch").order_by("pk")
        return list(rows.filter(branch__name=branch) if lock_ids is None else rows.filter(pk__in=lock_ids))

    def _ids(self, texts: list[str] | None) -> list[UUID] | None:
        try:
            return None if texts is None else [UUID(text) for text in texts]
        except ValueError:
            raise CommandError("--lock: expected ids of locks") from None
