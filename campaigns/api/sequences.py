from typing import Any
from uuid import UUID

from django.db.models import Prefetch
from django.utils import timezone
from django.utils.translation import gettext as _
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ModelViewSet

from campaigns.api.fields import (
    METHODS,
    ApplicationSlug,
    RowSerializer,
    application_for,
    behind_gate,
    integer,
    refuse_changes,
)
from campaigns.api.steps import StepSerializer
from campaigns.models import DisplayState, Lead, Sequence, SequenceSender, Step
from campaigns.services import enrolling, reconciling, sequences, statistics
from campaigns.services.completion import display_until
from config.errors import Invalid
from config.rest import (
    IdempotentMixin,
    Key,
    StrictSerializer,
    TenantQuerysetMixin,
    Text,
    UUIDLookup,
    idempotent,
    transition_responses,
)
from locks.api.gate import gate_headers, gated

MANY = 1000
# django-filter's own boolean takes what it cannot read for "not asked" and answers with everything.
YES_OR_NO = [(text, text) for text in ("true", "false", "True", "False")]


class CountersSerializer(serializers.Serializer[Any]):
    total = serializers.IntegerField()
    sent = serializers.IntegerField()
    failed = serializers.IntegerField()
    skipped = serializers.IntegerField()
    waiting = serializers.IntegerField()
    enrollments = serializers.IntegerField()


class SequenceSerializer(RowSerializer):
    application = ApplicationSlug()
    harvest_days = integer(required=False, min_value=1, max_value=90)
    stale_after_multiplier = integer(required=False, min_value=1, max_value=100)
    sender_ids = serializers.SerializerMethodField()
    steps = serializers.SerializerMethodField()
    counters = CountersSerializer(read_only=True)
    display_state = serializers.ChoiceField(choices=DisplayState.choices, read_only=True)
    display_until = serializers.SerializerMethodField()

    class Meta:
        model = Sequence
        fields = [
            "id", "application", "name", "kind", "status", "has_pending_work", "display_state", "display_until",
            "harvest_days", "stale_after_multiplier", "activated_at", "completed_at", "sender_ids", "steps",
            "counters", "created_at",
        ]  # fmt: skip
        read_only_fields = ["status", "has_pending_work", "activated_at", "completed_at", "created_at"]

    @extend_schema_field({"type": "array", "items": {"type": "string", "format": "uuid"}})
    def get_sender_ids(self, row: Sequence) -> list[str]:
        return [str(member.sender_id) for member in row.pool.all()]

    @extend_schema_field(StepSerializer(many=True))
    def get_steps(self, row: Sequence) -> Any:
        return StepSerializer([step for step in row.steps.all() if step.position is not None], many=True).data

    @extend_schema_field({"type": "string", "format": "date-time", "nullable": True})
    def get_display_until(self, row: Any) -> str | None:
        until = display_until(row, self.context["now"])
        return serializers.DateTimeField().to_representation(until) if until else None


class ChangeSequenceSerializer(RowSerializer):
    harvest_days = integer(required=False, min_value=1, max_value=90)
    stale_after_multiplier = integer(required=False, min_value=1, max_value=100)
    sender_ids = serializers.ListField(child=Key(), required=False, max_length=MANY)

    class Meta:
        model = Sequence
        fields = ["name", "kind", "harvest_days", "stale_after_multiplier", "sender_ids"]


class NewSequenceSerializer(ChangeSequenceSerializer):
    application = Text(required=False, max_length=64)
    steps = StepSerializer(many=True, required=False)

    class Meta(ChangeSequenceSerializer.Meta):
        fields = [*ChangeSequenceSerializer.Meta.fields, "application", "steps"]


class CloneSerializer(StrictSerializer):
    name = Text(required=False, max_length=200)


class EnrollSerializer(StrictSerializer):
    lead_ids = serializers.ListField(child=Key(), min_length=1, max_length=MANY)


class EnrolledSerializer(serializers.Serializer[Any]):
    lead_id = serializers.UUIDField()
    status = serializers.ChoiceField(choices=["enrolled", "already_enrolled", "not_found", "suppressed"])
    enrollment_id = serializers.UUIDField(allow_null=True)


class EnrolledResults(serializers.Serializer[Any]):
    results = EnrolledSerializer(many=True)


