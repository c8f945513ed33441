from typing import Any

from django.http import Http404
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ModelViewSet

from campaigns.api.fields import METHODS, RowSerializer, behind_gate, integer
from campaigns.models import Sequence, Step
from campaigns.services import sequences
from config.rest import IdempotentMixin, TenantQuerysetMixin, Text, UUIDLookup
from config.rest.access import is_uuid
from locks.api.gate import gate_headers, gated

BODY = 100_000
LONGEST_DELAY = 366 * 86400


class StepSerializer(RowSerializer):
    position = integer(required=False, min_value=1, max_value=1000)
    delay_seconds = integer(required=False, max_value=LONGEST_DELAY)
    body = Text(required=False, allow_blank=True, max_length=BODY, trim_whitespace=False)

    class Meta:
        model = Step
        fields = ["id", "position", "channel", "delay_seconds", "subject", "body", "stale_policy"]


class StepViewSet(TenantQuerysetMixin, UUIDLookup, IdempotentMixin, ModelViewSet[Step]):
    queryset = Step.objects.filter(position__isnull=False)
    serializer_class = StepSerializer
    http_method_names = METHODS
    tenant_path = "sequence__application"
    ordering = "position"
    ordering_fields = ["position"]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if not is_uuid(self.kwargs["sequence_id"]) or not self.parents().exists():
            raise Http404

    def parents(self) -> Any:
        rows = Sequence.objects.filter(pk=self.kwargs["sequence_id"])
        user: Any = self.request.user
        return rows if user.has_perm("config.see_all_tenants") else rows.filter(application__members=user)

    def get_queryset(self) -> Any:
        rows: Any = super().get_queryset()
        return rows if getattr(self, "swagger_fake_view", False) else rows.filter(sequence=self.kwargs["sequence_id"])

    def shown(self) -> sequences.Pass:
        return sequences.Pass(actor=self.request.user, **gate_headers(self.request))

    @gated(201, StepSerializer, request=StepSerializer)
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        body = self.get_serializer(data=request.data)
        with behind_gate(self.kwargs["sequence_id"], self.shown()):
            body.is_valid(raise_exception=True)
        step = sequences.add_step(self.kwargs["sequence_id"], body.validated_data, self.shown())
        return Response(self.get_serializer(step).data, status=201)

    @gated(200, StepSerializer, request=StepSerializer)
    def partial_update(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        step = self.get_object()
        body = self.get_serializer(step, data=request.data, partial=True)
        with behind_gate(step.sequence_id, self.shown()):
            body.is_valid(raise_exception=True)
        sequences.change_step(self.kwargs["sequence_id"], step.pk, body.validated_data, self.shown())
        return Response(self.get_serializer(self.get_object()).data)

    @gated(204)
    def destroy(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        step = self.get_object()
        sequences.remove_step(self.kwargs["sequence_id"], step.pk, self.shown(), timezone.now())
        return Response(status=204)
