import json
from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from django.contrib.postgres.functions import RandomUUID
from django.db import connection, models
from django.db.models import Case, Exists, OuterRef, Q, Value, When
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7

from config.triggers import append_only
from messaging.models import addresses
from messaging.models.applications import Application
from messaging.triggers import SEGMENT_TRIGGERS, SUBSCRIPTION_EVENTS


class Channel(models.TextChoices):
    PUSH = "push", _("push")
    EMAIL = "email", _("e-mail")
    SMS = "sms", _("SMS")
    KAKAO_TALK = "kakao_talk", _("KakaoTalk")
    IN_APP = "in_app", _("in-app")


CHANNEL_OF = {
    "iOSPush": Channel.PUSH,
    "AndroidPush": Channel.PUSH,
    "Email": Channel.EMAIL,
    "SMS": Channel.SMS,
    "KakaoTalk": Channel.KAKAO_TALK,
    "InAppMessage": Channel.IN_APP,
}


class SubscriptionQuerySet(models.QuerySet["Subscription"]):
    def sendable(self) -> "SubscriptionQuerySet":
        return self.filter(status__gt=0)

    def holding(self, application: Any, channel: str, address: str) -> "SubscriptionQuerySet":
        """Those of the application that reach this address on this channel."""
        return self.filter(
            application=application, channel_type=channel, token_hash=addresses.address_hash(channel, address)
        )

    def suppressed(self) -> "SubscriptionQuerySet":
        from messaging.models.suppressions import Suppression

        active = Suppression.objects.active().filter(
            application=OuterRef("application"),
            channel_type=OuterRef("channel_type"),
            address_hash=OuterRef("token_hash"),
        )
        return self.filter(Exists(active))

    def recipients(self, ids: Collection[UUID], member_id: int | None) -> list["Subscription"]:
        """What a message's creation looks at, of those whose application the user is a member of (None: of all).

        By hand: for a single message the ORM takes longer to build this statement than PostgreSQL to run it.
        """
        return _recipients(RECIPIENTS, {"ids": list(ids), "member": member_id})

    def reaching(self, owners: Collection[tuple[UUID, str]], types: Sequence[str]) -> list["Subscription"]:
        """Where these users, each of an application, are reached, the address used last first; as `recipients`."""
        if not owners:
            return []
        tenants, users = (list(values) for values in zip(*owners, strict=True))
        return _recipients(REACHING, {"tenants": tenants, "users": users, "types": list(types)})

    def recently_active_first(self) -> "SubscriptionQuerySet":
        return self.order_by(models.F("last_active_at").desc(nulls_last=True), "-created_at", "-id")


class Subscription(models.Model):
    """One address of one user on one channel."""

    class Type(models.TextChoices):
        IOS_PUSH = "iOSPush", "iOSPush"
        ANDROID_PUSH = "AndroidPush", "AndroidPush"
        EMAIL = "Email", "Email"
        SMS = "SMS", "SMS"
        KAKAO_TALK = "KakaoTalk", "KakaoTalk"
        IN_APP = "InAppMessage", "InAppMessage"

    # The codes a service writes; the others come from clients' SDKs and providers.
    SUBSCRIBED, INITIAL, OPTED_OUT, UNREGISTERED, DISABLED, HARD_BOUNCE, COMPLAINT = 1, 0, -2, -10, -31, -42, -44

    id = models.UUIDField(primary_key=True, default=uuid7, db_default=RandomUUID(), editable=False)
    application = models.ForeignKey(
        Application, models.CASCADE, related_name="subscriptions", verbose_name=_("application")
    )
    type = models.CharField(_("type"), max_length=12, choices=Type.choices)
    channel_type = models.GeneratedField(
        expression=Case(
            *[When(type=kind, then=Value(str(channel.value))) for kind, channel in CHANNEL_OF.items()],
            default=Value("push"),
        ),
        output_field=models.CharField(max_length=10, choices=Channel.choices),
        db_persist=True,
        verbose_name=_("channel"),
    )
    token_encrypted = models.TextField(_("encrypted token"), editable=False)
    token_hash = models.CharField(_("token hash"), max_length=64, editable=False)
    token_hint = models.CharField(_("token"), max_length=64, editable=False)
    user_id = models.CharField(_("user"), max_length=255, null=True, blank=True)
    status = models.SmallIntegerField(_("status code"), default=0, db_default=0)
    status_reason = models.CharField(_("reason of the status"), max_length=100, blank=True, default="", db_default="")
    locale = models.CharField(_("locale"), max_length=20, blank=True, default="", db_default="")
    time_zone = models.CharField(_("time zone"), max_length=64, blank=True, default="", db_default="")
    device_model = models.CharField(_("device model"), max_length=255, blank=True, default="", db_default="")
    device_os = models.CharField(_("device system"), max_length=255, blank=True, default="", db_default="")
    device_language = models.CharField(_("device language"), max_length=20, blank=True, default="", db_default="")
    app_version = models.CharField(_("app version"), max_length=50, blank=True, default="", db_default="")
    tags = models.JSONField(_("tags"), default=dict, db_default=Value({}, models.JSONField()), blank=True)
    # Which of message_segments has these tags; written by a trigger.
    segment = models.IntegerField(null=True, editable=False)
    marketing_consent = models.BooleanField(_("marketing consent"), default=False, db_default=False)
    night_consent = models.BooleanField(_("night consent"), default=False, db_default=False)
    marketing_consent_at = models.DateTimeField(_("marketing consent given"), null=True, blank=True)
    subscribed_at = models.DateTimeField(_("subscribed"), null=True, blank=True)
    unsubscribed_at = models.DateTimeField(_("unsubscribed"), null=True, blank=True)
    last_active_at = models.DateTimeField(_("last active"), null=True, blank=True)
    total_messages_received = models.IntegerField(_("messages received"), default=0, db_default=0)
    total_messages_converted = models.IntegerField(_("messages converted"), default=0, db_default=0)
    created_at = models.DateTimeField(_("created"), db_default=Now())
    updated_at = models.DateTimeField(_("updated"), auto_now=True, db_default=Now())

    objects = SubscriptionQuerySet.as_manager()

    class Meta:
        db_table = "subscriptions"
        verbose_name = _("subscription")
        verbose_name_plural = _("subscriptions")
        triggers = [SUBSCRIPTION_EVENTS, *SEGMENT_TRIGGERS]
        constraints = [
            models.UniqueConstraint(fields=["application", "type", "token_hash"], name="subscriptions_token_once"),
            # An unknown type has no channel.
            models.CheckConstraint(name="subscriptions_type", condition=Q(type__in=list(CHANNEL_OF))),
        ]
        indexes = [
            models.Index(
                fields=["application", "user_id", "channel_type"],
                name="subscriptions_of_user",
                condition=Q(user_id__isnull=False),
            ),
        ]
        permissions = [("list_subscription", "Can list subscriptions")]

    def __str__(self) -> str:
        return f"{self.type} {self.token_hint}"

    @property
    def token(self) -> str:
        return addresses.decrypt(self.token_encrypted)

    @property
    def sendable(self) -> bool:
        return self.status > 0


