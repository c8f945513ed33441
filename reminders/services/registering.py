"""A client asks for a reminder of a page."""

from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from config.errors import Invalid, Missing
from messaging.models import Application
from reminders.models import DEFAULT_ZONE, Alarm, Page, UserInfo
from reminders.services.settling import supersede
from reminders.services.texts import Words, words_of


@dataclass(frozen=True)
class Registration:
    page_id: str
    user_id: str
    title: str | None = None
    body: str | None = None
    timezone: str | None = None
    reset: bool = False

    @property
    def has_text(self) -> bool:
        return self.title is not None or self.body is not None


class NoWords(Invalid):
    code = "empty"

    def __init__(self) -> None:
        super().__init__(_("Title and body are both empty."), attr="title")


class UnknownPage(Missing):
    def __init__(self) -> None:
        super().__init__(_("There is no such page."), attr="page_id")


@transaction.atomic
def register_alarm(application: Application, wanted: Registration, now: datetime) -> Alarm:
    """Make or wake the page's alarm: due now. A send in flight loses its claim and cannot change the alarm any more."""
    # Said before the page is looked for: what is wrong with the request itself comes first.
    if wanted.title is not None and wanted.body is not None and not words_of(wanted.title, wanted.body):
        raise NoWords
    page = write_page(application, wanted)
    words = words_of(page.title, page.body)
    if not words:
        raise NoWords
    remember_zone(application, wanted.user_id, wanted.timezone)
    return wake_alarm(page, words, wanted.reset, now)


def write_page(application: Application, wanted: Registration) -> Page:
    """The page, locked, with the texts given; made or revived when there is text for it."""
    if wanted.has_text:
        Page.objects.bulk_create(
            [Page(id=wanted.page_id, application=application, user_id=wanted.user_id)], ignore_conflicts=True
        )
    owned = Page.objects.filter(pk=wanted.page_id, application=application, user_id=wanted.user_id)
    page = owned.select_for_update().first()
    if page is None or (page.deleted_at and not wanted.has_text):
        raise UnknownPage
    if page.deleted_at:
        # Deleted by hand it may have kept its alarm; whoever pulls was told of neither.
        Alarm.objects.filter(page=page).delete()
    if wanted.has_text:
        page.title = page.title if wanted.title is None else wanted.title
        page.body = page.body if wanted.body is None else wanted.body
        page.deleted_at = None
        page.updated_at = Now()
        page.save(update_fields=["title", "body", "deleted_at", "updated_at"])
    return page


def remember_zone(application: Application, user_id: str, timezone: str | None) -> None:
    info = UserInfo(application=application, user_id=user_id, timezone=timezone or DEFAULT_ZONE)
    if timezone is None:
        UserInfo.objects.bulk_create([info], ignore_conflicts=True)
    else:
        UserInfo.objects.bulk_create(
            [info], update_conflicts=True, unique_fields=["application", "user_id"], update_fields=["timezone"]
        )


def wake_alarm(page: Page, words: Words, reset: bool, now: datetime) -> Alarm:
    alarm = Alarm.objects.filter(page=page).select_for_update().first()
    if alarm is None:
        return Alarm.objects.create(
            page=page,
            application_id=page.application_id,
            user_id=page.user_id,
            title=words.title,
            body=words.body,
            next_alarm_time=now,
        )
    supersede([alarm], now)
    alarm.title, alarm.body = words.title, words.body
    alarm.next_alarm_time, alarm.processed_at, alarm.retry_at, alarm.refusals = now, None, None, 0
    alarm.occurrence += 1
    alarm.sent_count = 1 if reset else alarm.sent_count
    alarm.save(
        update_fields=[
            "title", "body", "next_alarm_time", "processed_at", "retry_at", "refusals", "occurrence", "sent_count",
        ]
    )  # fmt: skip
    return alarm
