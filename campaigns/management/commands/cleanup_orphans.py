from typing import Any

from django.utils import timezone

from campaigns.management.progress import SequencesCommand
from campaigns.services import reconciling


class Command(SequencesCommand):
    help = "Skip executions that still wait although their enrollment has ended."
    has_sequence = False

    def handle(self, *args: Any, **options: Any) -> None:
        now, rule = timezone.now(), reconciling.rule("orphans")
        done = self.walk(
            rule.candidates(now),
            lambda ids: reconciling.apply_rule(rule, ids, now, wait=True),
            dry_run=options["dry_run"],
        )
        self.tell(done, dry_run=options["dry_run"])
