"""Messages come into being here and nowhere else: checked, charged and inserted in the caller's transaction."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import OuterRef, QuerySet, Subquery
from django.utils.translation import gettext as _
from uuid_utils.compat import uuid7

from config.sweeping import nudge
from messaging.models import Channel, Message, Subscription, Suppression
from messaging.models.addresses import InvalidToken
from messaging.providers import provider_for
from messaging.services import content, quotas

DISPATCH = "messaging.dispatch_due_messages"
# What the recipient or the application stands in the way of; everything else a draft is refused for is its own fault.
CONFLICTS = {
    "unsubscribed",
    "suppressed",
    "not_sendable",
    "no_consent",
    "channel_not_configured",
    "application_inactive",
    "idempotency_conflict",
}
QUOTA_EXCEEDED = "quota_exceeded"


@dataclass(frozen=True)
class Draft:
    """A message to create; its content is already rendered."""

    application_id: UUID
    subscription_id: UUID
    title: str = ""
    body: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "notice"
    campaign: str = ""
    from_address: str = ""
    priority: int = 5
    scheduled_at: datetime | None = None
    idempotency_key: str | None = None
    template_id: UUID | None = None
    template_version: int | None = None
    template_code: str = ""
    template_parameters: Mapping[str, Any] = field(default_factory=dict)
    retry_of: UUID | None = None
    failover_of: UUID | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Outcome:
    """`code` tells why a draft was refused; None with created=False is the message an earlier draft of its key made."""

    message_id: UUID | None
    created: bool
    code: str | None = None
    detail: str = ""
    attr: str | None = None
    retry_after: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    # What was inserted, for whoever wants to show the message without reading it back.
    draft: Draft | None = field(default=None, repr=False, compare=False)
    subscription: Subscription | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> bool:
        return self.code is not None


def refused(code: str, detail: str, attr: str | None = None, extra: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome(None, False, code, detail, attr, extra=extra or {})


def enqueue_messages(
    drafts: Sequence[Draft], *, now: datetime, recipients: Sequence[Subscription] | None = None
) -> list[Outcome]:
    """One outcome per draft, in order. A refused draft spoils none of the others. All that are inserted are inserted by
    one statement, inside the caller's transaction if there is one. `recipients`: where the caller has just read them.
    """
    if recipients is None:
        recipients = Subscription.objects.recipients({draft.subscription_id for draft in drafts}, None)
    return insert_drafts(drafts, {row.pk: row for row in recipients}, earlier(drafts, range(len(drafts))), now=now)


def insert_drafts(
    drafts: Sequence[Draft],
    subscriptions: Mapping[UUID, Subscription],
    outcomes: dict[int, Outcome],
    *,
    now: datetime,
) -> list[Outcome]:
    """`outcomes`: of those drafts about which is decided already."""
    ready: dict[int, Draft] = {}
    for index, draft in enumerate(drafts):
        if index in outcomes:
            continue
        subscription = subscriptions.get(draft.subscription_id)
        if subscription is None or subscription.application_id != draft.application_id:
            outcomes[index] = refused("does_not_exist", _("There is no such subscription."), "subscription_id")
            continue
        draft = _labelled(draft, subscription)
        if refusal := _content_refusal(draft, subscription) or _refusal(draft, subscription):
            outcomes[index] = refusal
        else:
            ready[index] = draft
    firsts, twins = _first_of_each_key(ready)
    applications = {subscriptions[draft.subscription_id].application for draft in firsts.values()}
    if any(quotas.limited(application) for application in applications):
        with transaction.atomic():
            outcomes |= _charge_and_insert(firsts, subscriptions, quotas.allowances(applications, now), now)
    else:
        outcomes |= _charge_and_insert(firsts, subscriptions, {}, now)
    # A twin of ours committed while we waited: the message is theirs.
    outcomes |= earlier(drafts, [index for index in firsts if index not in outcomes])
    for index, first in twins.items():
        made = outcomes[first].message_id
        outcomes[index] = _again(drafts[index], made, drafts[first].fingerprint) if made else outcomes[first]
    if any(o.created and is_due(drafts[i], now) for i, o in outcomes.items()):
        nudge(DISPATCH)
    return [outcomes[index] for index in range(len(drafts))]


def is_due(draft: Draft, now: datetime) -> bool:
    return draft.scheduled_at is None or draft.scheduled_at <= now


def with_suppression(rows: QuerySet[Subscription]) -> QuerySet[Subscription]:
    standing = Suppression.objects.active().filter(
        application=OuterRef("application"), channel_type=OuterRef("channel_type"), address_hash=OuterRef("token_hash")
    )
    return rows.select_related("application").annotate(suppressed_for=Subquery(standing.values("reason")[:1]))


def earlier(drafts: Sequence[Draft], indexes: Any) -> dict[int, Outcome]:
    """What earlier drafts of the same keys have made."""
    keyed = [(index, drafts[index]) for index in indexes if drafts[index].idempotency_key]
    if not keyed:
        return {}
    rows = Message.objects.filter(
        application_id__in={draft.application_id for _index, draft in keyed},
        idempotency_key__any={draft.idempotency_key for _index, draft in keyed},
    ).values_list("application_id", "idempotency_key", "id", "fingerprint")
    found = {(application, key): (pk, fingerprint) for application, key, pk, fingerprint in rows}
    return {
        index: _again(draft, *found[draft.application_id, str(draft.idempotency_key)])
        for index, draft in keyed
        if (draft.application_id, draft.idempotency_key) in found
    }


def _again(draft: Draft, pk: UUID, fingerprint: str) -> Outcome:
    if draft.fingerprint != fingerprint:
        return refused("idempotency_conflict", _("This key was used with another body."), "Idempotency-Key")
    return Outcome(pk, created=False)


def _refusal(draft: Draft, subscription: Subscription) -> Outcome | None:
    if subscription.status == Subscription.OPTED_OUT:
        return refused("unsubscribed", _("The recipient has unsubscribed."))
    reason = subscription.suppressed_for  # type: ignore[attr-defined]
    if reason is not None:
        return refused("suppressed", _("The address is suppressed: %(reason)s.") % {"reason": reason})
    if not subscription.sendable:
        detail = _("The subscription's status is %(status)s.") % {"status": subscription.status}
        return refused("not_sendable", detail)
    if draft.kind == "marketing" and not subscription.marketing_consent:
        return refused("no_consent", _("The recipient has not consented to marketing."))
    if not subscription.application.active:
        return refused("application_inactive", _("The application is switched off."))
    if provider_for(subscription.type) is None:
        detail = _("No provider is set up for %(type)s.") % {"type": subscription.type}
        return refused("channel_not_configured", detail)
    return None


def _labelled(draft: Draft, subscription: Subscription) -> Draft:
    if draft.kind != "marketing" or subscription.channel_type != Channel.SMS:
        return draft
    if not _korean(subscription):
        return draft
    number = subscription.application.settings.get("opt_out_number", "")
    return replace(draft, body=content.labelled(draft.body, number if isinstance(number, str) else ""))


def _korean(subscription: Subscription) -> bool:
    try:
        return subscription.token.startswith("+82")
    except InvalidToken:
        return False


def _content_refusal(draft: Draft, subscription: Subscription) -> Outcome | None:
    found = content.problems(
        subscription.channel_type, draft.kind, draft.title, draft.body, dict(draft.data), draft.template_code
    )
    return refused(found[0].code, found[0].detail, found[0].attr) if found else None


def _first_of_each_key(ready: dict[int, Draft]) -> tuple[dict[int, Draft], dict[int, int]]:
    """The drafts to insert, and for those whose key came before: where it did."""
    seen: dict[tuple[UUID, str], int] = {}
    firsts, twins = {}, {}
    for index, draft in ready.items():
        key = (draft.application_id, draft.idempotency_key or "")
        if draft.idempotency_key and key in seen:
            twins[index] = seen[key]
        else:
            seen[key] = index
            firsts[index] = draft
    return firsts, twins


def _charge_and_insert(
    ready: dict[int, Draft],
    subscriptions: Mapping[UUID, Subscription],
    allowances: Mapping[UUID, quotas.Allowance],
    now: datetime,
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    taken: dict[int, tuple[UUID, Draft]] = {}
    for index, draft in ready.items():
        allowance = allowances.get(draft.application_id)
        if allowance is None or allowance.take():
            taken[index] = (uuid7(), draft)
        else:
            detail = _("The application's quota is used up.")
            outcomes[index] = Outcome(None, False, QUOTA_EXCEEDED, detail, retry_after=allowance.retry_after())
    inserted = insert_messages([(pk, draft, subscriptions[draft.subscription_id]) for pk, draft in taken.values()], now)
    for index, (pk, draft) in taken.items():
        if pk in inserted:
            outcomes[index] = Outcome(pk, created=True, draft=draft, subscription=subscriptions[draft.subscription_id])
        elif draft.application_id in allowances:
            allowances[draft.application_id].give_back(1)
    for allowance in allowances.values():
        allowance.charge()
    return outcomes


def as_inserted(outcome: Outcome, now: datetime) -> dict[str, Any] | None:
    """The columns of the message just created, and its application's slug, without reading them back."""
    if outcome.message_id is None or outcome.draft is None or outcome.subscription is None:
        return None
    values = _values(outcome.message_id, outcome.draft, outcome.subscription)
    slug = outcome.subscription.application.slug
    return {**dict(zip(COLUMNS, values, strict=True)), "created_at": now, "application": slug}


