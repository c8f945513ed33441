"""/tasks/ and /task-devices/."""

from collections.abc import Callable
from uuid import UUID

from django.db.models import Prefetch
from django.http import Http404
from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet, ReadOnlyModelViewSet

from config.rest import (
    BoundedJSON,
    Flag,
    IdempotentMixin,
    StrictModelSerializer,
    StrictSerializer,
    Text,
    UUIDLookup,
    Whole,
    idempotent,
    transition_responses,
)
from devices import services
from devices.api.fields import ACT_AS_AGENT, Labels, OwnRows, StatusFilter
from devices.models import MOST_DEVICES, Attempt, Event, Task, TaskDevice


class TaskSerializer(StrictModelSerializer):
    retry_of = serializers.UUIDField(source="retry_of_id", read_only=True, allow_null=True)
    payload = serializers.JSONField(read_only=True)
    selector = serializers.DictField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Task
        fields = [
            "id", "name", "payload", "device_count", "selector", "status", "error", "retry_of", "created_at",
            "started_at", "completed_at", "devices_done", "devices_failed",
        ]  # fmt: skip
        read_only_fields = fields


class NewTaskSerializer(StrictSerializer):
    name = Text(max_length=200)
    device_count = Whole(min_value=1, max_value=MOST_DEVICES)
    payload = BoundedJSON(default=dict, allow_null=True)
    selector = Labels(default=dict)


class NoFieldsSerializer(StrictSerializer):
    pass


class TaskFilters(filters.FilterSet):
    status = StatusFilter(Task.Status)

    class Meta:
        model = Task
        fields = ["status"]


class TaskViewSet(IdempotentMixin, UUIDLookup, ReadOnlyModelViewSet):
    queryset = Task.objects.all()
    serializer_class = TaskSerializer
    filterset_class = TaskFilters
    ordering_fields = ["created_at"]

    @extend_schema(request=NewTaskSerializer, responses={201: TaskSerializer})
    def create(self, request: Request) -> Response:
        body = NewTaskSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        task = services.create_task(now=timezone.now(), **body.validated_data)
        return Response(TaskSerializer(task).data, status=201)

    @extend_schema(request=NoFieldsSerializer, responses=transition_responses(TaskSerializer))
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str) -> Response:
        return Response(TaskSerializer(services.cancel_task(self._asked(request), timezone.now())).data)

    @extend_schema(
        request=NoFieldsSerializer, responses={201: TaskSerializer, 409: transition_responses(TaskSerializer)[409]}
    )
    @action(detail=True, methods=["post"])
    @idempotent
    def retry(self, request: Request, pk: str) -> Response:
        return Response(TaskSerializer(services.retry_task(self._asked(request), timezone.now())).data, status=201)

    def _asked(self, request: Request) -> Task:
        task: Task = self.get_object()
        NoFieldsSerializer(data=request.data).is_valid(raise_exception=True)
        return task


class RunAttemptSerializer(StrictModelSerializer):
    task_device_id = serializers.UUIDField(read_only=True)

    class Meta:
        model = Attempt
        fields = ["task_device_id", "attempt_no", "claimed_by", "started_at", "ended_at", "outcome", "error"]


class RunEventSerializer(StrictModelSerializer):
    task_device_id = serializers.UUIDField(read_only=True)

    class Meta:
        model = Event
        fields = ["task_device_id", "event", "attempt_no", "created_at"]


class TaskDeviceSerializer(StrictModelSerializer):
    task_id = serializers.UUIDField(read_only=True)
    device_id = serializers.UUIDField(read_only=True)
    serial = serializers.CharField(source="device.serial", read_only=True)
    claimed_by = serializers.CharField(source="claimed_by.pc_number", default=None, read_only=True)
    result = serializers.JSONField(read_only=True)
    attempts = RunAttemptSerializer(many=True, read_only=True)
    events = RunEventSerializer(many=True, read_only=True)

    class Meta:
        model = TaskDevice
        fields = [
            "id", "task_id", "device_id", "serial", "status", "attempt", "max_attempts", "claimed_by",
            "lease_expires_at", "started_at", "deadline_at", "completed_at", "result", "error", "timed_out",
            "failure_kind", "final", "created_at", "attempts", "events",
        ]  # fmt: skip
        read_only_fields = fields


class RunTokenSerializer(StrictSerializer):
    token = Text(max_length=200)


class RunResultSerializer(RunTokenSerializer):
    result = BoundedJSON(default=None, allow_null=True)


class RunFailureSerializer(RunTokenSerializer):
    error = Text(max_length=10_000, allow_blank=True, trim_whitespace=False, default="")
    retryable = Flag(default=True)


class TaskDeviceFilters(filters.FilterSet):
    task_id = filters.UUIDFilter(field_name="task_id")
    status = StatusFilter(TaskDevice.Status, "retrying")

    class Meta:
        model = TaskDevice
        fields = ["task_id", "status"]


class TaskDeviceViewSet(
    OwnRows, UUIDLookup, mixins.RetrieveModelMixin, mixins.ListModelMixin, GenericViewSet[TaskDevice]
):
    queryset = TaskDevice.objects.select_related("device", "claimed_by").prefetch_related(
        Prefetch("attempts", Attempt.objects.order_by("id")), Prefetch("events", Event.objects.order_by("id"))
    )
    serializer_class = TaskDeviceSerializer
    filterset_class = TaskDeviceFilters
    ordering_fields = ["created_at"]
    agent_path = "device__pc__agent"
    required_permissions = dict.fromkeys(["ack", "renew", "complete", "fail"], ACT_AS_AGENT)

    @extend_schema(request=RunTokenSerializer, responses=transition_responses(TaskDeviceSerializer))
    @action(detail=True, methods=["post"])
    def ack(self, request: Request, pk: str) -> Response:
        return self._act(request, RunTokenSerializer, services.ack_task_device)

    @extend_schema(request=RunTokenSerializer, responses=transition_responses(TaskDeviceSerializer))
    @action(detail=True, methods=["post"])
    def renew(self, request: Request, pk: str) -> Response:
        return self._act(request, RunTokenSerializer, services.renew_lease)

    @extend_schema(request=RunResultSerializer, responses=transition_responses(TaskDeviceSerializer))
    @action(detail=True, methods=["post"])
    def complete(self, request: Request, pk: str) -> Response:
        return self._act(request, RunResultSerializer, services.complete_task_device)

    @extend_schema(request=RunFailureSerializer, responses=transition_responses(TaskDeviceSerializer))
    @action(detail=True, methods=["post"])
    def fail(self, request: Request, pk: str) -> Response:
        return self._act(request, RunFailureSerializer, services.fail_task_device)

    def _act(self, request: Request, form: type[RunTokenSerializer], verb: Callable[..., None]) -> Response:
        """Another PC's row does not exist for an agent, whatever else it may read or send."""
        row_id = UUID(self.kwargs["pk"])
        if not TaskDevice.objects.filter(self.own(), pk=row_id).exists():
            raise Http404
        body = form(data=request.data)
        body.is_valid(raise_exception=True)
        verb(row_id=row_id, agent=request.user, now=timezone.now(), **body.validated_data)
        return Response(TaskDeviceSerializer(self.queryset.get(pk=row_id)).data)
