from collections.abc import Iterable, Iterator
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter, DropdownFilter

from config.console import Entry, confirmed_action, list_url, moment, pill
from messaging.admin.base import MessagingAdmin, ReadOnlyAdmin, code_block, folded, linked
from messaging.admin.cursor import CursorChangeList, as_uuid
from messaging.models import Message, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookInbox
from messaging.providers.webhooks import PROVIDERS
from messaging.services import webhooks


def switch(ids: list[Any], on: bool) -> dict[str, int]:
    for endpoint in WebhookEndpoint.objects.filter(pk__in=ids):
        webhooks.change_endpoint(endpoint, active=on)
    return {"switched_on" if on else "switched_off": len(ids)}


def switch_on(ids: list[Any], actor: Any, reason: str) -> Any:
    return switch(ids, True)


def switch_off(ids: list[Any], actor: Any, reason: str) -> Any:
    return switch(ids, False)


def resend(ids: list[Any], actor: Any, reason: str) -> Any:
    return {"queued": webhooks.resend_deliveries(ids, timezone.now())}


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(MessagingAdmin):
    """Made over the API, which shows the secret once; here they are switched on and off."""

    icon, menu_order = "webhook", 80
    read_only = True
    list_display = ("url", "application", "state", "created_at")
    list_select_related = ("application",)
    fields = ("url", "application", "state", "resting_until", "created_at")
    actions = (
        confirmed_action(
            _("Switch on"), None, switch_on, permissions=["messaging.change_webhookendpoint"], name="switch_on"
        ),
        confirmed_action(
            _("Switch off"), None, switch_off, permissions=["messaging.change_webhookendpoint"], name="switch_off"
        ),
    )

    @admin.display(description=_("state"))
    def state(self, row: WebhookEndpoint) -> SafeString:
        if not row.active:
            return pill(_("off"), "warning", row.disabled_reason)
        if row.resting_until:
            return pill(_("does not answer"), "danger")
        return pill(_("on"), "success")

    def acts_for(self, obj: WebhookEndpoint) -> Iterable[str]:
        return ["switch_off" if obj.active else "switch_on"]

    def links_for(self, request: HttpRequest, obj: WebhookEndpoint) -> list[dict[str, Any]]:
        return [{"title": _("Its deliveries"), "url": f"{list_url(WebhookDelivery)}?q={obj.pk}"}]


class ToldFilter(DropdownFilter):
    title = _("state")
    parameter_name = "told"
    TESTS = {
        "yes": (_("told"), Q(delivered_at__isnull=False)),
        "no": (_("to be told"), Q(delivered_at__isnull=True, given_up_at__isnull=True)),
        "given_up": (_("given up"), Q(given_up_at__isnull=False)),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, word) for name, (word, _test) in self.TESTS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        found = self.TESTS.get(self.value() or "")
        return queryset.filter(found[1]) if found else queryset


@admin.register(WebhookDelivery)
class WebhookDeliveryAdmin(ReadOnlyAdmin):
    icon, menu_order = "outgoing_mail", 81
    list_display = ("at", "event_type", "state", "attempt_count", "next_at", "endpoint")
    list_select_related = ("endpoint",)
    list_filter = (ToldFilter,)
    search_fields = ("id",)
    search_help_text = _("The id of a message or an endpoint")
    sortable_by = ()
    fieldsets = (
        (None, {"fields": (("event_type", "state"), ("endpoint", "of_message"), ("webhook_id", "attempt_count"))}),
        (_("Times"), {"fields": (("created_at", "next_attempt_at"), ("delivered_at", "given_up_at"))}),
        (_("Body"), {"fields": ("shown_payload",)}),
    )
    actions = (
        confirmed_action(
            _("Send again"),
            None,
            resend,
            permissions=["messaging.resend_webhookdelivery"],
            name="resend",
            icon="replay",
        ),
    )

    at, next_at = moment("created_at", _("created")), moment("next_attempt_at", _("next attempt"))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return CursorChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if not search_term.strip():
            return queryset, False
        key = as_uuid(search_term)
        return queryset.filter(
            Q(message_id=key) | Q(endpoint=key) | Q(webhook_id=key)
        ) if key else queryset.none(), False

    @admin.display(description=_("state"))
    def state(self, row: WebhookDelivery) -> SafeString:
        if row.delivered_at:
            return pill(_("told"), "success")
        return pill(_("given up"), "danger") if row.given_up_at else pill(_("to be told"), "info")

    @admin.display(description=_("message"))
    def of_message(self, row: WebhookDelivery) -> Any:
        return linked(Message, row.message_id, row.message_id)

    @admin.display(description=_("body"))
    def shown_payload(self, row: WebhookDelivery) -> SafeString:
        return code_block(row.payload)

    def acts_for(self, obj: WebhookDelivery) -> Iterable[str]:
        return ["resend"]

    def timeline_entries(self, obj: WebhookDelivery) -> Iterator[Entry]:
        for attempt in WebhookAttempt.objects.filter(delivery=obj).order_by("-attempt_no")[:50]:
            said = f"HTTP {attempt.status_code}" if attempt.status_code else attempt.error
            title = gettext("Attempt %(no)s: %(said)s") % {"no": attempt.attempt_no, "said": said}
            body: Any = f"{attempt.latency_ms} ms"
            if attempt.answer:
                body = format_html("{}{}", body, folded(attempt.answer))
            good = attempt.status_code is not None and 200 <= attempt.status_code < 300
            yield Entry(attempt.started_at, "send", title, body, "success" if good else "warning")


class ProviderFilter(DropdownFilter):
    title = _("provider")
    parameter_name = "provider"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, name) for name in PROVIDERS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(provider=self.value()) if self.value() else queryset


@admin.register(WebhookInbox)
class WebhookInboxAdmin(ReadOnlyAdmin):
    icon, menu_order = "move_to_inbox", 82
    list_display = ("at", "provider", "event_type", "outcome", "note", "of_message")
    list_filter = (("state", ChoicesDropdownFilter), ProviderFilter)
    search_fields = ("id",)
    search_help_text = _("The id of an event or of a message, ours or the provider's")
    sortable_by = ()
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("provider", "event_id"),
                    ("event_type", "outcome", "note"),
                    ("of_message", "provider_message_id"),
                )
            },
        ),
        (_("Times"), {"fields": (("occurred_at", "received_at"), "applied_at")}),
        (_("Event as told"), {"fields": ("shown_payload",)}),
    )
    TONES = {"parked": "warning", "applied": "success", "ignored": "", "abandoned": "danger"}

    at = moment("received_at", _("arrived"))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return CursorChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        text = search_term.strip().replace("\x00", "")
        if not text:
            return queryset, False
        found = Q(event_id=text, provider__in=PROVIDERS)
        return queryset.filter(found | Q(message=as_uuid(text))), False

    @admin.display(description=_("state"))
    def outcome(self, row: WebhookInbox) -> SafeString:
        return pill(row.get_state_display(), self.TONES[row.state], row.note)

    @admin.display(description=_("message"))
    def of_message(self, row: WebhookInbox) -> Any:
        return linked(Message, row.message_id, row.message_id)

    @admin.display(description=_("event as told"))
    def shown_payload(self, row: WebhookInbox) -> SafeString:
        return code_block(row.payload)
