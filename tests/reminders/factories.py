from datetime import UTC, datetime

import factory

from messaging.models import Application
from reminders.models import Alarm, Page, UserInfo

NOON = datetime(2026, 3, 4, 3, 0, tzinfo=UTC)  # 12:00 in Seoul


class ApplicationFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Application
        django_get_or_create = ["slug"]

    slug = "notes"


class PageFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Page

    id = factory.Sequence(lambda n: f"page-{n}")
    application = factory.SubFactory(ApplicationFactory)
    user_id = "ann"
    title = "Water the plants"
    body = "All of them"


class AlarmFactory(factory.django.DjangoModelFactory):
    """Due since a minute before NOON unless told otherwise."""

    class Meta:
        model = Alarm

    page = factory.SubFactory(PageFactory)
    application = factory.SelfAttribute("page.application")
    user_id = factory.SelfAttribute("page.user_id")
    next_alarm_time = datetime(2026, 3, 4, 2, 59, tzinfo=UTC)

    @classmethod
    def _create(cls, model_class, *args, zone=None, **kwargs):
        alarm = super()._create(model_class, *args, **kwargs)
        if zone:
            UserInfo.objects.update_or_create(
                application=alarm.application, user_id=alarm.user_id, defaults={"timezone": zone}
            )
        return alarm
