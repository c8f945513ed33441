from datetime import UTC, datetime, timedelta

import factory
from django.db import connection
from django.utils import timezone

from config.triggers import PURGING
from messaging.models import Application, Message, Subscription
from messaging.services import Draft, SubscriptionSpec, enqueue_messages, upsert_subscriptions

NOW = datetime(2026, 3, 10, 3, 0, tzinfo=UTC)
TOKENS = {
    "iOSPush": "a1b2c3d4{n:056x}",
    "AndroidPush": "fcm-token-{n}",
    "Email": "user{n}@example.com",
    "SMS": "+8210{n:08}",
    "KakaoTalk": "+8210{n:08}",
    "InAppMessage": "install-{n}",
}
CONTENT = {
    "push": {"title": "Hello", "body": "World"},
    "email": {"title": "Hello", "body": "<p>World</p>"},
    "sms": {"body": "Hello"},
    "kakao_talk": {"body": "Hello", "template_code": "welcome"},
    "in_app": {"title": "Hello", "data": {"layout_type": "banner"}},
}
counter = iter(range(1, 10**8))


class ApplicationFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Application

    slug = factory.Sequence(lambda n: f"shop-{n}")


def subscribe(application=None, type="AndroidPush", *, token=None, now=NOW, status=None, **fields):
    application = application or ApplicationFactory()
    spec = SubscriptionSpec(type, token or TOKENS[type].format(n=next(counter)), **fields)
    row = upsert_subscriptions(application, [spec], now=now)[0]
    if status is not None:
        Subscription.objects.filter(pk=row.pk).update(status=status)
        row.refresh_from_db()
    return row


def draft(subscription, **fields):
    content = CONTENT[subscription.channel_type]
    return Draft(subscription.application_id, subscription.pk, **{**content, **fields})


def message(subscription=None, *, now=NOW, **fields):
    """A message as the service makes it."""
    subscription = subscription or subscribe()
    outcome = enqueue_messages([draft(subscription, **fields)], now=now)[0]
    assert outcome.created, outcome
    return Message.objects.get(pk=outcome.message_id)


# The shortest legal way to each state, as (status, the columns written with it) in order.
def path_to(status, at):
    sent = ("successful", {"sent_at": at})
    received = ("received", {"received_at": at})
    errored = (
        "errored",
        {
            "error_details": {"errored_at": at.isoformat()},
            "next_attempt_at": at + timedelta(seconds=30),
            "failure_type": "network",
        },
    )
    return {
        "pending": [],
        "successful": [sent],
        "received": [sent, received],
        "converted": [sent, received, ("converted", {"converted_at": at})],
        "failed": [("failed", {"failed_at": at, "error_reason": "rejected"})],
        "errored": [errored],
    }[status]


def message_in(status, subscription=None, *, at=NOW, **fields):
    """A message brought to the state by legal steps."""
    row = message(subscription, now=fields.pop("now", at), **fields)
    for step, columns in path_to(status, at):
        Message.objects.filter(pk=row.pk).update(status=step, **columns)
    return Message.objects.get(pk=row.pk)


def minutes_ago(minutes):
    return timezone.now() - timedelta(minutes=minutes)


def purge_messages():
    """As `purge_retention` does it: nobody else may delete them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config(%s, 'on', true)", [PURGING])
        Message.objects.all().delete()
        cursor.execute("SELECT set_config(%s, '', true)", [PURGING])
