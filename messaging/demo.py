"""A shop with a week of traffic: every channel, every state, and a story behind each failure."""

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone
from uuid_utils.compat import uuid7

from messaging.models import Application, Kind, Message, MessageAttempt, MessageTemplate, Subscription
from messaging.services import Draft, SubscriptionSpec, create_template, render, suppress, upsert_subscriptions
from messaging.services.creating import insert_messages

USERS, MESSAGES = 60, 600
TEMPLATES: list[dict[str, Any]] = [
    {"name": "order-shipped", "channel": "push", "title_template": "{{name}}, it is on its way",
     "body_template": "Order {{order}} arrives tomorrow.", "data_template": {"screen": "order", "order": "{{order}}"}},
    {"name": "welcome", "channel": "email", "title_template": "Welcome, {{name}}",
     "body_template": "<p>Hello {{name}}, <a href=\"https://shop.example.com/start\">start here</a>.</p>"},
    {"name": "one-time-code", "channel": "sms", "body_template": "[Shop] {{name}}, your code is {{order}}."},
    {"name": "delivery-notice", "channel": "kakao_talk", "body_template": "{{name}}님, 주문 {{order}}이 출발했습니다.",
     "provider_code": "SHIP_01", "approval": "approved"},
    {"name": "spring-banner", "channel": "in_app", "title_template": "Spring sale",
     "body_template": "{{name}}, twenty percent off.", "data_template": {"layout_type": "banner"}},
]  # fmt: skip
KINDS = {"push": Kind.NOTICE, "email": Kind.NOTICE, "sms": Kind.TRANSACTIONAL, "kakao_talk": Kind.NOTICE,
         "in_app": Kind.MARKETING}  # fmt: skip
PROVIDERS = {"push": "fcm", "email": "smtp", "sms": "twilio", "kakao_talk": "nhn", "in_app": "in_app"}
# How a message's life goes on after it was created, and how often.
FATES = {"accepted": 24, "delivered": 30, "converted": 26, "rejected": 6, "retried": 6, "errored": 4, "scheduled": 4}

# Hours since it was created: what still waits for something must be within its time.
AGES = {"errored": range(1, 2), "scheduled": range(1, 2), "accepted": range(2, 70), "retried": range(2, 70)}


def seed(scale: int, say: Callable[[str], Any]) -> None:
    application, created = Application.objects.get_or_create(
        slug="demo",
        defaults={"name": "Demo shop", "settings": {"opt_out_number": "080-123-4567"}, "monthly_quota": 1_000_000},
    )
    if not created:
        say("messaging: the demo shop is there already")
        return
    now, chance = timezone.now(), random.Random(7)
    with transaction.atomic():
        subscriptions = _people(application, USERS * scale, now)
        templates = {fields["channel"]: create_template(application, fields, now=now) for fields in TEMPLATES}
        for _page in range(scale):
            _messages(subscriptions, templates, now, chance)
        suppress(application, [("email", "bounced@example.com", "hard_bounce", {"code": "5.1.1"})], now=now)
    say(f"messaging: {len(subscriptions)} subscriptions, {MESSAGES * scale} messages")


def _people(application: Application, count: int, now: datetime) -> list[Subscription]:
    specs = []
    for n in range(count):
        known = {"user_id": f"user-{n:04}", "locale": "ko" if n % 2 else "en", "time_zone": "Asia/Seoul"}
        consents = {"marketing_consent": n % 3 != 0, "night_consent": n % 7 == 0}
        number = f"+8210{50000000 + n:08}"
        specs += [
            SubscriptionSpec("iOSPush" if n % 2 else "AndroidPush", f"demo-device-{n:06}", **known, **consents),  # type: ignore[arg-type]
            SubscriptionSpec("Email", f"user{n}@example.com", **known, **consents, tags={"vip": n % 10 == 0}),  # type: ignore[arg-type]
            SubscriptionSpec("SMS", number, **known, **consents),  # type: ignore[arg-type]
            SubscriptionSpec("KakaoTalk", number, **known, **consents),  # type: ignore[arg-type]
            SubscriptionSpec("InAppMessage", f"demo-install-{n:06}", **known, **consents),  # type: ignore[arg-type]
        ]
    return upsert_subscriptions(application, specs, now=now - timedelta(days=8))


