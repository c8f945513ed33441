"""A note app's users with their reminders: some due, some far, one zombie, one refused."""

from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from random import Random

from django.db import transaction
from django.utils import timezone

from messaging.models import Application
from reminders.models import Alarm, Page, UserInfo, zone_of
from reminders.services import send_batch
from reminders.services.texts import words_of
from reminders.services.times import after_sleep, distance, resolve_alarm_time_conflict

USERS, PAGES = 40, 5
ZONES = ("Asia/Seoul", "Asia/Tokyo", "Europe/Berlin", "America/New_York", "Asia/Kolkata")
TITLES = (
    "Read the chapter on trees again",
    "Ideas for <b>mother's</b> birthday",
    "Why the build was slow",
    "Recipe: kimchi stew",
    "",
)
BODIES = (
    "<p>Three points to remember:</p><ul><li>roots</li><li>rings</li><li>rain</li></ul>",
    "A book, a walk, or both?",
    "The cache key held the <i>time</i>.",
    "Old kimchi, pork, tofu; <b>simmer</b> for half an hour.",
    "Call the landlord about the window.",
)


def seed(scale: int, say: Callable[[str], object]) -> None:
    application, _created = Application.objects.get_or_create(slug="demo-notes", defaults={"name": "Demo notes"})
    if Page.objects.filter(application=application).exists():
        say("reminders: the demo is there already")
        return
    now = timezone.now()
    with transaction.atomic():
        alarms = _alarms(application, scale, now)
        _troubles(alarms, now)
    done = send_batch(now, 20)
    say(f"reminders: {len(alarms)} alarms of {USERS * scale} users, {done['sent']} sent")


def _alarms(application: Application, scale: int, now: datetime) -> list[Alarm]:
    random = Random(7)
    zones = {f"writer-{n:05}": random.choice(ZONES) for n in range(USERS * scale)}
    UserInfo.objects.bulk_create(
        [UserInfo(application=application, user_id=user, timezone=zone) for user, zone in zones.items()],
        ignore_conflicts=True,
        batch_size=1000,
    )
    pages = [
        Page(
            id=f"demo-{user}-{n}",
            application=application,
            user_id=user,
            title=TITLES[n % len(TITLES)],
            body=BODIES[n % len(BODIES)],
        )
        for user in zones
        for n in range(PAGES)
    ]
    Page.objects.bulk_create(pages, batch_size=1000)
    taken: defaultdict[str, set[datetime]] = defaultdict(set)
    alarms = []
    for n, page in enumerate(pages):
        alarm = _alarm(page, first=n % 9 == 0, random=random)
        at = now + distance(alarm.sent_count) * random.random()
        zone, hour = zone_of(zones[page.user_id]), at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
        free = resolve_alarm_time_conflict(after_sleep(hour, zone), taken[page.user_id], zone, random.random)
        taken[page.user_id].add(free)
        alarm.next_alarm_time = now if n % 9 == 0 else free
        alarms.append(alarm)
    return Alarm.objects.bulk_create(alarms, batch_size=1000)


def _alarm(page: Page, first: bool, random: Random) -> Alarm:
    words = words_of(page.title, page.body)
    return Alarm(
        page=page,
        application_id=page.application_id,
        user_id=page.user_id,
        title=words.title,
        body=words.body,
        sent_count=1 if first else random.randint(1, 9),
    )


def _troubles(alarms: list[Alarm], now: datetime) -> None:
    """What the admin's badges are for."""
    zombie, refused = alarms[1], alarms[2]
    zombie.processed_at, zombie.next_alarm_time = now - timedelta(hours=7), now - timedelta(hours=7)
    refused.retry_at, refused.refusals, refused.next_alarm_time = now + timedelta(hours=1), 7, now - timedelta(hours=2)
    Alarm.objects.bulk_update([zombie, refused], ["processed_at", "next_alarm_time", "retry_at", "refusals"])
