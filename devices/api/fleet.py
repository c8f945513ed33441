"""/pcs/ and /devices/."""

import re
from typing import Any

from django.core.validators import RegexValidator
from django.http import Http404
from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet, ReadOnlyModelViewSet

from config.errors import Conflict
from config.rest import (
    JSONObject,
    StrictModelSerializer,
    StrictSerializer,
    Text,
    UUIDLookup,
    Whole,
    idempotent,
    transition_responses,
)
from config.rest.schema import IDEMPOTENCY_KEY
from devices import services
from devices.api.fields import ACT_AS_AGENT, Labels, OwnRows
from devices.models import MAX_SLOTS, PC, PC_NUMBER, Device, DeviceHistory

DEVICES_PER_HEARTBEAT = 200


class PCSerializer(StrictModelSerializer):
    pc_id = serializers.UUIDField(source="id", read_only=True)
    stale = serializers.SerializerMethodField()
    last_heartbeat = serializers.DateTimeField(source="last_heartbeat_at", read_only=True, allow_null=True)
    device_count = serializers.IntegerField(source="summary.device_count", read_only=True)
    eligible_device_count = serializers.IntegerField(source="summary.eligible_device_count", read_only=True)
    running_count = serializers.IntegerField(source="summary.running_count", read_only=True)
    target = serializers.IntegerField(source="summary.target", read_only=True)
    free_slots = serializers.IntegerField(source="summary.free_slots", read_only=True)
    error_count = serializers.IntegerField(source="summary.error_count", read_only=True)
    offline_count = serializers.IntegerField(source="summary.offline_count", read_only=True)

    class Meta:
        model = PC
        fields = [
            "id", "pc_id", "pc_number", "max_slots", "status", "stale", "last_heartbeat", "last_heartbeat_at",
            "device_count", "eligible_device_count", "running_count", "target", "free_slots", "error_count",
            "offline_count", "agent_version", "system", "created_at",
        ]  # fmt: skip
        read_only_fields = fields

    def get_stale(self, pc: PC) -> bool:
        return pc.is_stale(timezone.now())


class NewPCSerializer(StrictSerializer):
    pc_number = serializers.RegexField(PC_NUMBER, trim_whitespace=False)
    max_slots = Whole(min_value=1, max_value=MAX_SLOTS, default=MAX_SLOTS)


class PCSlotsSerializer(StrictSerializer):
    max_slots = Whole(min_value=1, max_value=MAX_SLOTS)


class DeviceReportSerializer(StrictSerializer):
    serial = Text(max_length=100)
    connection_id = Text(max_length=200, required=False, allow_null=True, allow_blank=True)
    status = serializers.ChoiceField(choices=["online", "busy", "offline"], default="online")
    battery = Whole(min_value=0, max_value=100, required=False, allow_null=True)
    model = Text(max_length=200, required=False, allow_blank=True, allow_null=True)
    labels = Labels(required=False)

    def to_internal_value(self, data: Any) -> Any:
        told = dict(super().to_internal_value(data))
        if "model" in told:
            told["model"] = told["model"] or ""
        return services.DeviceReport(told.pop("serial"), told.pop("status") == "offline", told)


class PCHeartbeatSerializer(StrictSerializer):
    agent_version = Text(max_length=100, required=False, allow_blank=True, allow_null=True)
    system = JSONObject(required=False, allow_null=True)
    # Not many=True: its allow_null would also be each item's.
    devices = serializers.ListField(
        child=DeviceReportSerializer(), required=False, allow_null=True, max_length=DEVICES_PER_HEARTBEAT
    )

    def validate_devices(self, reports: Any) -> Any:
        serials = [report.serial for report in reports or ()]
        if twice := sorted({serial for serial in serials if serials.count(serial) > 1}):
            raise serializers.ValidationError(f"Listed twice: {', '.join(twice)}", code="duplicate")
        return reports


class RunClaimSerializer(StrictSerializer):
    max_to_claim = Whole(min_value=1, default=1)


class GrantedDeviceSerializer(StrictModelSerializer):
    class Meta:
        model = Device
        fields = ["id", "serial", "connection_id"]


class RunGrantSerializer(serializers.Serializer[Any]):
    id = serializers.UUIDField()
    task_id = serializers.UUIDField(source="task.pk")
    payload = serializers.JSONField(source="task.payload")
    device = GrantedDeviceSerializer()
    attempt = serializers.IntegerField()
    lease_expires_at = serializers.DateTimeField()
    deadline_at = serializers.DateTimeField()


class RunTokenGrantSerializer(RunGrantSerializer):
    token = serializers.CharField()


class RunsClaimedSerializer(serializers.Serializer[Any]):
    task_devices = RunTokenGrantSerializer(many=True)


class PCFilters(filters.FilterSet):
    status = filters.ChoiceFilter(choices=PC.Status.choices)

    class Meta:
        model = PC
        fields = ["status"]


