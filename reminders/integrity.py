from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db.models import Exists, Min, OuterRef, Q
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from prometheus_client.core import GaugeMetricFamily

from config.integrity import Invariant
from config.models import SweepRun
from messaging.models import Message
from reminders.models import Alarm, AlarmDelivery, AlarmDeliveryQuerySet, AlarmQuerySet
from reminders.services import part_twins, release_claims, reset_counts, send_batch

# Five ticks: one may be skipped, one may run out of time.
TICKS_MISSED = timedelta(minutes=5)
# Messages go by their own retention; a delivery older than this is no longer compared with them.
COMPARED = timedelta(days=30)
HEALED_AT_ONCE = 1000


def zombies(now: datetime) -> AlarmQuerySet:
    return Alarm.objects.zombies(now)


def due_not_taken(now: datetime) -> AlarmQuerySet:
    return Alarm.objects.overdue(now, TICKS_MISSED)


def delivery_without_message(now: datetime) -> AlarmDeliveryQuerySet:
    message = Message.objects.filter(pk=OuterRef("message_id"))
    recent = AlarmDelivery.objects.filter(state="sent", claimed_at__gt=now - COMPARED)
    return recent.filter(Q(message_id=None) | ~Exists(message))


def same_time(now: datetime) -> AlarmQuerySet:
    return Alarm.objects.same_time()


def count_below_one(now: datetime) -> AlarmQuerySet:
    return Alarm.objects.filter(sent_count__lt=1)


def release_zombies(now: datetime) -> Counter[str]:
    keys = list(zombies(now).values_list("pk", flat=True)[:HEALED_AT_ONCE])
    return Counter(released=release_claims(keys))


def send_due(now: datetime) -> Counter[str]:
    return Counter(send_batch(now, HEALED_AT_ONCE))


def begin_again(now: datetime) -> Counter[str]:
    keys = list(count_below_one(now).values_list("pk", flat=True)[:HEALED_AT_ONCE])
    return Counter(reset=reset_counts(keys))


def part(now: datetime) -> Counter[str]:
    # Twins next to each other, so both are among the first.
    twins = same_time(now).order_by("application_id", "user_id", "next_alarm_time")
    keys = list(twins.values_list("pk", flat=True)[:HEALED_AT_ONCE])
    return Counter(parted=part_twins(keys, now))


INVARIANTS = [
    Invariant(
        "reminders.zombies",
        "warning",
        _("An alarm claimed more than six hours ago: its worker died. The next tick takes it if it is due."),
        zombies,
        release_zombies,
        _("release the claims"),
    ),
    Invariant(
        "reminders.due_not_taken",
        "error",
        _("An alarm that has been due and free for five minutes: the sweep does not run, or cannot keep up."),
        due_not_taken,
        send_due,
        _("send a batch"),
    ),
    Invariant(
        "reminders.delivery_without_message",
        "error",
        _("A delivery said to be sent, but messaging holds no such message."),
        delivery_without_message,
    ),
    Invariant(
        "reminders.same_time",
        "warning",
        _("Two alarms of one user at exactly one time."),
        same_time,
        part,
        _("move all but one"),
    ),
    Invariant(
        "reminders.count_below_one",
        "error",
        _("An alarm whose count is below one; the database should have refused it."),
        count_below_one,
        begin_again,
        _("count from one again"),
    ),
]


def metrics() -> Iterator[GaugeMetricFamily]:
    now = timezone.now()
    yield _gauge("due", "Alarms a batch would take now", Alarm.objects.takeable(now).count())
    yield _gauge("processing", "Alarms somebody is sending", Alarm.objects.processing(now).count())
    yield _gauge("zombies", "Alarms whose claim is older than six hours", Alarm.objects.zombies(now).count())
    # A new alarm without a time has been due since it was made.
    oldest = Alarm.objects.takeable(now).aggregate(at=Min(Coalesce("next_alarm_time", "created_at")))["at"]
    age = (now - oldest).total_seconds() if oldest else 0.0
    yield _gauge("oldest_due_age_seconds", "How long the oldest due alarm has waited", age)
    last = SweepRun.objects.filter(name="reminders.send_due_alarms", ended_at__isnull=False)
    run = last.order_by("-started_at").first()
    counts, batches = (run.counts if run else {}), (run.counts.get("batches", 0) if run else 0)
    seconds = (run.ended_at - run.started_at).total_seconds() if run and run.ended_at else 0.0
    yield _gauge("processing_seconds", "How long the last run took", seconds)
    yield _gauge("batch_size", "Alarms per batch of the last run", counts.get("claimed", 0) / batches if batches else 0)
    outcomes = GaugeMetricFamily("signalbox_reminders_alarms", "Outcomes of the last run", labels=["outcome"])
    for outcome in ("sent", "failed", "deferred", "skipped"):
        outcomes.add_metric([outcome], counts.get(outcome, 0))
    yield outcomes


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"signalbox_reminders_{name}", text, value=value)
