from collections.abc import Iterable, Iterator
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter, DropdownFilter, RelatedDropdownFilter

from config.console import Entry, confirmed_action, list_url, moment, pill
from messaging.admin.base import MessagingAdmin, ReadOnlyAdmin, code_block
from messaging.admin.cursor import CursorChangeList, as_uuid
from messaging.admin.messages import addressed
from messaging.models import Application, Message, ProviderCircuit, Subscription, SubscriptionEvent, Suppression
from messaging.models.addresses import address_hash
from messaging.services import acting

SHOWN = 100
# Meanings of the codes that appear most; the others by their range.
CODES = {
    0: _("never subscribed"),
    -2: _("opted out"),
    -6: _("other sender's token"),
    -10: _("unregistered"),
    -22: _("permission revoked"),
    -31: _("disabled by API"),
    -40: _("invalid e-mail"),
    -42: _("hard bounce"),
    -44: _("complained of spam"),
    -45: _("left the list"),
    -50: _("invalid number"),
    -52: _("number does not exist"),
    -54: _("blocked"),
    -60: _("no KakaoTalk user"),
    -61: _("blocked on KakaoTalk"),
    -98: _("awaits confirmation"),
    -99: _("never subscribed"),
}
EVENT_WORDS = {
    "created": _("created"),
    "subscribed": _("subscribed"),
    "unsubscribed": _("unsubscribed"),
    "error": _("error"),
    "token_updated": _("token changed"),
    "user_linked": _("user linked"),
    "user_unlinked": _("user unlinked"),
}
RANGES = [
    (-24, -3, _("push error")),
    (-49, -40, _("e-mail error")),
    (-59, -50, _("SMS error")),
    (-69, -60, _("KakaoTalk error")),
    (-79, -70, _("in-app error")),
]


def meaning(code: int) -> Any:
    if code > 0:
        return _("sendable")
    return CODES.get(code) or next((word for low, high, word in RANGES if low <= code <= high), _("other"))


class SendableFilter(DropdownFilter):
    title = _("status")
    parameter_name = "sendable"
    TESTS = {
        "yes": (_("sendable"), Q(status__gt=0)),
        "out": (_("opted out"), Q(status=-2)),
        "off": (_("disabled by API"), Q(status=-31)),
        "error": (_("error"), Q(status__lt=-2) & ~Q(status__in=[-31, -98, -99])),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, word) for name, (word, _test) in self.TESTS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        found = self.TESTS.get(self.value() or "")
        return queryset.filter(found[1]) if found else queryset


