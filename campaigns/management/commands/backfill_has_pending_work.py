from collections import Counter
from typing import Any

from campaigns.management.progress import SequencesCommand
from campaigns.models import Sequence
from campaigns.services.counting import backfill


class Command(SequencesCommand):
    help = "Compute has_pending_work of every sequence from its rows."

    def handle(self, *args: Any, **options: Any) -> None:
        rows = self.chosen(options, Sequence.objects.all())
        done = self.walk(rows, lambda ids: Counter(backfilled=backfill(ids)), dry_run=options["dry_run"])
        self.tell(done, dry_run=options["dry_run"])
