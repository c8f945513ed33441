import json
from typing import Any

from django.core.management.base import CommandError
from django.db import transaction
from django.utils import timezone

from campaigns.management.progress import SequencesCommand, sequence_id
from campaigns.models import Sequence
from campaigns.services.reconciling import reconcile_sequence
from config import sweeping


class Command(SequencesCommand):
    help = "Run the batch rules on all sequences, or on one and print its verdict."

    def handle(self, *args: Any, **options: Any) -> None:
        if options["sequence"]:
            self.reconcile_one(options)
            return
        ran = sweeping.run("campaigns.reconcile_sequences", dry_run=options["dry_run"], wait=True) or {}
        self.stdout.write(json.dumps(ran))
        if ran.get("error"):
            raise CommandError("a sequence could not be reconciled; see above")

    def reconcile_one(self, options: dict[str, Any]) -> None:
        pk = sequence_id(options["sequence"])
        if not Sequence.objects.filter(pk=pk).exists():
            raise CommandError(f"there is no sequence {pk}")
        with transaction.atomic():
            found = reconcile_sequence(pk, timezone.now())
            transaction.set_rollback(options["dry_run"])
        said = found.verdict
        answer = {
            "sequence": str(pk),
            "dry_run": options["dry_run"],
            "verdict": said.verdict,
            "guard": said.guard,
            "until": said.until.isoformat() if said.until else None,
            "changes": found.changes,
        }
        self.stdout.write(json.dumps(answer))
