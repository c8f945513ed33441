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
    BoundedJSON,
    IdempotentMixin,
    StrictModelSerializer,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    transition_responses,
)
from messaging.api.messages import validated
from messaging.api.tenancy import chosen_application
from messaging.models import Channel, Suppression
from messaging.services import add_suppression, lift_suppression


class SuppressionSerializer(StrictModelSerializer):
    application: Any = serializers.SlugRelatedField("slug", read_only=True)
    channel = serializers.ChoiceField(choices=Channel.choices, source="channel_type")
    evidence = BoundedJSON(read_only=True)

    class Meta:
        model = Suppression
        fields = [
            "id", "application", "channel", "address_hint", "reason", "evidence", "created_at", "lifted_at",
            "lifted_by", "lift_note",
        ]  # fmt: skip


class SuppressionCreateSerializer(StrictSerializer):
    application = Text(required=False, max_length=64)
    channel = serializers.ChoiceField(choices=Channel.choices)
    address = Text(max_length=4096, write_only=True)
    reason = Text(max_length=100)
    evidence = BoundedJSON(required=False, max_bytes=16384)


class LiftSerializer(StrictSerializer):
    note = Text(max_length=2000)


class SuppressionFilters(filters.FilterSet):
    channel = filters.ChoiceFilter(choices=Channel.choices, field_name="channel_type")
    active = filters.BooleanFilter(field_name="lifted_at", lookup_expr="isnull")

    class Meta:
        model = Suppression
        fields = ["reason"]


class SuppressionViewSet(
    IdempotentMixin,
    TenantQuerysetMixin,
    UUIDLookup,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    GenericViewSet,
):
    queryset = Suppression.objects.select_related("application")
    serializer_class = SuppressionSerializer
    filterset_class = SuppressionFilters
    ordering_fields = ["created_at"]
    required_permissions = {"lift": "messaging.lift_suppression"}

    @extend_schema(
        request=SuppressionCreateSerializer,
        responses={
            201: SuppressionSerializer,
            200: OpenApiResponse(SuppressionSerializer, description="The address was suppressed before."),
        },
    )
    def create(self, request: Request) -> Response:
        wanted = validated(SuppressionCreateSerializer, request.data)
        row, new = add_suppression(
            chosen_application(request.user, wanted.get("application")),
            wanted["channel"],
            wanted["address"],
            wanted["reason"],
            wanted.get("evidence", {}),
            now=timezone.now(),
        )
        code = status.HTTP_201_CREATED if new else status.HTTP_200_OK
        return Response(SuppressionSerializer(row).data, status=code)

    @extend_schema(request=LiftSerializer, responses=transition_responses(SuppressionSerializer))
    @action(detail=True, methods=["post"])
    def lift(self, request: Request, pk: str) -> Response:
        key, said = self.get_object().pk, validated(LiftSerializer, request.data)
        by = request.user.get_username()
        return Response(SuppressionSerializer(lift_suppression(key, note=said["note"], by=by, now=timezone.now())).data)
