from typing import Any

from django.db import transaction
from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
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
)
from locks.api.gate import gate_headers, gated
from messaging.api.messages import validated
from messaging.api.tenancy import chosen_application
from messaging.models import Channel, MessageTemplate, MessageTemplateVersion
from messaging.services import Hold, change_template, create_template, delete_template, pass_gate, render

MOST_CHARACTERS = 500_000


class TemplateSerializer(StrictModelSerializer):
    application: Any = serializers.SlugRelatedField("slug", read_only=True)
    data_template = JSONObject(read_only=True)

    class Meta:
        model = MessageTemplate
        fields = [
            "id", "application", "name", "channel", "title_template", "body_template", "data_template", "provider_code",
            "approval", "active", "version", "created_at", "updated_at",
        ]  # fmt: skip


class TemplateChangeSerializer(StrictSerializer):
    name = Text(max_length=100, required=False)
    title_template = Text(required=False, allow_blank=True, max_length=1000, trim_whitespace=False)
    body_template = Text(required=False, allow_blank=True, max_length=MOST_CHARACTERS, trim_whitespace=False)
    data_template = JSONObject(required=False)
    provider_code = Text(required=False, allow_blank=True, max_length=20)
    approval = serializers.ChoiceField(choices=MessageTemplate.Approval.choices, required=False)
    active = Flag(required=False)
    channel = serializers.ChoiceField(choices=Channel.choices, required=False)


class TemplateCreateSerializer(TemplateChangeSerializer):
    application = Text(required=False, max_length=64)
    name = Text(max_length=100)
    channel = serializers.ChoiceField(choices=Channel.choices)


class VersionSerializer(StrictModelSerializer):
    data_template = JSONObject(read_only=True)

    class Meta:
        model = MessageTemplateVersion
        fields = [
            "version", "name", "title_template", "body_template", "data_template", "provider_code", "created_at",
        ]  # fmt: skip


class VariablesSerializer(StrictSerializer):
    variables = JSONObject(required=False, default=dict)


class RenderedSerializer(serializers.Serializer[Any]):
    title = Text()
    body = Text()
    data = JSONObject()  # type: ignore[assignment]


class TemplateFilters(filters.FilterSet):
    class Meta:
        model = MessageTemplate
        fields = ["name", "channel", "active", "approval"]


class TemplateViewSet(
    IdempotentMixin,
    TenantQuerysetMixin,
    UUIDLookup,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    GenericViewSet,
):
    queryset = MessageTemplate.objects.existing().select_related("application")
    serializer_class = TemplateSerializer
    filterset_class = TemplateFilters
    ordering_fields = ["created_at", "name"]
    required_permissions = {"render_test": "messaging.view_messagetemplate"}

    @extend_schema(request=TemplateCreateSerializer, responses={201: TemplateSerializer})
    def create(self, request: Request) -> Response:
        wanted = validated(TemplateCreateSerializer, request.data)
        application = chosen_application(request.user, wanted.pop("application", None))
        row = create_template(application, wanted, now=timezone.now())
        return Response(TemplateSerializer(row).data, status=status.HTTP_201_CREATED)

    @gated(200, TemplateSerializer, request=TemplateChangeSerializer)
    @transaction.atomic
    def partial_update(self, request: Request, pk: str) -> Response:
        """The gate is asked before the body is looked at: who may not write need not know what is wrong with it."""
        row, hold = self.get_object(), hold_of(request)
        pass_gate(row.pk, hold)
        changes = validated(TemplateChangeSerializer, request.data)
        return Response(TemplateSerializer(change_template(row.pk, changes, hold=hold)).data)

    @gated(204)
    def destroy(self, request: Request, pk: str) -> Response:
        delete_template(self.get_object().pk, hold=hold_of(request), now=timezone.now())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(responses=VersionSerializer(many=True), filters=False)
    @action(detail=True, methods=["get"], filterset_class=None)
    def versions(self, request: Request, pk: str) -> Response:
        page = self.paginate_queryset(self.get_object().versions.all())
        return self.get_paginated_response(VersionSerializer(page, many=True).data)

    @extend_schema(request=VariablesSerializer, responses=RenderedSerializer)
    @action(detail=True, methods=["post"], url_path="render-test")
    def render_test(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        return Response(RenderedSerializer(render(row, validated(VariablesSerializer, request.data)["variables"])).data)


def hold_of(request: Request) -> Hold:
    return Hold(request.user, **gate_headers(request))
