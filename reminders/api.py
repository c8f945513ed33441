import time
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.urls import include, path
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from config.errors import Forbidden
from config.rest import (
    SEE_ALL_TENANTS,
    CursorPages,
    Flag,
    IdempotentMixin,
    StrictModelSerializer,
    StrictSerializer,
    Text,
    UUIDLookup,
    Whole,
)
from messaging.api.tenancy import applications_of, chosen_application
from reminders import services
from reminders.models import BODY_LENGTH, ID_LENGTH, TITLE_LENGTH, Alarm, validate_zone

SYNC_ITEMS = 500
MOST, USUAL = 1000, services.BATCH


class Key(Text):
    """An id of the client's own making, kept to the letter."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_length=ID_LENGTH, trim_whitespace=False, **kwargs)

    def run_validation(self, data: Any = serializers.empty) -> Any:
        value = super().run_validation(data)
        if isinstance(value, str) and not value.strip():
            self.fail("blank")
        return value


def text(limit: int) -> Text:
    return Text(max_length=limit, trim_whitespace=False, allow_blank=True, required=False)


class AlarmSerializer(StrictModelSerializer):
    class Meta:
        model = Alarm
        fields = [
            "id", "page_id", "user_id", "title", "body", "next_alarm_time", "sent_count", "last_notification_id",
            "processed_at", "created_at", "updated_at",
        ]  # fmt: skip


class OwnerSerializer(StrictSerializer):
    application = serializers.SlugField(max_length=64, required=False)
    user_id = Key()


class RegisterSerializer(OwnerSerializer):
    page_id = Key()
    title = text(TITLE_LENGTH)
    body = text(BODY_LENGTH)
    timezone = Text(required=False, trim_whitespace=False, validators=[validate_zone])
    reset = Flag(required=False)


class RegisteredSerializer(serializers.Serializer[Any]):
    success = serializers.BooleanField()
    alarm_id = serializers.UUIDField()
    next_alarm_time = serializers.DateTimeField()
    sent_count = serializers.IntegerField()


class PageTextSerializer(StrictSerializer):
    id = Key()
    title = text(TITLE_LENGTH)
    body = text(BODY_LENGTH)


class PagesSerializer(OwnerSerializer):
    created = serializers.ListField(child=PageTextSerializer(), required=False, max_length=SYNC_ITEMS)
    updated = serializers.ListField(child=PageTextSerializer(), required=False, max_length=SYNC_ITEMS)
    deleted = serializers.ListField(child=Key(), required=False, max_length=SYNC_ITEMS)


class PagesDoneSerializer(serializers.Serializer[Any]):
    created = serializers.IntegerField()
    updated = serializers.IntegerField()
    deleted = serializers.IntegerField()


class Moment(serializers.DateTimeField):
    def to_internal_value(self, value: Any) -> Any:
        # Python reads a time that ends in NUL.
        if isinstance(value, str) and "\x00" in value:
            self.fail("invalid", format="ISO 8601")
        # In an address that was not encoded a `+` is a blank.
        return super().to_internal_value(value.replace(" ", "+") if isinstance(value, str) and "T" in value else value)


class PullSerializer(StrictSerializer):
    user_id = Key(required=False)
    since = Moment(required=False)


class PulledSerializer(serializers.Serializer[Any]):
    changed = AlarmSerializer(many=True)
    deleted = serializers.ListField(child=serializers.UUIDField())
    until = serializers.DateTimeField()


class BatchSerializer(StrictSerializer):
    fetch_limit = Whole(min_value=1, max_value=MOST, required=False, default=USUAL)


class BatchDoneSerializer(serializers.Serializer[Any]):
    claimed = serializers.IntegerField()
    sent = serializers.IntegerField()
    failed = serializers.IntegerField()
    deferred = serializers.IntegerField()
    skipped = serializers.IntegerField()
    processing_time_ms = serializers.IntegerField()


class ScheduleSerializer(serializers.Serializer[Any]):
    next_alarm_time = serializers.DateTimeField(allow_null=True)
    due = serializers.IntegerField()
    processing = serializers.IntegerField()
    zombies = serializers.IntegerField()


class ApplicationView(APIView):
    """The client acts in an application: its only one, or the one it names."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if not applications_of(request.user).exists():
            raise Forbidden(_("This client belongs to no application."))

    def asked(self, serializer_class: type[StrictSerializer]) -> dict[str, Any]:
        serializer = serializer_class(data=self.request.data)
        serializer.is_valid(raise_exception=True)
        return serializer.validated_data


