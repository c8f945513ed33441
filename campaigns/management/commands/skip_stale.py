from typing import Any

from django.utils import timezone

from campaigns.management.progress import SequencesCommand
from campaigns.services import reconciling


class Command(SequencesCommand):
    help = "Skip every stale execution and end its enrollment."

    def handle(self, *args: Any, **options: Any) -> None:
        now = timezone.now()
        rows = self.chosen(options, reconciling.stale_sequences(now))
        done = self.walk(rows, lambda ids: reconciling.skip_stale(ids, now), dry_run=options["dry_run"])
        self.tell(done, dry_run=options["dry_run"])