TYPES = Subscription.Type.choices

# In the models' own order, which from_db() relies on.
OF_RECIPIENT = (
    "id", "application_id", "type", "channel_type", "token_encrypted", "user_id", "status", "segment",
    "marketing_consent",
)  # fmt: skip
OF_APPLICATION = ("id", "slug", "settings", "daily_quota", "monthly_quota", "active")
RECIPIENT = f"""
    SELECT {", ".join(f"s.{name}" for name in OF_RECIPIENT)}, {", ".join(f"a.{name}" for name in OF_APPLICATION)},
           (SELECT x.reason FROM suppressions x WHERE x.application_id = s.application_id AND x.lifted_at IS NULL
               AND x.channel_type = s.channel_type AND x.address_hash = s.token_hash)
      FROM subscriptions s JOIN applications a ON a.id = s.application_id
"""
RECIPIENTS = f"""{RECIPIENT}
     WHERE s.id = ANY(%(ids)s) AND (%(member)s::int IS NULL OR EXISTS (
               SELECT 1 FROM applications_members m WHERE m.application_id = a.id AND m.user_id = %(member)s))
"""
REACHING = f"""{RECIPIENT}
     WHERE (s.application_id, s.user_id) IN (SELECT * FROM unnest(%(tenants)s::uuid[], %(users)s::text[]))
       AND s.type = ANY(%(types)s)
     ORDER BY s.last_active_at DESC NULLS LAST, s.created_at DESC, s.id DESC
"""


def _recipients(sql: str, values: dict[str, Any]) -> list[Subscription]:
    """Other columns are read when asked for. The applications are few: each is made once."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        rows = cursor.fetchall()
    tenants: dict[UUID, Application] = {}
    found = []
    for row in rows:
        recipient = Subscription.from_db("default", OF_RECIPIENT, row[: len(OF_RECIPIENT)])
        if recipient.application_id not in tenants:
            tenant = list(row[len(OF_RECIPIENT) : -1])
            tenant[2] = json.loads(tenant[2])
            tenants[recipient.application_id] = Application.from_db("default", OF_APPLICATION, tenant)
        recipient.application = tenants[recipient.application_id]
        recipient.suppressed_for = row[-1]  # type: ignore[attr-defined]
        found.append(recipient)
    return found


class SubscriptionEvent(models.Model):
    """What happened to a subscription; written by a trigger."""

    id = models.BigAutoField(primary_key=True)
    subscription = models.ForeignKey(
        Subscription, models.DO_NOTHING, db_constraint=False, related_name="events", verbose_name=_("subscription")
    )
    event_type = models.CharField(_("event"), max_length=20)
    status = models.SmallIntegerField(_("status code"))
    reason = models.CharField(_("reason"), max_length=100, blank=True, default="")
    occurred_at = models.DateTimeField(_("at"), db_default=Now())

    class Meta:
        db_table = "subscription_events"
        verbose_name = _("subscription event")
        verbose_name_plural = _("subscription events")
        triggers = append_only("subscription_events")

    def __str__(self) -> str:
        return f"{self.event_type} {self.occurred_at:%Y-%m-%d %H:%M:%S}"