class RegisterView(IdempotentMixin, ApplicationView):
    required_permissions = {"post": "reminders.add_alarm"}

    @extend_schema(request=RegisterSerializer, responses=RegisteredSerializer)
    def post(self, request: Request) -> Response:
        asked = self.asked(RegisterSerializer)
        application = chosen_application(request.user, asked.pop("application", None))
        alarm = services.register_alarm(application, services.Registration(**asked), timezone.now())
        answer = {
            "success": True,
            "alarm_id": alarm.pk,
            "next_alarm_time": alarm.next_alarm_time,
            "sent_count": alarm.sent_count,
        }
        return Response(RegisteredSerializer(answer).data)


class PagesView(IdempotentMixin, ApplicationView):
    required_permissions = {"post": "reminders.add_page"}

    @extend_schema(request=PagesSerializer, responses=PagesDoneSerializer)
    def post(self, request: Request) -> Response:
        asked = self.asked(PagesSerializer)
        changes = services.PageChanges(
            asked["user_id"],
            created=[services.PageText(**item) for item in asked.get("created", [])],
            updated=[services.PageText(**item) for item in asked.get("updated", [])],
            deleted=asked.get("deleted", []),
        )
        return Response(services.sync_pages(chosen_application(request.user, asked.get("application")), changes))


class ScheduleView(APIView):
    required_permissions = {"get": "reminders.view_schedule", "post": "reminders.run_batch"}

    @extend_schema(responses=ScheduleSerializer)
    def get(self, request: Request) -> Response:
        return Response(ScheduleSerializer(services.schedule(timezone.now())).data)

    @extend_schema(request=BatchSerializer, responses=BatchDoneSerializer)
    def post(self, request: Request) -> Response:
        serializer = BatchSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        started = time.monotonic()
        done = services.send_batch(timezone.now(), serializer.validated_data["fetch_limit"])
        return Response({**done, "processing_time_ms": round((time.monotonic() - started) * 1000)})


class AlarmPages(CursorPages):
    nulls_first = True


class AlarmViewSet(
    UUIDLookup,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    mixins.DestroyModelMixin,
    GenericViewSet[Alarm],
):
    queryset = Alarm.objects.all()
    serializer_class = AlarmSerializer
    pagination_class = AlarmPages
    filterset_fields = ["user_id"]
    ordering = "next_alarm_time"
    ordering_fields = ["next_alarm_time", "created_at", "updated_at"]
    required_permissions = {"pull": "reminders.view_alarm"}

    def get_queryset(self) -> QuerySet[Alarm]:
        """By the applications' ids, not over a join: that would walk the times of all tenants to find one's own."""
        tenants = self.tenants()
        return super().get_queryset() if tenants is None else super().get_queryset().filter(application__in=tenants)

    def tenants(self) -> list[UUID] | None:
        """The applications whose alarms the client sees; None for all."""
        user: Any = self.request.user
        if getattr(self, "swagger_fake_view", False):
            return []
        return None if user.has_perm(SEE_ALL_TENANTS) else list(user.applications.values_list("pk", flat=True))

    def perform_destroy(self, instance: Alarm) -> None:
        services.delete_alarm(instance)

    @extend_schema(parameters=[PullSerializer], responses={200: OpenApiResponse(PulledSerializer)}, filters=False)
    @action(detail=False, methods=["get"], url_path="sync", pagination_class=None)
    def pull(self, request: Request) -> Response:
        asked = PullSerializer(data={k: v for k, v in request.query_params.items() if k != "format"})
        asked.is_valid(raise_exception=True)
        user_id, since = asked.validated_data.get("user_id"), asked.validated_data.get("since")
        pull = services.pull_changes(self.tenants(), user_id, since)
        return Response(PulledSerializer(pull).data)


router = SimpleRouter()
router.register("alarms", AlarmViewSet)

urlpatterns = [
    # The paths of the seed: no version, no trailing slash.
    path("api/reminder/register-by-page", RegisterView.as_view()),
    path("api/reminder/schedule/v2", ScheduleView.as_view()),
    path("api/v1/pages/sync/", PagesView.as_view()),
    path("api/v1/", include(router.urls)),
]
