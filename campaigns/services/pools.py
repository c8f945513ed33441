"""Which sender an enrollment gets: the least loaded healthy one of the sequence's pool, and then always the same."""

from collections import Counter, defaultdict
from collections.abc import Collection
from uuid import UUID

from django.db.models import Count

from campaigns.models import Enrollment, Sender, SequenceSender


class Pools:
    """The healthy senders of some sequences and how many live enrollments each has; counts on as it hands out."""

    def __init__(self, sequence_ids: Collection[UUID]) -> None:
        self.members: dict[tuple[UUID, str], list[UUID]] = defaultdict(list)
        rows = SequenceSender.objects.filter(sequence__in=list(sequence_ids)).order_by("position", "id")
        healthy = rows.filter(sender__in=Sender.objects.healthy())
        for sequence_id, sender_id, channel in healthy.values_list("sequence_id", "sender_id", "sender__channel"):
            self.members[sequence_id, channel].append(sender_id)
        everyone = {sender_id for senders in self.members.values() for sender_id in senders}
        loads = Enrollment.objects.live().filter(sender__in=everyone).order_by().values_list("sender_id")
        self.load = Counter(dict(loads.annotate(n=Count("pk"))))

    def has(self, sequence_id: UUID, channel: str) -> bool:
        return bool(self.members.get((sequence_id, channel)))

    def pick(self, sequence_id: UUID, channel: str) -> UUID | None:
        """Ties go to the earlier place in the pool."""
        members = self.members.get((sequence_id, channel))
        if not members:
            return None
        chosen = min(members, key=lambda pk: self.load[pk])
        self.load[chosen] += 1
        return chosen
