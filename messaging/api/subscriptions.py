from typing import Any

from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from config.rest import (
    Flag,
    IdempotentMixin,
    JSONObject,
    StrictModelSerializer,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    transition_responses,
)
from messaging.api.messages import validated
from messaging.api.tenancy import chosen_application
from messaging.models import Channel, Subscription
from messaging.services import (
    SubscriptionSpec,
    change_subscription,
    disable_subscription,
    enable_subscription,
    register_subscriptions,
    unsubscribe,
)


class SubscriptionSerializer(StrictModelSerializer):
    application: Any = serializers.SlugRelatedField("slug", read_only=True)
    tags = JSONObject(read_only=True)

    class Meta:
        model = Subscription
        fields = [
            "id", "application", "type", "channel_type", "token_hint", "user_id", "status", "status_reason", "locale",
            "time_zone", "device_model", "device_os", "device_language", "app_version", "tags", "marketing_consent",
            "night_consent", "subscribed_at", "unsubscribed_at", "last_active_at", "total_messages_received",
            "total_messages_converted", "created_at", "updated_at",
        ]  # fmt: skip


class SubscriptionFieldsSerializer(StrictSerializer):
    user_id = Text(required=False, allow_null=True, max_length=255)
    locale = Text(required=False, allow_blank=True, max_length=20)
    time_zone = Text(required=False, allow_blank=True, max_length=64)
    device_model = Text(required=False, allow_blank=True, max_length=255)
    device_os = Text(required=False, allow_blank=True, max_length=255)
    device_language = Text(required=False, allow_blank=True, max_length=20)
    app_version = Text(required=False, allow_blank=True, max_length=50)
    tags = JSONObject(required=False, max_bytes=16384)
    marketing_consent = Flag(required=False)
    night_consent = Flag(required=False)


class RegistrationSerializer(SubscriptionFieldsSerializer):
    type = serializers.ChoiceField(choices=Subscription.Type.choices)
    token = Text(write_only=True, max_length=4096)
    application = Text(required=False, max_length=64)


class SubscriptionChangeSerializer(SubscriptionFieldsSerializer):
    token = Text(write_only=True, required=False, max_length=4096)


class ConsentSerializer(StrictSerializer):
    consent = Flag(required=False, default=False)


class SubscriptionFilters(filters.FilterSet):
    channel_type = filters.ChoiceFilter(choices=Channel.choices)

    class Meta:
        model = Subscription
        fields = ["user_id", "type", "status"]


class SubscriptionViewSet(
    IdempotentMixin,
    TenantQuerysetMixin,
    UUIDLookup,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    GenericViewSet,
):
    queryset = Subscription.objects.select_related("application")
    serializer_class = SubscriptionSerializer
    filterset_class = SubscriptionFilters
    ordering_fields = ["created_at"]
    required_permissions = {
        "list": "messaging.list_subscription",
        "partial_update": "messaging.change_subscription",
    }

    @extend_schema(
        request=RegistrationSerializer,
        responses={
            201: SubscriptionSerializer,
            200: OpenApiResponse(SubscriptionSerializer, description="The token was registered before."),
        },
    )
    def create(self, request: Request) -> Response:
        wanted = validated(RegistrationSerializer, request.data)
        application = chosen_application(request.user, wanted.pop("application", None))
        unlinked = "user_id" in wanted and wanted["user_id"] is None
        spec = SubscriptionSpec(**wanted, unlinked=unlinked)
        row, new = register_subscriptions(application, [spec], now=timezone.now())[0]
        row = self.queryset.get(pk=row.pk)
        code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
        return Response(SubscriptionSerializer(row).data, status=code)

    @extend_schema(request=SubscriptionChangeSerializer, responses=SubscriptionSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        changes = validated(SubscriptionChangeSerializer, request.data)
        return self.answer(change_subscription(row.pk, changes, now=timezone.now()))

    @extend_schema(request=None, responses=transition_responses(SubscriptionSerializer))
    @action(detail=True, methods=["post"])
    def unsubscribe(self, request: Request, pk: str) -> Response:
        key = self.bare_object().pk
        return self.answer(unsubscribe(key, now=timezone.now()))

    @extend_schema(request=None, responses=transition_responses(SubscriptionSerializer))
    @action(detail=True, methods=["post"])
    def disable(self, request: Request, pk: str) -> Response:
        key = self.bare_object().pk
        return self.answer(disable_subscription(key, now=timezone.now()))

    @extend_schema(request=ConsentSerializer, responses=transition_responses(SubscriptionSerializer))
    @action(detail=True, methods=["post"])
    def enable(self, request: Request, pk: str) -> Response:
        key, said = self.get_object().pk, validated(ConsentSerializer, request.data)
        return self.answer(enable_subscription(key, consent=said["consent"], now=timezone.now()))

    def answer(self, row: Any) -> Response:
        return Response(SubscriptionSerializer(row).data)
