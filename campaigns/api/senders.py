from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ModelViewSet

from campaigns.api.fields import METHODS, ApplicationSlug, RowSerializer, application_for, integer, refuse_changes
from campaigns.models import Sender
from campaigns.services import senders
from config.errors import Invalid
from config.rest import (
    IdempotentMixin,
    Key,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    transition_responses,
)
from config.rest.access import is_uuid
from messaging.services.subscriptions import time_zones


def check_zone(value: str) -> None:
    if value not in time_zones():
        raise serializers.ValidationError(_("Expected an IANA time zone such as Asia/Seoul."))


class SenderSerializer(RowSerializer):
    application = ApplicationSlug()
    daily_limit = integer(allow_null=True, required=False)
    hourly_limit = integer(allow_null=True, required=False)
    min_gap_seconds = integer(required=False, max_value=86400)
    gap_jitter_seconds = integer(required=False, max_value=86400)
    ramp_start = integer(allow_null=True, required=False)
    ramp_step = integer(allow_null=True, required=False)
    window_days = serializers.ListField(
        child=integer(min_value=1, max_value=7), min_length=1, max_length=7, required=False
    )
    address = Text(max_length=254)
    last_error = serializers.CharField(read_only=True)
    time_zone = Text(max_length=64, required=False, validators=[check_zone])

    class Meta:
        model = Sender
        fields = [
            "id", "application", "channel", "address", "display_name", "daily_limit", "hourly_limit",
            "min_gap_seconds", "gap_jitter_seconds", "window_days", "window_from", "window_to", "window_zone",
            "time_zone", "ramp_start", "ramp_step", "status", "last_error", "deleted_at", "created_at",
        ]  # fmt: skip
        read_only_fields = ["status", "deleted_at", "created_at"]

    def validate_window_days(self, value: list[int]) -> list[int]:
        return sorted(set(value))

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        opens, closes = (attrs.get(name, getattr(self.instance, name, None)) for name in ("window_from", "window_to"))
        if (opens is None) != (closes is None):
            missing = "window_from" if opens is None else "window_to"
            raise serializers.ValidationError({missing: _("A window has a beginning and an end.")})
        if opens is not None and opens == closes and {"window_from", "window_to"} & set(attrs):
            raise serializers.ValidationError({"window_to": _("The window cannot end when it begins.")})
        return attrs


class NewSenderSerializer(SenderSerializer):
    application = Text(required=False, max_length=64, write_only=True)  # type: ignore[assignment]


class SuccessorSerializer(StrictSerializer):
    reassign_to = Key(required=False, allow_null=True)


class AffectedSequence(serializers.Serializer[Any]):
    id = serializers.UUIDField()
    name = serializers.CharField()
    status = serializers.CharField()
    enrollments = serializers.IntegerField()


class Candidate(serializers.Serializer[Any]):
    id = serializers.UUIDField()
    address = serializers.CharField()
    display_name = serializers.CharField()


class ImpactSerializer(serializers.Serializer[Any]):
    enrollments = serializers.IntegerField()
    waiting_executions = serializers.IntegerField()
    sequences = AffectedSequence(many=True)
    sequences_count = serializers.IntegerField()
    candidates = Candidate(many=True)


class SenderFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=Sender.Status.choices)
    channel = filters.ChoiceFilter(choices=Sender._meta.get_field("channel").choices)
    sequence_id = filters.UUIDFilter(field_name="pools__sequence_id")

    class Meta:
        model = Sender
        fields: list[str] = []


class SenderViewSet(TenantQuerysetMixin, UUIDLookup, IdempotentMixin, ModelViewSet[Sender]):
    queryset = Sender.objects.select_related("application")
    serializer_class = SenderSerializer
    filterset_class = SenderFilters
    http_method_names = METHODS
    ordering_fields = ["created_at"]

    @property
    def extra_query_params(self) -> list[str]:
        return ["reassign_to"] if self.action == "destroy" else []

    @extend_schema(request=NewSenderSerializer, responses={201: SenderSerializer})
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        body = NewSenderSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        fields = dict(body.validated_data)
        application = application_for(request, fields.pop("application", None))
        row = senders.create_sender(application, fields)
        return Response(self.get_serializer(row).data, status=201)

    def partial_update(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        row = self.get_object()
        refuse_changes(request.data, "channel", "application")
        body = self.get_serializer(row, data=request.data, partial=True)
        body.is_valid(raise_exception=True)
        senders.change_sender(row.pk, body.validated_data)
        return self.shown()

    @extend_schema(
        parameters=[OpenApiParameter("reassign_to", {"type": "string", "format": "uuid"})], responses={204: None}
    )
    def destroy(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        row = self.get_object()
        senders.delete_sender(row.pk, reassign_to=successor(request))
        return Response(status=204)

    @extend_schema(request=None, responses=transition_responses(SenderSerializer))
    @action(detail=True, methods=["post"])
    def activate(self, request: Request, **kwargs: Any) -> Response:
        senders.activate_sender(self.bare_object().pk, timezone.now())
        return self.shown()

    @extend_schema(request=SuccessorSerializer, responses=transition_responses(SenderSerializer))
    @action(detail=True, methods=["post"])
    def suspend(self, request: Request, **kwargs: Any) -> Response:
        senders.suspend_sender(self.get_object().pk, reassign_to=self.named_successor(request))
        return self.shown()

    @extend_schema(request=SuccessorSerializer, responses=transition_responses(SenderSerializer))
    @action(detail=True, methods=["post"])
    def deactivate(self, request: Request, **kwargs: Any) -> Response:
        senders.deactivate_sender(self.get_object().pk, reassign_to=self.named_successor(request))
        return self.shown()

    @extend_schema(responses=ImpactSerializer)
    @action(detail=True, methods=["get"])
    def impact(self, request: Request, **kwargs: Any) -> Response:
        return Response(ImpactSerializer(senders.impact(self.get_object())).data)

    def shown(self) -> Response:
        return Response(SenderSerializer(self.get_object()).data)

    def named_successor(self, request: Request) -> Any:
        body = SuccessorSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        return body.validated_data.get("reassign_to")


def successor(request: Request) -> Any:
    named = request.query_params.get("reassign_to")
    if named is not None and not is_uuid(named):
        raise Invalid(_("Must be a valid UUID."), attr="reassign_to")
    return named
