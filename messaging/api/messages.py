import re
from datetime import datetime
from functools import cache
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters
from django_filters.fields import IsoDateTimeField
from drf_spectacular.utils import OpenApiResponse, extend_schema
from drf_standardized_errors.formatter import flatten_errors
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from config.rest import (
    SEE_ALL_TENANTS,
    JSONObject,
    Key,
    Moment,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    Whole,
    idempotent,
    transition_responses,
)
from config.rest.idempotency import VISIBLE_ASCII, check_key, fingerprint
from config.rest.schema import IDEMPOTENCY_KEY, ErrorResponseSerializer, ErrorSerializer
from messaging.api.tenancy import applications_of, sender_of
from messaging.models import Channel, FailureType, HoldReason, Kind, Message, MessageAttempt
from messaging.services import (
    MessageRequest,
    Outcome,
    as_inserted,
    cancel_message,
    create_messages,
    raise_refusal,
    record_conversion,
    record_receipt,
    resolve_message,
    retry_message,
)
from messaging.services.creating import CONFLICTS, QUOTA_EXCEEDED

MOST_IN_BULK = 500


class MessageSerializer(serializers.Serializer[Message]):
    """The columns. Written out below: a list of 500 through field objects costs ten times as much."""

    id = serializers.UUIDField()
    application = serializers.SlugField()
    subscription_id = serializers.UUIDField()
    user_id = Text(allow_null=True)
    channel_type = serializers.ChoiceField(choices=Channel.choices)
    kind = serializers.ChoiceField(choices=Kind.choices)
    title = Text()
    body = Text()
    data = JSONObject()  # type: ignore[assignment]
    template_id = serializers.UUIDField(allow_null=True)
    template_version = serializers.IntegerField(allow_null=True)
    campaign = Text(allow_null=True)
    priority = serializers.IntegerField()
    scheduled_at = serializers.DateTimeField(allow_null=True)
    status = serializers.ChoiceField(choices=Message.Status.choices)
    created_at = serializers.DateTimeField()
    sent_at = serializers.DateTimeField(allow_null=True)
    received_at = serializers.DateTimeField(allow_null=True)
    converted_at = serializers.DateTimeField(allow_null=True)
    failed_at = serializers.DateTimeField(allow_null=True)
    expired_at = serializers.DateTimeField(allow_null=True)
    archived_at = serializers.DateTimeField(allow_null=True)
    error_reason = Text(allow_null=True)
    error_details = JSONObject()
    failure_type = serializers.ChoiceField(choices=FailureType.choices, allow_null=True)
    retry_counts = serializers.DictField(child=serializers.IntegerField())
    next_attempt_at = serializers.DateTimeField(allow_null=True)
    hold_reason = serializers.ChoiceField(choices=HoldReason.choices, allow_null=True)
    receipt_implied = serializers.BooleanField()
    provider_message_id = Text(allow_null=True)
    retry_of = serializers.UUIDField(allow_null=True)
    failover_of = serializers.UUIDField(allow_null=True)
    version_history = JSONObject()

    def to_representation(self, instance: Message) -> dict[str, Any]:
        row = {name: getattr(instance, name) for name in PLAIN}
        row["application"] = instance.application.slug
        row["retry_of"], row["failover_of"] = instance.retry_of_id, instance.failover_of_id
        return {name: row[name] for name in NAMES}


NAMES = tuple(MessageSerializer._declared_fields)  # type: ignore[attr-defined]
PLAIN = tuple(name for name in NAMES if name not in ("application", "retry_of", "failover_of"))


class MessageEventSerializer(serializers.Serializer[Any]):
    event_type = Text()
    occurred_at = serializers.DateTimeField()
    metadata = JSONObject()


class AttemptSerializer(serializers.ModelSerializer[MessageAttempt]):
    class Meta:
        model = MessageAttempt
        fields = [
            "attempt_no", "started_at", "ended_at", "outcome", "provider", "provider_message_id", "code", "raw",
            "latency_ms",
        ]  # fmt: skip