class PCViewSet(OwnRows, ReadOnlyModelViewSet):
    queryset = PC.objects.select_related("summary")
    serializer_class = PCSerializer
    filterset_class = PCFilters
    ordering_fields = ["pc_number", "last_heartbeat_at"]
    lookup_field = "pc_number"
    lookup_value_regex = "[^/]+"
    required_permissions = {"heartbeat": ACT_AS_AGENT, "claim": ACT_AS_AGENT}

    def get_object(self) -> PC:
        """Agents' verbs are for the PC's own agent alone, whatever else the client may read."""
        number = self.kwargs["pc_number"]
        rows = PC.objects.filter(self.own()) if self.action in self.required_permissions else self.get_queryset()
        pc = rows.filter(pc_number=number).first() if re.match(PC_NUMBER, number) else None
        if pc is None:
            raise Http404
        return pc

    @extend_schema(request=NewPCSerializer, responses={200: PCSerializer})
    @idempotent
    def create(self, request: Request) -> Response:
        body = NewPCSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        pc = services.create_pc(**body.validated_data)
        return Response(PCSerializer(self.queryset.get(pk=pc.pk)).data)

    @extend_schema(request=PCSlotsSerializer, responses=PCSerializer)
    def partial_update(self, request: Request, pc_number: str) -> Response:
        pc = self.get_object()
        body = PCSlotsSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        services.set_max_slots(pc, body.validated_data["max_slots"])
        return Response(PCSerializer(self.queryset.get(pk=pc.pk)).data)

    @extend_schema(request=PCHeartbeatSerializer, responses=transition_responses(PCSerializer))
    @action(detail=True, methods=["post"])
    def heartbeat(self, request: Request, pc_number: str) -> Response:
        pc = self.get_object()
        body = PCHeartbeatSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        services.record_heartbeat(pc, timezone.now(), **body.validated_data)
        return Response(PCSerializer(self.queryset.get(pk=pc.pk)).data)

    @extend_schema(request=RunClaimSerializer, responses=RunsClaimedSerializer, parameters=[IDEMPOTENCY_KEY])
    @action(detail=True, methods=["post"])
    def claim(self, request: Request, pc_number: str) -> Response:
        """The tokens are added to the answer here, outside of what the idempotency key remembers."""
        answer = self._claim(request)
        for grant in answer.data["task_devices"]:
            grant["token"] = services.claim_token(grant["id"], grant["attempt"])
        return answer

    @idempotent
    def _claim(self, request: Request) -> Response:
        pc = self.get_object()
        body = RunClaimSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        grants = services.claim_task_devices(pc, body.validated_data["max_to_claim"], timezone.now())
        return Response({"task_devices": RunGrantSerializer(grants, many=True).data})


class DeviceHistorySerializer(StrictModelSerializer):
    action = serializers.CharField(source="act", read_only=True)
    who = serializers.CharField(source="actor", read_only=True)
    when = serializers.DateTimeField(source="created_at", read_only=True)
    why = serializers.CharField(source="reason", read_only=True)

    class Meta:
        model = DeviceHistory
        fields = ["action", "who", "when", "why", "before", "after"]


class DeviceSerializer(StrictModelSerializer):
    pc_id = serializers.UUIDField(read_only=True)
    pc_number = serializers.CharField(source="pc.pc_number", read_only=True)
    labels = serializers.SerializerMethodField()
    history = DeviceHistorySerializer(many=True, read_only=True)

    class Meta:
        model = Device
        fields = [
            "id", "serial", "connection_id", "pc_id", "pc_number", "model", "battery", "labels", "status",
            "error_reason", "errored_at", "total_errors", "created_at", "history",
        ]  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(OpenApiTypes.OBJECT)
    def get_labels(self, device: Device) -> dict[str, str]:
        return device.labels


class DeviceReasonSerializer(StrictSerializer):
    reason = Text(max_length=500, allow_blank=True, default="")


class DeviceFilters(filters.FilterSet):
    serial = filters.CharFilter()
    pc_number = filters.CharFilter(field_name="pc__pc_number", validators=[RegexValidator(PC_NUMBER)])
    status = filters.ChoiceFilter(choices=Device.Status.choices)

    class Meta:
        model = Device
        fields = ["serial", "pc_number", "status"]


class DeviceViewSet(OwnRows, UUIDLookup, mixins.RetrieveModelMixin, mixins.ListModelMixin, GenericViewSet[Device]):
    queryset = Device.objects.select_related("pc").prefetch_related("history")
    serializer_class = DeviceSerializer
    filterset_class = DeviceFilters
    ordering_fields = ["serial", "created_at"]
    agent_path = "pc__agent"

    @extend_schema(request=DeviceReasonSerializer, responses=transition_responses(DeviceSerializer))
    @action(detail=True, methods=["post"])
    def recover(self, request: Request, pk: str) -> Response:
        return self._act(request, services.recover_devices, "Only a device in error or quarantine can be recovered.")

    @extend_schema(request=DeviceReasonSerializer, responses=transition_responses(DeviceSerializer))
    @action(detail=True, methods=["post"])
    def quarantine(self, request: Request, pk: str) -> Response:
        return self._act(request, services.quarantine_devices, "The device is in quarantine already.")

    def _act(self, request: Request, verb: Any, refusal: str) -> Response:
        device = self.get_object()
        body = DeviceReasonSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        if not verb([device.pk], request.user, body.validated_data["reason"], timezone.now()):
            raise Conflict(refusal, code="illegal_transition")
        return Response(DeviceSerializer(self.queryset.get(pk=device.pk)).data)
