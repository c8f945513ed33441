from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import CreateModelMixin, ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from campaigns.api.fields import METHODS, ApplicationSlug, RowSerializer, application_for, flat_errors, refuse_changes
from campaigns.api.senders import check_zone
from campaigns.models import Lead
from campaigns.services import leads
from config.rest import (
    IdempotentMixin,
    JSONObject,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    idempotent,
)
from messaging.services.content import address_problem

BULK = 1000


class LeadSerializer(RowSerializer):
    application = ApplicationSlug()
    email = Text(required=False, allow_null=True, max_length=254)
    phone = Text(required=False, allow_null=True, max_length=16)
    company_domain = serializers.RegexField(
        r"^(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z0-9-]{2,63}\Z",
        required=False,
        allow_blank=True,
        max_length=253,
    )
    time_zone = Text(max_length=64, required=False, validators=[check_zone])
    locale = serializers.RegexField(
        r"^[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*\Z", required=False, allow_blank=True, max_length=20
    )
    attributes = JSONObject(required=False)

    class Meta:
        model = Lead
        fields = [
            "id", "application", "name", "email", "phone", "company_domain", "time_zone", "locale", "attributes",
            "created_at",
        ]  # fmt: skip
        read_only_fields = ["created_at"]

    def validate_email(self, value: str | None) -> str | None:
        return self.checked("email", value)

    def validate_phone(self, value: str | None) -> str | None:
        return self.checked("sms", value)

    def checked(self, channel: str, value: str | None) -> str | None:
        value = value.strip() if value else None
        if value and (problem := address_problem(channel, value)):
            raise serializers.ValidationError(problem)
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        addresses = [attrs.get(name, getattr(self.instance, name, None)) for name in ("email", "phone")]
        if not any(addresses):
            raise serializers.ValidationError(
                {"email": _("A lead has an e-mail address or a phone number.")}, "required"
            )
        return attrs


class NewLeadSerializer(LeadSerializer):
    application = Text(required=False, max_length=64, write_only=True)  # type: ignore[assignment]


class BulkLeadSerializer(LeadSerializer):
    """A lead of a bulk: the application stands beside the list."""

    class Meta(LeadSerializer.Meta):
        fields = [name for name in LeadSerializer.Meta.fields if name != "application"]

    application = None  # type: ignore[assignment]


class BulkLeadsSerializer(StrictSerializer):
    application = Text(required=False, max_length=64)
    leads = serializers.ListField(child=serializers.JSONField(allow_null=True), min_length=1, max_length=BULK)


class BulkLeadResult(serializers.Serializer[Any]):
    index = serializers.IntegerField()
    status = serializers.ChoiceField(choices=["created", "exists", "invalid"])
    id = serializers.UUIDField(required=False)
    errors = serializers.ListField(child=serializers.DictField(), required=False)  # type: ignore[assignment]


class BulkLeadResults(serializers.Serializer[Any]):
    results = BulkLeadResult(many=True)


class LeadFilters(filters.FilterSet):
    email = filters.CharFilter(lookup_expr="iexact")
    phone = filters.CharFilter()
    company_domain = filters.CharFilter(lookup_expr="iexact")
    sequence_id = filters.UUIDFilter(field_name="enrollments__sequence_id")

    class Meta:
        model = Lead
        fields: list[str] = []


class LeadViewSet(
    TenantQuerysetMixin,
    UUIDLookup,
    IdempotentMixin,
    CreateModelMixin,
    RetrieveModelMixin,
    ListModelMixin,
    GenericViewSet[Lead],
):
    queryset = Lead.objects.select_related("application")
    serializer_class = LeadSerializer
    filterset_class = LeadFilters
    http_method_names = METHODS
    ordering_fields = ["created_at"]

    @extend_schema(request=NewLeadSerializer, responses={201: LeadSerializer})
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        body = NewLeadSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        fields = dict(body.validated_data)
        application = application_for(request, fields.pop("application", None))
        row = leads.create_lead(application, fields, timezone.now())
        return Response(LeadSerializer(row).data, status=201)

    @extend_schema(request=LeadSerializer, responses=LeadSerializer)
    def partial_update(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        row = self.get_object()
        refuse_changes(request.data, "application")
        body = LeadSerializer(row, data=request.data, partial=True)
        body.is_valid(raise_exception=True)
        leads.change_lead(row.pk, body.validated_data, timezone.now())
        return Response(LeadSerializer(self.get_object()).data)

    @extend_schema(request=BulkLeadsSerializer, responses=BulkLeadResults)
    @action(detail=False, methods=["post"])
    @idempotent
    def bulk(self, request: Request) -> Response:
        body = BulkLeadsSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        application = application_for(request, body.validated_data.get("application"))
        results: dict[int, dict[str, Any]] = {}
        valid: dict[int, dict[str, Any]] = {}
        for index, entry in enumerate(body.validated_data["leads"]):
            item = BulkLeadSerializer(data=entry)
            if item.is_valid():
                valid[index] = dict(item.validated_data)
            else:
                results[index] = {"index": index, "status": "invalid", "errors": flat_errors(item.errors)}
        made = leads.create_leads(application, list(valid.values()), timezone.now())
        for index, (row, created) in zip(valid, made, strict=True):
            results[index] = {"index": index, "status": "created" if created else "exists", "id": row.pk}
        return Response({"results": [results[index] for index in sorted(results)]})