class HitSerializer(serializers.Serializer[Any]):
    kind = serializers.ChoiceField(choices=["open", "click"])
    occurred_at = serializers.DateTimeField()

    def get_fields(self) -> dict[str, Any]:
        # `class` is no name for an attribute.
        by = serializers.ChoiceField(choices=["human", "machine"], source="by")
        return {"class": by, **super().get_fields()}


class MessageDetailSerializer(MessageSerializer):
    events = MessageEventSerializer(many=True)
    attempts = AttemptSerializer(many=True)
    hits = HitSerializer(many=True)

    def to_representation(self, instance: Message) -> dict[str, Any]:
        row = super().to_representation(instance)
        row["events"] = MessageEventSerializer(instance.events.order_by("id"), many=True).data
        row["attempts"] = AttemptSerializer(instance.attempts.order_by("attempt_no"), many=True).data
        hits = getattr(instance, "hits", None)
        row["hits"] = [] if hits is None else HitSerializer(hits.order_by("id"), many=True).data
        return row


class MessageCreateSerializer(StrictSerializer):
    subscription_id = Key(required=False, allow_null=True)
    user_id = Text(required=False, allow_null=True, max_length=255)
    channel = serializers.ChoiceField(choices=Channel.choices, required=False, allow_null=True)
    application = Text(required=False, max_length=64)
    title = Text(required=False, allow_blank=True, allow_null=True, max_length=1000, trim_whitespace=False)
    body = Text(required=False, allow_blank=True, allow_null=True, max_length=500_000, trim_whitespace=False)
    data = JSONObject(required=False, allow_null=True)  # type: ignore[assignment]
    template_id = Key(required=False, allow_null=True)
    variables = JSONObject(required=False, allow_null=True)
    kind = serializers.ChoiceField(choices=Kind.choices, required=False)
    campaign = Text(required=False, allow_blank=True, allow_null=True, max_length=255)
    priority = Whole(required=False, min_value=0, max_value=9)
    scheduled_at = Moment(required=False, allow_null=True)


class BulkItemSerializer(MessageCreateSerializer):
    idempotency_key = serializers.RegexField(rf"\A{VISIBLE_ASCII.pattern}\Z", required=False, allow_null=True)

    def validate_idempotency_key(self, key: str | None) -> str | None:
        if key is not None and key.startswith(settings.RESERVED_KEYS):
            raise ValidationError("Keys that begin like this are made by the system itself.")
        return key


class BulkSerializer(StrictSerializer):
    messages = serializers.ListField(
        child=serializers.JSONField(allow_null=True), min_length=1, max_length=MOST_IN_BULK
    )


class BulkRequestSerializer(serializers.Serializer[Any]):
    messages = BulkItemSerializer(many=True)


class BulkResultSerializer(serializers.Serializer[Any]):
    index = serializers.IntegerField()
    status = serializers.IntegerField()
    id = serializers.UUIDField(required=False)
    errors = ErrorSerializer(many=True, required=False)  # type: ignore[assignment]


class BulkResponseSerializer(serializers.Serializer[Any]):
    results = BulkResultSerializer(many=True)


class ReceiptSerializer(StrictSerializer):
    occurred_at = Moment(required=False)


class ConversionSerializer(ReceiptSerializer):
    action = Text(required=False, allow_blank=True, max_length=100)
    data = JSONObject(required=False, max_bytes=4096)  # type: ignore[assignment]


class ResolutionSerializer(StrictSerializer):
    outcome = serializers.ChoiceField(choices=["accepted", "rejected"])


# A plus sign that was not quoted arrives as a blank.
UNQUOTED_ZONE = re.compile(r" (\d{2}:?\d{2})\Z")


class MomentField(IsoDateTimeField):
    def to_python(self, value: Any) -> Any:
        return super().to_python(UNQUOTED_ZONE.sub(r"+\1", value) if isinstance(value, str) else value)


class MomentFilter(filters.IsoDateTimeFilter):
    field_class = MomentField


class MessageFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=Message.Status.choices)
    channel_type = filters.ChoiceFilter(choices=Channel.choices)
    kind = filters.ChoiceFilter(choices=Kind.choices)
    campaign = filters.CharFilter()
    user_id = filters.CharFilter()
    subscription_id = filters.UUIDFilter()
    created_after = MomentFilter(field_name="created_at", lookup_expr="gte")
    created_before = MomentFilter(field_name="created_at", lookup_expr="lt")


class MessageViewSet(TenantQuerysetMixin, UUIDLookup, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet):
    queryset = Message.objects.select_related("application")
    serializer_class = MessageSerializer
    filterset_class = MessageFilters
    ordering_fields = ["created_at"]
    required_permissions = {
        "create": "messaging.add_message",
        "bulk": "messaging.add_message",
        "cancel": "messaging.cancel_message",
        "receive": "messaging.report_receipt",
        "convert": "messaging.report_receipt",
        "retry": "messaging.retry_message",
        "resolve": "messaging.resolve_message",
    }

    def get_queryset(self) -> QuerySet[Message]:
        """By the ids of the applications: with a join to their members the index by application would not be used."""
        rows = Message.objects.select_related("application")
        if getattr(self, "swagger_fake_view", False):
            return rows.none()
        user = self.request.user
        if user.has_perm(SEE_ALL_TENANTS):
            return rows
        return rows.filter(application_id__in=list(applications_of(user).values_list("pk", flat=True)))

    @property
    def ordering(self) -> str:
        return "-id" if self.request.user.has_perm(SEE_ALL_TENANTS) else "-created_at"

    @extend_schema(responses=MessageDetailSerializer)
    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return Response(MessageDetailSerializer(self.get_object()).data)

    @extend_schema(request=MessageCreateSerializer, responses={201: MessageSerializer}, parameters=[IDEMPOTENCY_KEY])
    def create(self, request: Request) -> Response:
        """The header becomes the message's own key: it never expires, and a twin waits for the first to commit."""
        key = checked_key(request)
        wanted = validated(MessageCreateSerializer, request.data)
        mark = fingerprint(request.data) if key else ""
        now = timezone.now()
        outcome = create_messages([as_request(wanted, key, mark)], sender_of(request.user), now=now)[0]
        raise_refusal(outcome)
        headers = {} if outcome.created else {"Idempotent-Replay": "true"}
        return Response(self.as_created(outcome, now), status=status.HTTP_201_CREATED, headers=headers)

    def as_created(self, outcome: Outcome, now: datetime) -> dict[str, Any]:
        """The answer to its POST, also when the POST is repeated after the message has moved on."""
        row = as_inserted(outcome, now)
        if row is None:
            stored = self.get_queryset().get(pk=outcome.message_id or "")
            row = MessageSerializer().to_representation(stored)
        row |= BORN
        return {name: row[name] for name in NAMES}

    @extend_schema(request=BulkRequestSerializer, responses=BulkResponseSerializer)
    @action(detail=False, methods=["post"])
    @idempotent
    def bulk(self, request: Request) -> Response:
        items = validated(BulkSerializer, request.data)["messages"]
        results: dict[int, dict[str, Any]] = {}
        asked: dict[int, MessageRequest] = {}
        for index, item in enumerate(items):
            try:
                wanted = validated(BulkItemSerializer, item)
            except ValidationError as error:
                found = [{"code": e.code, "detail": e.detail, "attr": e.attr} for e in flatten_errors(error.detail)]
                results[index] = {"index": index, "status": 400, "errors": found}
                continue
            key = wanted.pop("idempotency_key", None)
            body = {name: value for name, value in item.items() if name != "idempotency_key"}
            asked[index] = as_request(wanted, key, fingerprint(body) if key else "")
        outcomes = create_messages(list(asked.values()), sender_of(request.user), now=timezone.now())
        for index, outcome in zip(asked, outcomes, strict=True):
            results[index] = {"index": index, **as_result(outcome)}
        return Response({"results": [results[index] for index in range(len(items))]})

    @extend_schema(
        request=ReceiptSerializer, responses={**transition_responses(MessageSerializer), 503: ErrorResponseSerializer}
    )
    @action(detail=True, methods=["post"])
    def receive(self, request: Request, pk: str) -> Response:
        key, said = self.own(pk), validated(ReceiptSerializer, request.data)
        return self.answer(record_receipt(key, now=timezone.now(), **said))

    @extend_schema(
        request=ConversionSerializer,
        responses={**transition_responses(MessageSerializer), 503: ErrorResponseSerializer},
    )
    @action(detail=True, methods=["post"])
    def convert(self, request: Request, pk: str) -> Response:
        key, said = self.own(pk), validated(ConversionSerializer, request.data)
        return self.answer(record_conversion(key, now=timezone.now(), **said))

    @extend_schema(request=None, responses=transition_responses(MessageSerializer))
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str) -> Response:
        key = self.bare_object().pk
        return self.answer(cancel_message(key, now=timezone.now()))

    @extend_schema(
        request=None,
        responses={
            201: MessageSerializer,
            200: OpenApiResponse(MessageSerializer, description="It was sent anew before."),
            409: ErrorResponseSerializer,
        },
    )
    @action(detail=True, methods=["post"])
    @idempotent
    def retry(self, request: Request, pk: str) -> Response:
        key = self.bare_object().pk
        row, new = retry_message(key, now=timezone.now())
        return self.answer(row, status.HTTP_201_CREATED if new else status.HTTP_200_OK)

    @extend_schema(request=ResolutionSerializer, responses=transition_responses(MessageSerializer))
    @action(detail=True, methods=["post"])
    def resolve(self, request: Request, pk: str) -> Response:
        key, said = self.own(pk), validated(ResolutionSerializer, request.data)
        return self.answer(resolve_message(key, said["outcome"], now=timezone.now()))

    def own(self, pk: str) -> Any:
        """The id, or 404 when the row is not the client's."""
        return self.get_object().pk

    def answer(self, row: Message, code: int = status.HTTP_200_OK) -> Response:
        """Read back: the history is written by a trigger, and a repeat has to be told the same."""
        stored = Message.objects.select_related("application").get(pk=row.pk)
        return Response(MessageSerializer(stored).data, status=code)