COLUMNS = {
    "id": "uuid",
    "application_id": "uuid",
    "subscription_id": "uuid",
    "subscription_type": "text",
    "user_id": "text",
    "channel_type": "text",
    "kind": "text",
    "title": "text",
    "body": "text",
    "data": "jsonb",
    "template_id": "uuid",
    "template_version": "int",
    "template_code": "text",
    "template_parameters": "jsonb",
    "campaign": "text",
    "from_address": "text",
    "priority": "int",
    "scheduled_at": "timestamptz",
    "retry_of_id": "uuid",
    "failover_of_id": "uuid",
    "idempotency_key": "text",
    "fingerprint": "text",
    "segment": "int",
}
INSERT = f"""
    INSERT INTO messages ({", ".join(COLUMNS)}, created_at)
    SELECT {", ".join(COLUMNS)}, %s
      FROM json_to_recordset(%s::json) AS draft ({", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())})
    ON CONFLICT (application_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id
"""


def insert_messages(rows: list[tuple[UUID, Draft, Subscription]], now: datetime) -> set[UUID]:
    """One statement and one parameter for all. A twin of a key waits here until the first has committed, and is then
    left out; in the order of the keys, so two batches of the same keys cannot deadlock."""
    if not rows:
        return set()
    rows.sort(key=lambda row: (row[1].application_id, row[1].idempotency_key or ""))
    records = [dict(zip(COLUMNS, _values(*row), strict=True)) for row in rows]
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [now, json.dumps(records, default=str)])
        return {pk for (pk,) in cursor.fetchall()}


def _values(pk: UUID, draft: Draft, subscription: Subscription) -> tuple[Any, ...]:
    return (
        pk, draft.application_id, draft.subscription_id, subscription.type, subscription.user_id,
        subscription.channel_type, draft.kind, draft.title, draft.body, dict(draft.data),
        draft.template_id, draft.template_version, draft.template_code, dict(draft.template_parameters),
        draft.campaign or None, draft.from_address, draft.priority, draft.scheduled_at, draft.retry_of,
        draft.failover_of, draft.idempotency_key, draft.fingerprint, subscription.segment,
    )  # fmt: skip