class TakenSerializer(serializers.Serializer[Any]):
    enrollment_id = serializers.UUIDField()
    lead_id = serializers.UUIDField()


class RefusedSerializer(TakenSerializer):
    reason = serializers.CharField()


class ReenrolledSerializer(serializers.Serializer[Any]):
    taken = TakenSerializer(many=True)
    refused = RefusedSerializer(many=True)


class VerdictSerializer(serializers.Serializer[Any]):
    verdict = serializers.ChoiceField(choices=["completed", "reopened", "hold", "unchanged"])
    guard = serializers.CharField(allow_null=True)
    until = serializers.DateTimeField(allow_null=True)
    evidence = serializers.DictField()
    changes = serializers.DictField(child=serializers.IntegerField())
    sequence = SequenceSerializer()


class StepStats(serializers.Serializer[Any]):
    step_id = serializers.UUIDField()
    position = serializers.IntegerField(allow_null=True)
    total = serializers.IntegerField()
    sent = serializers.IntegerField()
    failed = serializers.IntegerField()
    skipped = serializers.IntegerField()
    waiting = serializers.IntegerField()


class StatsSerializer(serializers.Serializer[Any]):
    counters = CountersSerializer()
    steps = StepStats(many=True)


class TestSendSerializer(StrictSerializer):
    lead_id = Key()
    step_id = Key(required=False)


class TestSentSerializer(serializers.Serializer[Any]):
    message_id = serializers.UUIDField()


class SequenceFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=Sequence.Status.choices)
    display_state = filters.ChoiceFilter(choices=DisplayState.choices)
    has_pending_work = filters.TypedChoiceFilter(choices=YES_OR_NO, coerce=lambda text: text.lower() == "true")
    sender_id = filters.UUIDFilter(field_name="pool__sender_id")
    lead_id = filters.UUIDFilter(field_name="enrollments__lead_id")

    class Meta:
        model = Sequence
        fields: list[str] = []


def shown(request: Request) -> sequences.Pass:
    return sequences.Pass(actor=request.user, **gate_headers(request))