def checked_key(request: Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None:
        check_key(key)
    return key


def validated(serializer_class: type[StrictSerializer], data: Any) -> dict[str, Any]:
    return dict(shared(serializer_class).run_validation(data))


@cache
def shared(serializer_class: type[StrictSerializer]) -> StrictSerializer:
    """Validating keeps nothing in a serializer, while building one copies all its fields."""
    return serializer_class()


def as_request(wanted: dict[str, Any], key: str | None, mark: str) -> MessageRequest:
    wanted["campaign"] = wanted.get("campaign") or ""
    return MessageRequest(**wanted, idempotency_key=key, fingerprint=mark)


def as_result(outcome: Outcome) -> dict[str, Any]:
    """As the single request would have been answered."""
    if outcome.code is None:
        return {"status": 201, "id": outcome.message_id}
    code = 429 if outcome.code == QUOTA_EXCEEDED else 409 if outcome.code in CONFLICTS else 400
    attr = "idempotency_key" if outcome.attr == "Idempotency-Key" else outcome.attr
    return {"status": code, "errors": [{"code": outcome.code, "detail": outcome.detail, "attr": attr}]}


# What a POST makes is neither a retry nor a failover.
BORN: dict[str, Any] = {
    "status": "pending", "sent_at": None, "received_at": None, "converted_at": None, "failed_at": None,
    "expired_at": None, "archived_at": None, "error_reason": None, "error_details": {}, "failure_type": None,
    "retry_counts": {"network": 0, "outage": 0, "rate_limited": 0}, "next_attempt_at": None, "hold_reason": None,
    "receipt_implied": False, "provider_message_id": None, "retry_of": None, "failover_of": None, "version_history": {},
}  # fmt: skip
