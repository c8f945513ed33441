from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter, DropdownFilter, FieldTextFilter, RelatedDropdownFilter

from config.console import Entry, confirmed_action, moment, pill
from messaging.admin.base import ReadOnlyAdmin, code_block, folded, linked, page_url
from messaging.admin.cursor import CursorChangeList, as_uuid
from messaging.models import (
    Application,
    Message,
    MessageAttempt,
    MessageEvent,
    MessageHit,
    Subscription,
    WebhookDelivery,
    WebhookInbox,
)
from messaging.models.addresses import address_hash
from messaging.services import acting

SHOWN = 50
FOUND = 1000

# Three things that are easily all called "sent" have three names.
EVENT_WORDS = {
    "created": (_("Created"), "add_circle", ""),
    "sent": (_("Accepted by provider"), "outbox", "info"),
    "received": (_("Delivered"), "mark_email_read", "success"),
    "converted": (_("Converted"), "ads_click", "success"),
    "failed": (_("Failed"), "error", "danger"),
    "errored": (_("Errored, waits for a retry"), "warning", "warning"),
    "retried": (_("Back in the queue"), "replay", "info"),
}
OUTCOME_TONES = {
    "accepted": "success",
    "rejected": "danger",
    "transient": "warning",
    "rate_limited": "warning",
    "config": "danger",
    "unknown": "warning",
}
# Held and cancelled are shown as what they are, though they are no states of their own.
STATES: dict[str, tuple[Any, Q]] = {
    "pending": (_("pending"), Q(status="pending", hold_reason__isnull=True)),
    "unknown": (_("unknown"), Q(status="pending", hold_reason__isnull=False)),
    "errored": (_("errored"), Q(status="errored")),
    "successful": (_("accepted by provider"), Q(status="successful")),
    "received": (_("delivered"), Q(status="received")),
    "converted": (_("converted"), Q(status="converted")),
    "failed": (_("failed"), Q(status="failed") & ~Q(error_reason="cancelled")),
    "cancelled": (_("cancelled"), Q(status="failed", error_reason="cancelled")),
}

STAGES: dict[str, tuple[Any, Q]] = {
    "sent": (_("accepted by provider"), Q(sent_at__isnull=False)),
    "received": (_("delivered"), Q(received_at__isnull=False)),
    "converted": (_("converted"), Q(converted_at__isnull=False)),
    "failed": (_("failed, never accepted"), STATES["failed"][1] & Q(sent_at__isnull=True)),
}


class StateFilter(DropdownFilter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("due", _("due now")), *((name, word) for name, (word, _test) in STATES.items())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() == "due":
            return queryset.filter(pk__in=Message.objects.due(timezone.now()).values("pk"))
        found = STATES.get(self.value() or "")
        return queryset.filter(found[1]) if found else queryset


class StageFilter(DropdownFilter):
    """How far it came, whatever came after: what the figures of the day count."""

    title = _("came as far as")
    parameter_name = "stage"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, word) for name, (word, _test) in STAGES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        found = STAGES.get(self.value() or "")
        return queryset.filter(found[1]) if found else queryset


