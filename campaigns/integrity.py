"""What must hold in campaigns, what mends it, and the gauges of /metrics."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from django.db.models import Count, Min
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from prometheus_client.core import GaugeMetricFamily

from campaigns.models import Execution, Sequence
from campaigns.services import counting, reconciling
from campaigns.services.forecasting import forecast
from config.integrity import Invariant
from config.sweeping import PAGE


def walk(find: Callable[[datetime], Any], act: Callable[[list[Any], datetime], Counter[str]]) -> Any:
    """A healer: page after page of sequences, until none is left behind the last one seen."""

    def heal(now: datetime) -> Counter[str]:
        done: Counter[str] = Counter()
        last = None
        while True:
            rows = find(now).order_by("pk")
            page = list((rows.filter(pk__gt=last) if last else rows).values_list("pk", flat=True)[:PAGE])
            if not page:
                return done
            done.update(act(page, now))
            last = page[-1]

    return heal


def by_rule(name: str) -> Any:
    found = reconciling.rule(name)
    return walk(found.candidates, lambda ids, now: reconciling.apply_rule(found, ids, now, wait=True))


def overdue(now: datetime) -> Any:
    return Execution.objects.due(now).filter(effective_due__lt=now)


def outlook(now: datetime) -> list[str]:
    """Per sender: how many wait for its allowance, and when the last of them will have gone."""
    return [
        _now("%(sender)s: %(count)s waiting, %(limit)s a day, done about %(eta)s")
        % {
            "sender": line.sender,
            "count": line.waiting,
            "limit": "∞" if line.a_day is None else line.a_day,
            "eta": line.eta.strftime("%Y-%m-%d %H:%M %Z") if line.eta else "–",
        }
        for line in forecast(now)
    ]


INVARIANTS = [
    Invariant(
        "campaigns.stuck_completion",
        "error",
        _("Active for more than 10 minutes although nothing is pending and no guard holds."),
        lambda now: Sequence.objects.stuck_in_completion(now),
        by_rule("forward"),
        _("completes them"),
        "A",
        "since",
    ),
    Invariant(
        "campaigns.signal_drift",
        "error",
        _("has_pending_work is not what the rows say."),
        lambda now: Sequence.objects.drifted(),
        by_rule("drift"),
        _("computes it anew"),
        "B",
        "pending_work_changed_at",
    ),
    Invariant(
        "campaigns.orphans",
        "warning",
        _("Executions wait although their enrollment has ended."),
        lambda now: Execution.objects.orphaned().filter(enrollment__sequence__status__in=Sequence.RECONCILABLE),
        by_rule("orphans"),
        _("skips them as orphaned"),
        "C",
        "enrollment__ended_at",
    ),
    Invariant(
        "campaigns.completed_with_work",
        "error",
        _("Completed although there is work."),
        lambda now: Sequence.objects.contradictory(),
        by_rule("reverse"),
        _("skips what is stale and reopens what is not"),
        "D",
        "completed_at",
    ),
    Invariant(
        "campaigns.overdue",
        "info",
        _("Due and not sent yet. Waiting for a sender's allowance is healthy."),
        overdue,
        None,
        "",
        "E",
        "effective_due",
        outlook,
    ),
    Invariant(
        "campaigns.stuck_processing",
        "warning",
        _("Processing for 30 minutes or more, and messaging is not at it."),
        lambda now: Execution.objects.stuck(now).filter(enrollment__sequence__status__in=Sequence.RECONCILABLE),
        by_rule("stuck"),
        _("takes over the message's result, or queues again"),
        "G",
        "processing_started_at",
    ),
    Invariant(
        "campaigns.counters",
        "error",
        _("The counters do not add up, or are not what the rows say."),
        lambda now: Sequence.objects.miscounted(),
        walk(lambda now: Sequence.objects.miscounted(), counting.recount),
        _("counts anew"),
        "H",
    ),
]


def metrics() -> Iterator[GaugeMetricFamily]:
    from django.utils import timezone

    now = timezone.now()
    due = Execution.objects.due(now).aggregate(count=Count("pk"), oldest=Min("effective_due"))
    age = max(0.0, (now - due["oldest"]).total_seconds()) if due["oldest"] else 0.0
    yield _gauge("campaigns_due_steps", "Steps due and not sent yet", due["count"])
    yield _gauge("campaigns_oldest_due_step_seconds", "Since the oldest of them is due", age)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"signalbox_{name}", text)
    family.add_metric([], value)
    return family
