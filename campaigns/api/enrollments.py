from typing import Any

from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import CreateModelMixin, ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet, ReadOnlyModelViewSet

from campaigns.models import Enrollment, Execution, Reply
from campaigns.services import enrollments, replies
from campaigns.services.explaining import explain
from config.rest import (
    IdempotentMixin,
    JSONObject,
    Key,
    Moment,
    StrictModelSerializer,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    transition_responses,
)

TEXT = 100_000


class EnrollmentSerializer(StrictModelSerializer):
    sequence_id = serializers.UUIDField(read_only=True)
    lead_id = serializers.UUIDField(read_only=True)
    sender_id = serializers.UUIDField(read_only=True, allow_null=True)
    current_step_id = serializers.UUIDField(read_only=True, allow_null=True)

    class Meta:
        model = Enrollment
        fields = [
            "id", "sequence_id", "lead_id", "status", "sender_id", "senders", "current_step_id", "round", "resume_at",
            "paused_at", "pause_reason", "ended_at", "created_at",
        ]  # fmt: skip
        read_only_fields = fields


class PauseSerializer(StrictSerializer):
    resume_at = Moment(required=False, allow_null=True)
    reason = Text(required=False, max_length=200)


class GateSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    ok = serializers.BooleanField()
    value = serializers.JSONField(allow_null=True)
    detail = serializers.CharField()


class ExplanationSerializer(serializers.Serializer[Any]):
    execution_id = serializers.UUIDField(allow_null=True)
    gates = GateSerializer(many=True)
    decides = serializers.CharField(allow_null=True)
    eta = serializers.DateTimeField(allow_null=True)


class EnrollmentFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=Enrollment.Status.choices)
    sequence_id = filters.UUIDFilter()
    lead_id = filters.UUIDFilter()
    sender_id = filters.UUIDFilter()

    class Meta:
        model = Enrollment
        fields: list[str] = []


class EnrollmentViewSet(TenantQuerysetMixin, UUIDLookup, ReadOnlyModelViewSet[Enrollment]):
    queryset = Enrollment.objects.all()
    serializer_class = EnrollmentSerializer
    filterset_class = EnrollmentFilters
    tenant_path = "sequence__application"
    ordering_fields = ["created_at"]

    def shown(self) -> Response:
        return Response(EnrollmentSerializer(self.get_object()).data)

    @extend_schema(request=PauseSerializer, responses=transition_responses(EnrollmentSerializer))
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, **kwargs: Any) -> Response:
        row = self.get_object()
        body = PauseSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        resume_at, reason = body.validated_data.get("resume_at"), body.validated_data.get("reason", "")
        enrollments.pause_enrollment(row.pk, timezone.now(), resume_at=resume_at, reason=reason)
        return self.shown()

    @extend_schema(request=None, responses=transition_responses(EnrollmentSerializer))
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, **kwargs: Any) -> Response:
        enrollments.resume_enrollment(self.bare_object().pk, timezone.now())
        return self.shown()

    @extend_schema(request=None, responses=transition_responses(EnrollmentSerializer))
    @action(detail=True, methods=["post"])
    def stop(self, request: Request, **kwargs: Any) -> Response:
        enrollments.stop_enrollment(self.bare_object().pk, timezone.now())
        return self.shown()

    @extend_schema(responses=ExplanationSerializer)
    @action(detail=True, methods=["get"])
    def explain(self, request: Request, **kwargs: Any) -> Response:
        row = self.get_queryset().select_related("sequence", "lead", "sender").filter(pk=self.get_object().pk).get()
        return Response(ExplanationSerializer(explain(row, timezone.now())).data)


class ExecutionSerializer(StrictModelSerializer):
    enrollment_id = serializers.UUIDField(read_only=True)
    sequence_id = serializers.UUIDField(source="enrollment.sequence_id", read_only=True)
    lead_id = serializers.UUIDField(source="enrollment.lead_id", read_only=True)
    step_id = serializers.UUIDField(read_only=True)
    message_id = serializers.UUIDField(read_only=True, allow_null=True)
    sender_id = serializers.UUIDField(read_only=True, allow_null=True)
    effective_due_at = serializers.DateTimeField(read_only=True)

    class Meta:
        model = Execution
        fields = [
            "id", "enrollment_id", "sequence_id", "lead_id", "step_id", "round", "status", "scheduled_at",
            "deferred_until", "effective_due_at", "processing_started_at", "executed_at", "skip_reason", "failure",
            "message_id", "sender_id", "created_at",
        ]  # fmt: skip
        read_only_fields = fields


class ExecutionFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=Execution.Status.choices)
    skip_reason = filters.ChoiceFilter(choices=Execution._meta.get_field("skip_reason").choices)
    enrollment_id = filters.UUIDFilter()
    sequence_id = filters.UUIDFilter(field_name="enrollment__sequence_id")
    lead_id = filters.UUIDFilter(field_name="enrollment__lead_id")
    sender_id = filters.UUIDFilter(field_name="enrollment__sender_id")

    class Meta:
        model = Execution
        fields: list[str] = []


class ExecutionViewSet(TenantQuerysetMixin, UUIDLookup, ReadOnlyModelViewSet[Execution]):
    queryset = Execution.objects.select_related("enrollment")
    serializer_class = ExecutionSerializer
    filterset_class = ExecutionFilters
    tenant_path = "enrollment__sequence__application"
    ordering_fields = ["scheduled_at", "created_at"]


class ReplySerializer(StrictModelSerializer):
    enrollment_id = serializers.UUIDField(read_only=True)

    class Meta:
        model = Reply
        fields = [
            "id", "enrollment_id", "received_at", "kind", "subject", "text", "evidence", "ooo_until", "external_id",
            "created_at",
        ]  # fmt: skip
        read_only_fields = fields


@extend_schema_field({"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
class References(serializers.Field[Any, Any, Any, Any]):
    """The header as it came, or its ids as a list."""

    def to_internal_value(self, data: Any) -> str:
        parts = data if isinstance(data, list) else [data]
        if len(parts) > 1000 or not all(isinstance(part, str) and len(part) <= TEXT for part in parts):
            raise serializers.ValidationError("Expected text or a list of texts.")
        return " ".join(parts)

    def to_representation(self, value: Any) -> Any:
        return value


class OurMessage(Key):
    """The id of the message, or the Message-ID it went out with."""

    def to_internal_value(self, data: Any) -> Any:
        text = data.strip() if isinstance(data, str) else data
        if isinstance(text, str) and "@" in text:
            text = text.removeprefix("<").partition("@")[0]
        return super().to_internal_value(text)


class IncomingSerializer(StrictSerializer):
    enrollment_id = Key(required=False)
    message_id = OurMessage(required=False)
    in_reply_to = Text(required=False, max_length=2000)
    references = References(required=False)
    kind = serializers.ChoiceField(choices=Reply.Kind.choices, required=False)
    text = Text(allow_blank=True, max_length=TEXT, trim_whitespace=False, required=False, default="")
    subject = Text(required=False, allow_blank=True, max_length=998)
    headers = JSONObject(required=False)
    received_at = Moment(required=False)
    ooo_until = Moment(required=False)
    external_id = Text(required=False, max_length=255)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not any(attrs.get(name) for name in ("enrollment_id", "message_id", "in_reply_to", "references")):
            message = "Name the enrollment, our message, or what is replied to."
            raise serializers.ValidationError({"enrollment_id": message}, "required")
        return attrs


class ReplyFilters(filters.FilterSet):
    kind = filters.ChoiceFilter(choices=Reply.Kind.choices)
    enrollment_id = filters.UUIDFilter()
    sequence_id = filters.UUIDFilter(field_name="enrollment__sequence_id")
    lead_id = filters.UUIDFilter(field_name="enrollment__lead_id")
    sender_id = filters.UUIDFilter(field_name="enrollment__sender_id")

    class Meta:
        model = Reply
        fields: list[str] = []


class ReplyViewSet(
    TenantQuerysetMixin,
    UUIDLookup,
    IdempotentMixin,
    CreateModelMixin,
    ListModelMixin,
    RetrieveModelMixin,
    GenericViewSet[Reply],
):
    queryset = Reply.objects.all()
    serializer_class = ReplySerializer
    filterset_class = ReplyFilters
    tenant_path = "enrollment__sequence__application"
    ordering_fields = ["received_at", "created_at"]

    @extend_schema(request=IncomingSerializer, responses={201: ReplySerializer, 200: ReplySerializer})
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        body = IncomingSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        visible: Any = Enrollment.objects.all()
        if not request.user.has_perm("config.see_all_tenants"):
            visible = visible.filter(sequence__application__members=request.user.pk)
        reply, created = replies.record_reply(replies.Incoming(**body.validated_data), visible, timezone.now())
        return Response(ReplySerializer(reply).data, status=201 if created else 200)