def _messages(
    subscriptions: list[Subscription], templates: dict[str, MessageTemplate], now: datetime, chance: random.Random
) -> None:
    fates = chance.choices(list(FATES), list(FATES.values()), k=MESSAGES)
    lives: dict[str, list[UUID]] = {fate: [] for fate in FATES}
    born: dict[datetime, list[tuple[UUID, Draft, Subscription]]] = {}
    for fate in fates:
        age = chance.choice(AGES.get(fate, range(2, 7 * 24)))
        subscription = chance.choice(subscriptions)
        pk = uuid7()
        lives[fate].append(pk)
        draft = _draft(subscription, templates[subscription.channel_type], fate, now, chance)
        born.setdefault(now - timedelta(hours=age), []).append((pk, draft, subscription))
    for created_at, rows in born.items():
        insert_messages(rows, created_at)
    for fate, ids in lives.items():
        _live(Message.objects.filter(pk__in=ids), fate, now)


def _draft(
    subscription: Subscription, template: MessageTemplate, fate: str, now: datetime, chance: random.Random
) -> Draft:
    order = str(chance.randrange(100_000, 999_999))
    text = render(template, {"name": str(subscription.user_id), "order": order})
    return Draft(
        application_id=subscription.application_id,
        subscription_id=subscription.pk,
        title=text.title,
        body=text.body,
        data=text.data,
        kind=KINDS[subscription.channel_type],
        campaign=chance.choice(["", "", "spring-sale", "win-back"]),
        template_id=template.pk,
        template_version=template.version,
        template_code=template.provider_code,
        scheduled_at=now + timedelta(hours=chance.randrange(2, 20)) if fate == "scheduled" else None,
    )


def _live(rows: Any, fate: str, now: datetime) -> None:
    """By the same edges a real life takes, so events and history are what they would be."""
    for status, seconds, columns in _path(fate):
        changed = []
        for row in rows.all():
            at = row.created_at + timedelta(seconds=seconds + row.pk.int % 40)
            _move(row, status, at, columns, now)
            changed.append(row)
        if status in ("successful", "failed", "errored"):
            _attempts(changed, status)
        Message.objects.bulk_update(changed, WRITTEN)


WRITTEN = [
    "status", "sent_at", "received_at", "converted_at", "failed_at", "error_reason", "error_details", "failure_type",
    "next_attempt_at", "retried_at", "network_retries", "provider_message_id", "attempt_count",
]  # fmt: skip


def _path(fate: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    if fate in ("errored", "retried"):
        yield "errored", 2, {}
    if fate == "retried":
        yield "pending", 60, {}
    if fate in ("accepted", "delivered", "converted", "retried"):
        yield "successful", 3 if fate != "retried" else 120, {}
    if fate in ("delivered", "converted"):
        yield "received", 60, {}
    if fate == "converted":
        yield "converted", 900, {}
    if fate == "rejected":
        yield "failed", 4, {"error_reason": "unregistered", "error_details": {"code": "404", "scope": "recipient"}}


def _move(row: Message, status: str, at: datetime, columns: dict[str, Any], now: datetime) -> None:
    if status == "errored":
        row.error(at, "network", now + timedelta(minutes=15))
        row.error_reason = "network"
    elif status == "pending":
        row.retry(at)
        row.network_retries, row.error_reason = 1, None
    elif status == "successful":
        row.send(at)
        row.provider_message_id = f"demo-{row.pk}"
    elif status == "received":
        row.receive(at)
    elif status == "converted":
        row.convert(at)
    elif status == "failed":
        row.fail(at, columns["error_reason"])
        row.failure_type, row.error_details = "permanent", columns["error_details"]


OUTCOMES = {"successful": "accepted", "failed": "rejected", "errored": "transient"}


def _attempts(rows: list[Message], status: str) -> None:
    for row in rows:
        row.attempt_count += 1
    MessageAttempt.objects.bulk_create(
        MessageAttempt(
            message=row,
            attempt_no=row.attempt_count,
            started_at=row.created_at,
            ended_at=row.created_at + timedelta(seconds=1),
            outcome=OUTCOMES[status],
            provider=PROVIDERS[row.channel_type],
            code={"successful": "200", "failed": "404", "errored": "ConnectTimeout"}[status],
            latency_ms=80 + row.pk.int % 400,
        )
        for row in rows
    )