class SequenceViewSet(TenantQuerysetMixin, UUIDLookup, IdempotentMixin, ModelViewSet[Sequence]):
    queryset = Sequence.objects.select_related("application")
    serializer_class = SequenceSerializer
    filterset_class = SequenceFilters
    http_method_names = METHODS
    ordering_fields = ["created_at", "name", "activated_at", "completed_at"]
    required_permissions = {
        "complete": "campaigns.complete_sequence",
        "reactivate": "campaigns.reactivate_sequence",
    }

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.now = timezone.now()
        super().initial(request, *args, **kwargs)

    def get_queryset(self) -> Any:
        rows: Any = super().get_queryset()
        if getattr(self, "swagger_fake_view", False):
            return rows
        pool = Prefetch("pool", SequenceSender.objects.order_by("position", "id"))
        return rows.with_display(self.now).prefetch_related(pool, Prefetch("steps", Step.objects.order_by("position")))

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "now": getattr(self, "now", None)}

    def row(self, pk: Any, status: int = 200) -> Response:
        return Response(self.get_serializer(self.get_queryset().get(pk=pk)).data, status=status)

    @extend_schema(request=NewSequenceSerializer, responses={201: SequenceSerializer})
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        body = NewSequenceSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        fields = dict(body.validated_data)
        application = application_for(request, fields.pop("application", None))
        pool, steps = fields.pop("sender_ids", []), fields.pop("steps", [])
        created = sequences.create_sequence(application, fields, sender_ids=pool, steps=steps)
        return Response(self.get_serializer(self.fresh(created.pk)).data, status=201)

    def fresh(self, pk: Any) -> Any:
        """The row as it is now; one made for an application of which the client sees nothing is still its own."""
        return self.get_queryset().get(pk=pk)

    def gated_object(self) -> Any:
        """As bare_object, of a verb that passes the gate whatever the status."""
        with behind_gate(UUID(self.kwargs["pk"]), shown(self.request), always=True):
            return self.bare_object()

    @gated(200, SequenceSerializer, request=ChangeSequenceSerializer)
    def partial_update(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        row = self.get_object()
        body = ChangeSequenceSerializer(row, data=request.data, partial=True)
        with behind_gate(row.pk, shown(request)):
            refuse_changes(request.data, "application", "steps")
            body.is_valid(raise_exception=True)
        changes = dict(body.validated_data)
        sequences.change_sequence(row.pk, changes, shown(request), sender_ids=changes.pop("sender_ids", None))
        return self.row(row.pk)

    @gated(204)
    def destroy(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        sequences.delete_sequence(self.get_object().pk, shown(request))
        return Response(status=204)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"])
    def generate(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.generate_sequence(self.bare_object().pk).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"], url_path="cancel-generating")
    def cancel_generating(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.cancel_generating(self.bare_object().pk).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"], url_path="mark-ready")
    def mark_ready(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.mark_sequence_ready(self.bare_object().pk).pk)

    @gated(200, SequenceSerializer, request=None)
    @action(detail=True, methods=["post"])
    def activate(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.activate_sequence(self.gated_object().pk, shown(request), self.now).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.pause_sequence(self.bare_object().pk).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.resume_sequence(self.bare_object().pk, self.now).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"])
    def complete(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.complete_sequence(self.bare_object().pk, self.now).pk)

    @extend_schema(request=None, responses=transition_responses(SequenceSerializer))
    @action(detail=True, methods=["post"])
    def archive(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.archive_sequence(self.bare_object().pk, self.now).pk)

    @gated(200, SequenceSerializer, request=None)
    @action(detail=True, methods=["post"])
    def reactivate(self, request: Request, **kwargs: Any) -> Response:
        return self.row(sequences.reactivate_sequence(self.gated_object().pk, shown(request), self.now).pk)

    @extend_schema(request=EnrollSerializer, responses=EnrolledResults)
    @action(detail=True, methods=["post"])
    @idempotent
    def enroll(self, request: Request, **kwargs: Any) -> Response:
        row = self.get_object()
        body = EnrollSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        results = enrolling.enroll_leads(row.pk, body.validated_data["lead_ids"], self.now)
        return Response({"results": EnrolledSerializer(results, many=True).data})

    @extend_schema(request=None, responses=ReenrolledSerializer)
    @action(detail=True, methods=["post"], url_path="reenroll-failed")
    @idempotent
    def reenroll_failed(self, request: Request, **kwargs: Any) -> Response:
        found = enrolling.reenroll_failed(self.bare_object().pk, self.now)
        return Response(ReenrolledSerializer(found).data)

    @extend_schema(request=None, responses=VerdictSerializer)
    @action(detail=True, methods=["post"])
    def reconcile(self, request: Request, **kwargs: Any) -> Response:
        found = reconciling.reconcile_sequence(self.bare_object().pk, self.now)
        said = found.verdict
        answer = {
            "verdict": said.verdict,
            "guard": said.guard,
            "until": said.until,
            "evidence": said.evidence,
            "changes": found.changes,
            "sequence": self.get_queryset().get(pk=found.sequence_id),
        }
        return Response(VerdictSerializer(answer, context=self.get_serializer_context()).data)

    @extend_schema(responses=StatsSerializer)
    @action(detail=True, methods=["get"])
    def stats(self, request: Request, **kwargs: Any) -> Response:
        return Response(StatsSerializer(statistics.sequence_stats(self.get_object())).data)

    @extend_schema(request=CloneSerializer, responses={201: SequenceSerializer})
    @action(detail=True, methods=["post"])
    @idempotent
    def clone(self, request: Request, **kwargs: Any) -> Response:
        row = self.get_object()
        body = CloneSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        copy = sequences.clone_sequence(row.pk, body.validated_data.get("name"))
        return Response(self.get_serializer(self.fresh(copy.pk)).data, status=201)

    @extend_schema(request=TestSendSerializer, responses={201: TestSentSerializer})
    @action(detail=True, methods=["post"], url_path="test-send")
    @idempotent
    def test_send(self, request: Request, **kwargs: Any) -> Response:
        row = self.get_object()
        body = TestSendSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        lead = Lead.objects.filter(pk=body.validated_data["lead_id"], application=row.application_id).first()
        if lead is None:
            raise Invalid(_("There is no such lead."), code="does_not_exist", attr="lead_id")
        outcome = sequences.send_test(row.pk, lead, body.validated_data.get("step_id"), self.now)
        return Response({"message_id": outcome.message_id}, status=201)