def disable(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.disable_many(ids, reason, now=timezone.now())


def enable(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.enable_many(ids, now=timezone.now())


@admin.register(Subscription)
class SubscriptionAdmin(ReadOnlyAdmin):
    icon, menu_order = "contacts", 30
    list_display = ("token_hint", "type", "code", "user_id", "application", "active_at", "at")
    list_select_related = ("application",)
    list_filter = (("type", ChoicesDropdownFilter), SendableFilter, ("application", RelatedDropdownFilter))
    search_fields = ("id",)
    search_help_text = _("A subscription's or user's id, or an address; always the whole of it")
    sortable_by = ()
    fieldsets = (
        (None, {"fields": (("token_hint", "type"), ("code", "status_reason"), ("application", "user_id"))}),
        (
            _("Device"),
            {"fields": (("device_model", "device_os", "device_language"), ("app_version", "locale", "time_zone"))},
        ),
        (_("Consent"), {"fields": (("marketing_consent", "marketing_consent_at", "night_consent"),)}),
        (
            _("Activity"),
            {
                "fields": (
                    ("total_messages_received", "total_messages_converted"),
                    ("created_at", "last_active_at"),
                    ("subscribed_at", "unsubscribed_at"),
                    "shown_tags",
                )
            },
        ),
    )
    actions = (
        confirmed_action(
            _("Disable"), None, disable, permissions=["messaging.change_subscription"], name="disable", icon="block"
        ),
        confirmed_action(
            _("Enable"), None, enable, permissions=["messaging.change_subscription"], name="enable", icon="check_circle"
        ),
    )

    at, active_at = moment("created_at", _("created")), moment("last_active_at", _("last active"))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return CursorChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        text = search_term.strip().replace("\x00", "")
        if not text:
            return queryset, False
        applications = list(Application.objects.values_list("pk", flat=True))
        of_user = Subscription.objects.filter(application__in=applications, user_id=text)
        keys = {*addressed(text, applications), *of_user.values_list("pk", flat=True)[:1000], as_uuid(text)} - {None}
        return queryset.filter(pk__in=keys), False

    @admin.display(description=_("status"))
    def code(self, row: Subscription) -> SafeString:
        tone = "success" if row.status > 0 else "" if row.status in (0, -2, -31, -98, -99) else "danger"
        return pill(f"{meaning(row.status)} ({row.status})", tone, row.status_reason)

    @admin.display(description=_("tags"))
    def shown_tags(self, row: Subscription) -> SafeString:
        return code_block(row.tags)

    def acts_for(self, obj: Subscription) -> Iterable[str]:
        return ["disable"] if obj.status > 0 else [] if obj.status == Subscription.OPTED_OUT else ["enable"]

    def links_for(self, request: HttpRequest, obj: Subscription) -> list[dict[str, Any]]:
        return [{"title": _("Its messages"), "url": f"{list_url(Message)}?q={obj.pk}"}]

    def timeline_entries(self, obj: Subscription) -> Iterator[Entry]:
        for event in SubscriptionEvent.objects.filter(subscription=obj).order_by("-id")[:SHOWN]:
            body = " · ".join(filter(None, [f"{meaning(event.status)} ({event.status})", event.reason]))
            word = EVENT_WORDS.get(event.event_type, event.event_type)
            yield Entry(event.occurred_at, "contacts", word, body, "success" if event.status > 0 else "")


class LiftedFilter(DropdownFilter):
    title = _("state")
    parameter_name = "lifted"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("no", _("in force")), ("yes", _("lifted"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(lifted_at__isnull=self.value() == "no") if self.value() in ("no", "yes") else queryset


# The reasons nobody typed.
AUTOMATIC = {
    Suppression.HARD_BOUNCE: _("hard bounce"),
    Suppression.COMPLAINT: _("complaint"),
    Suppression.UNSUBSCRIBED: _("unsubscribed"),
}


def lift(ids: list[Any], actor: Any, reason: str) -> Any:
    return acting.lift_many(ids, reason, actor.get_username(), now=timezone.now())


@admin.register(Suppression)
class SuppressionAdmin(ReadOnlyAdmin):
    icon, menu_order = "person_off", 40
    list_display = ("address_hint", "channel_type", "why", "state", "application", "at")
    list_select_related = ("application",)
    list_filter = (LiftedFilter, ("channel_type", ChoicesDropdownFilter), ("application", RelatedDropdownFilter))
    search_fields = ("id",)
    search_help_text = _("The whole address")
    sortable_by = ()
    fieldsets = (
        (None, {"fields": (("address_hint", "channel_type"), ("state", "why"), ("application", "created_at"))}),
        (_("Evidence"), {"fields": ("shown_evidence",)}),
        (_("Lifted"), {"fields": (("lifted_at", "lifted_by"), "lift_note")}),
    )
    actions = (
        confirmed_action(
            _("Lift"), None, lift, permissions=["messaging.lift_suppression"], name="lift", icon="lock_open"
        ),
    )

    at = moment("created_at", _("created"))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return CursorChangeList

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        text = search_term.strip().replace("\x00", "")
        if not text:
            return queryset, False
        hashes = [address_hash(channel, text) for channel in ("push", "email", "sms", "kakao_talk", "in_app")]
        return queryset.filter(Q(address_hash__in=hashes) | Q(pk=as_uuid(text))), False

    @admin.display(description=_("reason"))
    def why(self, row: Suppression) -> str:
        return str(AUTOMATIC.get(row.reason, row.reason))

    @admin.display(description=_("state"))
    def state(self, row: Suppression) -> SafeString:
        return pill(_("lifted"), "", row.lift_note) if row.lifted_at else pill(_("in force"), "danger", row.reason)

    @admin.display(description=_("evidence"))
    def shown_evidence(self, row: Suppression) -> SafeString:
        return code_block(row.evidence)

    def acts_for(self, obj: Suppression) -> Iterable[str]:
        return [] if obj.lifted_at else ["lift"]


@admin.register(Application)
class ApplicationAdmin(MessagingAdmin):
    icon, menu_order = "apps", 70
    list_display = ("slug", "name", "daily_quota", "monthly_quota", "on", "created_at")
    search_fields = ("slug", "name")
    fields = ("slug", "name", ("daily_quota", "monthly_quota"), "active", "settings", "members")
    autocomplete_fields = ("members",)

    @admin.display(description=_("state"))
    def on(self, row: Application) -> SafeString:
        return pill(_("active"), "success") if row.active else pill(_("switched off"), "warning")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        return [*super().get_readonly_fields(request, obj), *(["slug"] if obj else [])]


@admin.register(ProviderCircuit)
class ProviderCircuitAdmin(ReadOnlyAdmin):
    icon, menu_order = "electrical_services", 60
    list_display = ("provider", "reason", "code", "detail", "opened_at", "probe_at")
