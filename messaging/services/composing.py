"""From what a client asks for to drafts: whom, with which text. Any number of requests in a handful of queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any
from uuid import UUID

from django.db.models import F, Q, QuerySet
from django.utils.translation import gettext as _

from config.errors import DomainError, Invalid
from messaging.models import Application, Channel, MessageTemplate, Subscription
from messaging.services import templates
from messaging.services.creating import Draft, Outcome, earlier, insert_drafts, refused, with_suppression


@dataclass(frozen=True)
class MessageRequest:
    """Either a subscription, or a user and a channel; either a text, or a template and its variables."""

    subscription_id: UUID | None = None
    user_id: str | None = None
    channel: str | None = None
    application: str | None = None
    title: str | None = None
    body: str | None = None
    data: Mapping[str, Any] | None = None
    template_id: UUID | None = None
    variables: Mapping[str, Any] | None = None
    kind: str = "notice"
    campaign: str = ""
    priority: int = 5
    scheduled_at: datetime | None = None
    idempotency_key: str | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Sender:
    """Who asks: a member of some applications, or somebody who may send for all of them, or for `only` those; whoever
    may send for all may still be at `home` in some."""

    member_id: int | None = None
    only: QuerySet[Application] | None = None
    home: int | None = None

    def applications(self) -> QuerySet[Application]:
        rows = Application.objects.all() if self.only is None else self.only
        return rows if self.member_id is None else rows.filter(members=self.member_id)


@dataclass
class Recipients:
    """What is known about the recipients of all requests, read once; the applications only when somebody asks."""

    sender: Sender
    by_id: dict[UUID, Subscription] = field(default_factory=dict)
    by_user: dict[tuple[str, str], list[Subscription]] = field(default_factory=dict)
    templates: dict[UUID, MessageTemplate] = field(default_factory=dict)

    @cached_property
    def reach(self) -> list[Application]:
        return list(self.sender.applications())

    @cached_property
    def home(self) -> set[UUID]:
        return set(Application.objects.filter(members=self.sender.home).values_list("pk", flat=True))


def create_messages(
    requests: Sequence[MessageRequest], sender: Sender | QuerySet[Application], *, now: datetime
) -> list[Outcome]:
    """One outcome per request, in order; for a sender, or for the applications that may be sent for."""
    known = _recipients(requests, sender if isinstance(sender, Sender) else Sender(only=sender))
    outcomes: dict[int, Outcome] = {}
    drafts: list[Draft] = []
    shells = [_shell(request, known) for request in requests]
    outcomes |= earlier([shell or NOBODYS for shell in shells], range(len(shells)))
    for index, request in enumerate(requests):
        draft = NOBODYS
        if index in outcomes:
            draft = shells[index] or NOBODYS
        else:
            try:
                draft = _draft(request, known)
            except DomainError as error:
                outcomes[index] = refused(error.code, error.detail, error.attr, error.extra)
        drafts.append(draft)
    return insert_drafts(drafts, _all(known), outcomes, now=now)


NOBODYS = Draft(UUID(int=0), UUID(int=0))


def _all(known: Recipients) -> dict[UUID, Subscription]:
    return known.by_id | {row.pk: row for rows in known.by_user.values() for row in rows}


def _recipients(requests: Sequence[MessageRequest], sender: Sender) -> Recipients:
    known = Recipients(sender)
    ids = {request.subscription_id for request in requests if request.subscription_id}
    if ids:
        rows = Subscription.objects.recipients(ids, sender.member_id)
        allowed = None if sender.only is None else {row.pk for row in known.reach}
        known.by_id = {row.pk: row for row in rows if allowed is None or row.application_id in allowed}
    users: dict[str, set[str]] = {}
    for request in requests:
        if request.user_id and request.channel:
            users.setdefault(request.channel, set()).add(request.user_id)
    if users:
        wanted = Q(*(Q(channel_type=c, user_id__in=u) for c, u in users.items()), _connector=Q.OR)
        found = with_suppression(Subscription.objects.filter(wanted, application__in=sender.applications()))
        for row in found.order_by(F("last_active_at").desc(nulls_last=True), "-created_at", "-id"):
            known.by_user.setdefault((str(row.user_id), row.channel_type), []).append(row)
    template_ids = {request.template_id for request in requests if request.template_id}
    if template_ids:
        usable = MessageTemplate.objects.existing().filter(pk__in=template_ids, application__in=sender.applications())
        known.templates = {row.pk: row for row in usable}
    return known


def _shell(request: MessageRequest, known: Recipients) -> Draft | None:
    """Enough of a draft to look for what its key has made before: that stands, whatever has changed since."""
    if not request.idempotency_key:
        return None
    found = known.by_id.get(request.subscription_id) if request.subscription_id else None
    if found is not None:
        application_id = found.application_id
    else:
        names = [a for a in known.reach if request.application in (None, a.slug)]
        if len(names) != 1:
            return None
        application_id = names[0].pk
    return Draft(application_id, UUID(int=0), idempotency_key=request.idempotency_key, fingerprint=request.fingerprint)


def _draft(request: MessageRequest, known: Recipients) -> Draft:
    subscription = _recipient(request, known)
    if request.template_id is None:
        text: dict[str, Any] = {
            "title": request.title or "",
            "body": request.body or "",
            "data": dict(request.data or {}),
        }
        if request.variables is not None:
            raise Invalid(_("Variables belong to a template."), attr="variables")
    else:
        text = _rendered(request, subscription, known)
    return Draft(
        application_id=subscription.application_id,
        subscription_id=subscription.pk,
        kind=request.kind,
        campaign=request.campaign,
        priority=request.priority,
        scheduled_at=request.scheduled_at,
        idempotency_key=request.idempotency_key,
        fingerprint=request.fingerprint,
        **text,
    )


def _rendered(request: MessageRequest, subscription: Subscription, known: Recipients) -> dict[str, Any]:
    for name in ("title", "body", "data"):
        if getattr(request, name) is not None:
            raise Invalid(_("The content comes from the template."), attr=name)
    template = known.templates.get(request.template_id) if request.template_id else None
    if template is None or template.application_id != subscription.application_id:
        raise Invalid(_("There is no such template."), code="does_not_exist", attr="template_id")
    templates.check_usable(template, subscription.channel_type)
    variables = request.variables or {}
    rendered = templates.render(template, variables)
    kakao = template.channel == Channel.KAKAO_TALK
    return {
        "title": rendered.title,
        "body": rendered.body,
        "data": rendered.data,
        "template_id": template.pk,
        "template_version": template.version,
        "template_code": template.provider_code if kakao else "",
        "template_parameters": templates.parameters(template, variables) if kakao else {},
    }


def _recipient(request: MessageRequest, known: Recipients) -> Subscription:
    if request.subscription_id is not None:
        if request.user_id is not None or request.channel is not None:
            raise Invalid(_("Give a subscription, or a user and a channel, not both."), attr="subscription_id")
        found = known.by_id.get(request.subscription_id)
        if found is None or request.application not in (None, found.application.slug):
            raise Invalid(_("There is no such subscription."), code="does_not_exist", attr="subscription_id")
        return found
    if request.user_id is None and request.channel is None:
        raise Invalid(_("Give a subscription, or a user and a channel."), code="required", attr="subscription_id")
    if request.user_id is None or request.channel is None:
        missing = "user_id" if request.user_id is None else "channel"
        raise Invalid(_("A user and a channel go together."), code="required", attr=missing)
    return _of_user(request, known)


def _of_user(request: MessageRequest, known: Recipients) -> Subscription:
    """The one the user was last active on; when none can be sent to, the refusal names that one's reason."""
    if request.application is not None and request.application not in {a.slug for a in known.reach}:
        raise Invalid(_("There is no such application."), code="does_not_exist", attr="application")
    rows = [
        row
        for row in known.by_user.get((str(request.user_id), str(request.channel)), [])
        if request.application in (None, row.application.slug)
    ]
    if not rows:
        detail = _("The user has no subscription on this channel.")
        raise Invalid(detail, code="does_not_exist", attr="user_id")
    if len({row.application_id for row in rows}) > 1 and known.sender.home is not None:
        rows = [row for row in rows if row.application_id in known.home] or rows
    if len({row.application_id for row in rows}) > 1:
        raise Invalid(_("Several applications know this user: name one."), code="required", attr="application")
    return next((row for row in rows if row.sendable), rows[0])
