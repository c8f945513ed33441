"""A toy API on tables that exist anyway: groups (writable) and sweep runs (UUID, a nullable time)."""

from django.contrib.auth.models import Group
from django.db import DataError, IntegrityError, OperationalError, connection
from django.db.models import FilteredRelation
from django.http import Http404
from django.urls import include, path
from django_filters import rest_framework as filters
from django_fsm import TransitionNotAllowed
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet, ReadOnlyModelViewSet

from config import errors
from config.models import SweepRun
from config.rest import (
    IdempotentMixin,
    JSONObject,
    StrictModelSerializer,
    StrictSerializer,
    TenantQuerysetMixin,
    UUIDLookup,
    idempotent,
    transition_responses,
)


class GroupSerializer(StrictModelSerializer):
    class Meta:
        model = Group
        fields = ["id", "name"]


class RunSerializer(StrictModelSerializer):
    class Meta:
        model = SweepRun
        fields = ["id", "name", "started_at", "ended_at"]


class InnerSerializer(StrictSerializer):
    size = serializers.IntegerField()


class EchoSerializer(StrictSerializer):
    text = serializers.CharField(required=False)
    inner = InnerSerializer(required=False)
    payload = JSONObject(required=False, max_bytes=100)


# What the race test hooks into: called inside the handler, after the write.
after_write = [lambda: None]


class GroupViewSet(IdempotentMixin, ModelViewSet):
    queryset = Group.objects.all()
    serializer_class = GroupSerializer
    filterset_fields = ["name"]
    ordering_fields = ["id", "name"]
    extra_query_params = ["verbose"]
    required_permissions = {"rename": "auth.delete_group"}

    def perform_create(self, serializer):
        serializer.save()
        after_write[0]()

    @action(detail=True, methods=["post"])
    def touch(self, request, pk=None):
        return Response(GroupSerializer(self.get_object()).data)

    @action(detail=True, methods=["post"])
    @idempotent
    def rename(self, request, pk=None):
        Group.objects.filter(pk=pk).update(name=request.data["name"])
        return Response({"refused": True}, status=409) if request.data["name"] == "refused" else Response(status=204)


class RunFilters(filters.FilterSet):
    started_at = filters.IsoDateTimeFromToRangeFilter()

    class Meta:
        model = SweepRun
        fields = ["name", "slot"]


class RunViewSet(UUIDLookup, ReadOnlyModelViewSet):
    queryset = SweepRun.objects.all()
    serializer_class = RunSerializer
    filterset_class = RunFilters
    ordering_fields = ["ended_at", "name", "slot"]


class TenantViewSet(TenantQuerysetMixin, ReadOnlyModelViewSet):
    """Groups as applications: the mixin only needs a relation named `members`."""

    queryset = Group.objects.annotate(members=FilteredRelation("user"))
    serializer_class = GroupSerializer
    tenant_path = ""


class Echo(APIView):
    serializer_class = EchoSerializer

    def post(self, request):
        serializer = EchoSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        return Response(serializer.validated_data)


class Guarded(APIView):
    required_permissions = {"get": "auth.view_group"}

    def get(self, request):
        return Response({})

    def post(self, request):
        return Response({})


class Held(errors.DomainError):
    status = 423

    def __init__(self):
        super().__init__("held", retry_after=0.2)
        self.body = {"holder": "someone"}


def sql(statement, *params):
    with connection.cursor() as cursor:
        cursor.execute(statement, params)


def graph_violation():
    sql("DO $$ BEGIN RAISE 'no' USING ERRCODE = 'check_violation', CONSTRAINT = 'toy_graph'; END $$")


RAISES = {
    "conflict": lambda: raised(errors.Conflict("no", code="taken", attr="name", extra={"id": 7}, retry_after=1.2)),
    "held": lambda: raised(Held()),
    "transition": lambda: raised(TransitionNotAllowed("no way")),
    "graph": graph_violation,
    "unique": lambda: (Group.objects.create(name="twin"), Group.objects.create(name="twin")),
    "null": lambda: sql("INSERT INTO auth_group (name) VALUES (NULL)"),
    "lock_timeout": lambda: sql("DO $$ BEGIN RAISE 'x' USING ERRCODE = 'lock_not_available'; END $$"),
    "deadlock": lambda: sql("DO $$ BEGIN RAISE 'x' USING ERRCODE = 'deadlock_detected'; END $$"),
    "canceled": lambda: sql("DO $$ BEGIN RAISE 'x' USING ERRCODE = 'query_canceled'; END $$"),
    "too_long": lambda: sql("DO $$ BEGIN RAISE 'x' USING ERRCODE = 'program_limit_exceeded'; END $$"),
    "away": lambda: raised(OperationalError("connection refused")),
    "range": lambda: sql("SELECT 3000000000::int"),
    "nul": lambda: list(Group.objects.filter(name="a\x00b")),
    "data": lambda: raised(DataError("x")),
    "nameless": lambda: raised(IntegrityError("x")),
    "404": lambda: raised(Http404()),
    "bug": lambda: raised(KeyError("x")),
}


def raised(error):
    raise error


class Raise(APIView):
    def get(self, request, what):
        RAISES[what]()
        return Response({})


class Transition(APIView):
    @extend_schema(request=None, responses=transition_responses(GroupSerializer))
    def post(self, request):
        return Response({})


router = SimpleRouter()
router.register("groups", GroupViewSet)
router.register("runs", RunViewSet)
router.register("tenants", TenantViewSet, basename="tenant")

urlpatterns = [
    path("api/v1/", include(router.urls)),
    path("api/v1/echo/", Echo.as_view()),
    path("api/v1/guarded/", Guarded.as_view()),
    path("api/v1/transition/", Transition.as_view()),
    path("api/v1/raise/<str:what>/", Raise.as_view()),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
]