class AgeFilter(DropdownFilter):
    title = _("created within")
    parameter_name = "within"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("today", _("today (UTC)")),
            ("1", _("an hour")),
            ("24", _("a day")),
            ("168", _("a week")),
            ("720", _("30 days")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        if value not in dict(self.lookup_choices):
            return queryset
        since = midnight() if value == "today" else timezone.now() - timedelta(hours=int(value))
        return queryset.filter(created_at__gte=since)


def midnight() -> datetime:
    """Days are UTC days, here as in the analytics."""
    return timezone.now().astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def describe(rows: QuerySet[Message]) -> Iterator[str]:
    for row in rows.select_related("subscription"):
        yield f"{row.get_channel_type_display()} · {row.subscription.token_hint} · {row.title or row.body[:60]}"


def cancel(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.cancel_many(ids, now=timezone.now())


def retry(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.retry_many(ids, now=timezone.now())


def resolve_accepted(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.resolve_many(ids, "accepted", now=timezone.now())


def resolve_rejected(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.resolve_many(ids, "rejected", now=timezone.now())


def state_of(message: Message) -> str:
    if message.status == "pending" and message.hold_reason:
        return "unknown"
    return "cancelled" if message.status == "failed" and message.error_reason == "cancelled" else str(message.status)


@admin.register(Message)
class MessageAdmin(ReadOnlyAdmin):
    icon, menu_order = "mail", 10
    state_colours = {
        "pending": "",
        "successful": "info",
        "received": "success",
        "converted": "success",
        "failed": "danger",
        "errored": "warning",
        "unknown": "warning",
        "cancelled": "",
    }
    rule_words = {
        "expire_unsent": _("It was not accepted within 24 h."),
        "time_out_receipt": _("It was accepted, but nobody said within 72 h that it had arrived."),
        "expire_received": _("Nothing followed within 30 d of its arrival; its content was deleted."),
        "archive_failed": _("It failed 90 d ago; its content was deleted."),
    }
    list_display = ("at", "state", "channel_type", "recipient", "subject", "shown_campaign", "application")
    list_display_links = ("at",)
    list_select_related = ("application", "subscription")
    list_filter = (
        StateFilter,
        StageFilter,
        AgeFilter,
        ("channel_type", ChoicesDropdownFilter),
        ("kind", ChoicesDropdownFilter),
        ("failure_type", ChoicesDropdownFilter),
        ("campaign", FieldTextFilter),
        ("application", RelatedDropdownFilter),
    )
    search_fields = ("id",)
    search_help_text = _("An id of ours or the provider's, a user's id, or an address; always the whole of it")
    sortable_by = ()
    fieldsets = (
        (
            None,
            {"fields": (("state", "application"), ("channel_type", "kind"), ("recipient_link", "user_id"), "campaign")},
        ),
        (_("Content"), {"fields": ("title", "body", "shown_data", ("template", "template_version"))}),
        (
            _("Delivery"),
            {
                "fields": (
                    ("scheduled_at", "next_attempt_at"),
                    ("priority", "hold_reason"),
                    ("error_reason", "failure_type"),
                    ("network_retries", "outage_retries", "rate_limited_retries"),
                    ("provider_message_id", "idempotency_key"),
                    ("retry_of_link", "failover_of_link"),
                    "shown_error",
                )
            },
        ),
        (
            _("Times"),
            {
                "fields": (
                    ("created_at", "sent_at"),
                    ("received_at", "receipt_implied"),
                    ("converted_at", "failed_at"),
                    ("expired_at", "archived_at"),
                )
            },
        ),
    )
    actions = (
        confirmed_action(
            _("Cancel"),
            describe,
            cancel,
            permissions=["messaging.cancel_message"],
            name="cancel",
            icon="cancel",
            danger=True,
        ),
        confirmed_action(
            _("Send failed ones anew"),
            describe,
            retry,
            permissions=["messaging.retry_message"],
            name="retry",
            icon="replay",
        ),
        confirmed_action(
            _("Resolve unknown: the provider accepted it"),
            describe,
            resolve_accepted,
            permissions=["messaging.resolve_message"],
            name="resolve_accepted",
            icon="check_circle",
        ),
        confirmed_action(
            _("Resolve unknown: it was not sent"),
            describe,
            resolve_rejected,
            permissions=["messaging.resolve_message"],
            name="resolve_rejected",
            icon="block",
            danger=True,
        ),
    )

    at = moment("created_at", _("created"))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        (first, shown), *others = super().get_fieldsets(request, obj)
        own = ("from_address",) if obj is not None and obj.from_address else ()
        return [(first, {**shown, "fields": (*shown["fields"], *own)}), *others]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return CursorChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Each look-up by its own index; an OR over them would read the whole table."""
        text = search_term.strip().replace("\x00", "")
        if not text:
            return queryset, False
        rows, applications = Message.objects.order_by("-pk"), list(Application.objects.values_list("pk", flat=True))
        looks = [rows.filter(provider_message_id=text), rows.filter(application__in=applications, user_id=text)]
        if key := as_uuid(text):
            looks += [rows.filter(pk=key), rows.filter(subscription=key)]
        looks.append(rows.filter(subscription__in=addressed(text, applications)))
        keys = {pk for look in looks for pk in look.values_list("pk", flat=True)[:FOUND]}
        return queryset.filter(pk__in=keys), False

    @admin.display(description=_("state"))
    def state(self, message: Message) -> SafeString:
        name = state_of(message)
        return pill(STATES[name][0], self.state_colours[name], why(message))

    @admin.display(description=_("recipient"))
    def recipient(self, message: Message) -> SafeString:
        return cut(message.subscription.token_hint, "sb-narrowest")

    @admin.display(description=_("recipient"))
    def recipient_link(self, message: Message) -> Any:
        return linked(Subscription, message.subscription_id, message.subscription)

    @admin.display(description=_("subject"))
    def subject(self, message: Message) -> SafeString:
        return cut((message.title or message.body)[:200])

    @admin.display(description=_("campaign"))
    def shown_campaign(self, message: Message) -> SafeString | str:
        return cut(message.campaign, "sb-narrowest") if message.campaign else "–"

    @admin.display(description=_("data"))
    def shown_data(self, message: Message) -> SafeString:
        return code_block(message.data)

    @admin.display(description=_("error details"))
    def shown_error(self, message: Message) -> SafeString:
        return code_block(message.error_details)

    @admin.display(description=_("retry of"))
    def retry_of_link(self, message: Message) -> Any:
        return linked(Message, message.retry_of_id, message.retry_of_id)

    @admin.display(description=_("failover of"))
    def failover_of_link(self, message: Message) -> Any:
        return linked(Message, message.failover_of_id, message.failover_of_id)

    def acts_for(self, obj: Message) -> Iterable[str]:
        acts = {
            "unknown": ["resolve_accepted", "resolve_rejected", "cancel"],
            "failed": ["retry"],
            "cancelled": ["retry"],
        }
        return acts.get(state_of(obj), ["cancel"] if obj.status in ("pending", "errored") else [])

    def timeline_entries(self, obj: Message) -> Iterator[Entry]:
        yield from map(event_entry, MessageEvent.objects.filter(message=obj).order_by("-id")[:SHOWN])
        yield from map(attempt_entry, MessageAttempt.objects.filter(message=obj).order_by("-attempt_no")[:SHOWN])
        yield from map(hit_entry, MessageHit.objects.filter(message=obj).select_related("link").order_by("-id")[:SHOWN])
        yield from map(provider_entry, WebhookInbox.objects.filter(message=obj).order_by("-id")[:SHOWN])
        yield from map(webhook_entry, WebhookDelivery.objects.filter(message_id=obj.pk).order_by("-id")[:SHOWN])


def cut(text: str, width: str = "") -> SafeString:
    """One line of a list, the whole when one rests on it."""
    return format_html('<span class="sb-cut {}" title="{}">{}</span>', width, text, text)


def addressed(text: str, applications: list[Any]) -> list[Any]:
    """Subscriptions of an address: their hashes are indexed behind application and type."""
    hashes = {address_hash(channel, text) for channel in ("push", "email", "sms", "kakao_talk", "in_app")}
    types = [kind.value for kind in Subscription.Type]
    rows = Subscription.objects.filter(application__in=applications, type__in=types, token_hash__in=hashes)
    return list(rows.values_list("pk", flat=True)[:FOUND])


def why(message: Message) -> str:
    """What the badge says when one rests on it."""
    if message.hold_reason:
        return gettext("The provider may have taken it: nobody knows yet.")
    if message.status in ("failed", "errored"):
        parts = [message.error_reason or "", str((message.error_details or {}).get("code") or "")]
        if message.status == "errored" and message.next_attempt_at:
            parts.append(gettext("next attempt %(at)s") % {"at": f"{message.next_attempt_at:%Y-%m-%d %H:%M:%S %Z}"})
        return " · ".join(part for part in parts if part)
    return ""


def event_entry(event: MessageEvent) -> Entry:
    word, icon, tone = EVENT_WORDS.get(event.event_type, (event.event_type, "circle", ""))
    said = " · ".join(f"{name}: {value}" for name, value in event.metadata.items() if value not in ("", None))
    return Entry(event.occurred_at, icon, word, said, tone)


def attempt_entry(attempt: MessageAttempt) -> Entry:
    outcome = attempt.get_outcome_display() if attempt.outcome else gettext("no result yet")
    title = gettext("Attempt %(no)s by %(provider)s: %(outcome)s") % {
        "no": attempt.attempt_no,
        "provider": attempt.provider,
        "outcome": outcome,
    }
    facts = [
        attempt.code,
        attempt.provider_message_id,
        f"{attempt.latency_ms} ms" if attempt.latency_ms is not None else "",
    ]
    body: Any = " · ".join(str(fact) for fact in facts if fact)
    if attempt.raw:
        body = format_html("{}{}", body, folded(attempt.raw))
    return Entry(attempt.started_at, "send", title, body, OUTCOME_TONES.get(attempt.outcome or "", ""))


def hit_entry(hit: MessageHit) -> Entry:
    title = gettext("%(kind)s by a %(class)s") % {"kind": hit.get_kind_display(), "class": hit.get_by_display()}
    facts = [str(hit.link or ""), ", ".join(hit.reasons), hit.user_agent]
    icon = "visibility" if hit.kind == "open" else "ads_click"
    return Entry(hit.occurred_at, icon, title, " · ".join(filter(None, facts)), "" if hit.reasons else "success")


def provider_entry(event: WebhookInbox) -> Entry:
    title = gettext("%(provider)s reports: %(what)s") % {"provider": event.provider, "what": event.event_type}
    body = " · ".join(filter(None, [event.get_state_display(), event.note, event.event_id]))
    return Entry(event.received_at, "webhook", title, body, "info", page_url(WebhookInbox, event.pk))


def webhook_entry(delivery: WebhookDelivery) -> Entry:
    title = gettext("Webhook %(type)s") % {"type": delivery.event_type}
    if delivery.delivered_at:
        word, tone = gettext("told"), "success"
    elif delivery.given_up_at:
        word, tone = gettext("given up"), "danger"
    else:
        word, tone = gettext("to be told"), ""
    return Entry(delivery.created_at, "outgoing_mail", title, word, tone, page_url(WebhookDelivery, delivery.pk))
