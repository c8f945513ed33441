from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from config.errors import Conflict, Invalid
from messaging.models import CHANNEL_OF, Application, Subscription, addresses
from messaging.services import content

# A registration does not undo what a person or an operator has decided; other codes were a fault that is over now.
STAYS = (Subscription.OPTED_OUT, Subscription.DISABLED)


@dataclass(frozen=True)
class SubscriptionSpec:
    """A registration. None leaves what is stored, but for a user who is `unlinked`: the device is nobody's now."""

    type: str
    token: str
    user_id: str | None = None
    locale: str | None = None
    time_zone: str | None = None
    device_model: str | None = None
    device_os: str | None = None
    device_language: str | None = None
    app_version: str | None = None
    tags: dict[str, Any] | None = None
    marketing_consent: bool | None = None
    night_consent: bool | None = None
    unlinked: bool = False

    def changes(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in CHANGED}
        unlinked: dict[str, Any] = {"user_id": None} if self.unlinked else {}
        return unlinked | {name: value for name, value in given.items() if value is not None}


CHANGED = [field.name for field in fields(SubscriptionSpec) if field.name not in ("type", "token", "unlinked")]
WRITTEN = [
    *CHANGED,
    "marketing_consent_at",
    "status",
    "status_reason",
    "subscribed_at",
    "last_active_at",
    "updated_at",
]


def upsert_subscriptions(
    application: Application, specs: Sequence[SubscriptionSpec], *, now: datetime | None = None
) -> list[Subscription]:
    return [row for row, _created in register_subscriptions(application, specs, now=now or timezone.now())]


@transaction.atomic
def register_subscriptions(
    application: Application, specs: Sequence[SubscriptionSpec], *, now: datetime
) -> list[tuple[Subscription, bool]]:
    """One row per spec, in order, and whether it is new. The same token again is the same row with new fields."""
    keys = [_checked_key(spec) for spec in specs]
    merged: dict[tuple[str, str], SubscriptionSpec] = {}
    for key, spec in zip(keys, specs, strict=True):
        merged[key] = replace(merged[key], **spec.changes()) if key in merged else spec
    drafts = {key: _new(application, spec, now) for key, spec in merged.items()}
    # In the order of the keys: two registrations of the same addresses wait for each other, not in a circle.
    Subscription.objects.bulk_create([drafts[key] for key in sorted(drafts)], ignore_conflicts=True)
    rows = Subscription.objects.filter(
        application=application, type__in={kind for kind, _hash in drafts}, token_hash__in={mark for _k, mark in drafts}
    )
    # Without the key: new messages hold their subscriptions' keys in an order of their own.
    locked = rows.select_for_update(no_key=True).order_by("type", "token_hash")
    found = {(row.type, row.token_hash): row for row in locked}
    created = {key for key, draft in drafts.items() if found[key].pk == draft.pk}
    for key in merged.keys() - created:
        _renew(found[key], merged[key], now)
    Subscription.objects.bulk_update([found[key] for key in merged.keys() - created], WRITTEN)
    return [(found[key], key in created) for key in keys]


def _checked_key(spec: SubscriptionSpec) -> tuple[str, str]:
    if spec.type not in CHANNEL_OF:
        raise Invalid(_("There is no such type."), attr="type")
    channel = CHANNEL_OF[spec.type]
    if problem := content.address_problem(channel, spec.token):
        raise Invalid(problem, attr="token")
    if spec.time_zone:
        check_time_zone(spec.time_zone)
    return spec.type, addresses.address_hash(channel, spec.token)


# Reading the zones takes 20 ms, and they do not change while we run.
@cache
def time_zones() -> frozenset[str]:
    return frozenset(available_timezones())


def check_time_zone(name: str) -> None:
    if name not in time_zones():
        raise Invalid(_("Expected an IANA time zone such as Asia/Seoul."), attr="time_zone")


def zone_of(subscription_zone: str) -> ZoneInfo:
    return ZoneInfo(subscription_zone or "UTC")


def _sealed(channel: str, token: str) -> dict[str, str]:
    token = token.strip()
    return {
        "token_encrypted": addresses.encrypt(token),
        "token_hash": addresses.address_hash(channel, token),
        "token_hint": addresses.hint(channel, token),
    }


def _new(application: Application, spec: SubscriptionSpec, now: datetime) -> Subscription:
    row = Subscription(application=application, type=spec.type, created_at=now, updated_at=now)
    for name, value in _sealed(CHANNEL_OF[spec.type], spec.token).items():
        setattr(row, name, value)
    _renew(row, spec, now)
    return row


def _renew(row: Subscription, spec: SubscriptionSpec, now: datetime) -> None:
    change_fields(row, spec.changes(), now)
    row.last_active_at = now
    if row.status <= 0 and row.status not in STAYS:
        _subscribe(row, now)


def _subscribe(row: Subscription, now: datetime) -> None:
    row.status, row.status_reason, row.subscribed_at, row.unsubscribed_at = Subscription.SUBSCRIBED, "", now, None


def change_fields(row: Subscription, changes: dict[str, Any], now: datetime) -> None:
    if changes.get("marketing_consent") and not row.marketing_consent:
        row.marketing_consent_at = now
    for name, value in changes.items():
        setattr(row, name, value)
    row.updated_at = now


@transaction.atomic
def change_subscription(pk: UUID, changes: dict[str, Any], *, now: datetime) -> Subscription:
    row = Subscription.objects.select_for_update().get(pk=pk)
    token = changes.pop("token", None)
    if changes.get("time_zone"):
        check_time_zone(changes["time_zone"])
    if token is not None:
        if problem := content.address_problem(row.channel_type, token):
            raise Invalid(problem, attr="token")
        changes |= _sealed(row.channel_type, token)
    change_fields(row, changes, now)
    try:
        with transaction.atomic():
            row.save(update_fields=[*changes, "marketing_consent_at", "updated_at"])
    except IntegrityError:
        raise Conflict(_("Another subscription has this token."), code="duplicate_subscription", attr="token") from None
    return row


def unsubscribe(pk: UUID, *, now: datetime, reason: str = "") -> Subscription:
    return _set_status(pk, Subscription.OPTED_OUT, reason, now)


def disable_subscription(pk: UUID, *, now: datetime, reason: str = "") -> Subscription:
    return _set_status(pk, Subscription.DISABLED, reason, now)


@transaction.atomic
def _set_status(pk: UUID, status: int, reason: str, now: datetime) -> Subscription:
    row = Subscription.objects.select_for_update().get(pk=pk)
    # Who has opted out is not merely disabled: only consent brings them back.
    if row.status not in (status, Subscription.OPTED_OUT):
        row.status, row.status_reason, row.unsubscribed_at, row.updated_at = status, reason, now, now
        row.save(update_fields=["status", "status_reason", "unsubscribed_at", "updated_at"])
    return row


@transaction.atomic
def enable_subscription(pk: UUID, *, consent: bool, now: datetime) -> Subscription:
    row = Subscription.objects.select_for_update().get(pk=pk)
    if row.status == Subscription.OPTED_OUT and not consent:
        raise Conflict(_("Who has opted out comes back only by consent."), code="consent_required")
    if row.status <= 0:
        _subscribe(row, now)
        row.updated_at = now
        row.save(update_fields=["status", "status_reason", "subscribed_at", "unsubscribed_at", "updated_at"])
    return row
