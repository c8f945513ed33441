"""How long what is overdue has to wait behind the senders' limits."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count

from campaigns.models import Execution, Sender
from campaigns.services.sending import usage
from campaigns.services.windows import TICK, Allowance, allowance, turn_at


@dataclass(frozen=True)
class Forecast:
    """`a_day` is None without a limit; `eta` None where a person must mend the sender first."""

    sender: Sender
    waiting: int
    a_day: int | None
    eta: datetime | None


def forecast(now: datetime, most: int = 5) -> list[Forecast]:
    """The senders with the longest queues: all that should have gone by now, deferred or not."""
    rows = Execution.objects.queued().filter(
        scheduled_at__lt=now,
        enrollment__status="active",
        enrollment__sequence__status="active",
        enrollment__sender__isnull=False,
    )
    counts = dict(
        rows.order_by()
        .values_list("enrollment__sender_id")
        .annotate(n=Count("pk"))
        .order_by("-n", "enrollment__sender_id")[:most]
    )
    senders = {row.pk: row for row in Sender.objects.filter(pk__in=counts)}
    used = usage(senders.values(), now) if senders else {}
    return [_of(senders[pk], count, allowance(senders[pk], now, *used[pk]), now) for pk, count in counts.items()]


def _of(sender: Sender, waiting: int, allowed: Allowance, now: datetime) -> Forecast:
    limits = [limit for limit in (allowed.daily, allowed.hourly and allowed.hourly * 24) if limit is not None]
    a_day = min(limits) if limits else None
    last = turn_at(allowed, now, waiting - 1) if sender.healthy else None
    return Forecast(sender, waiting, a_day, last and max(last, now + TICK))
