"""Parse, call a service, show."""

import select
import socket
from typing import Any

from django.db.models import Count, Q, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from config import sweeping
from config.errors import Invalid, Missing
from config.rest import StrictSerializer, UUIDLookup
from config.rest.idempotency import VISIBLE_ASCII, fingerprint
from config.rest.schema import ErrorResponseSerializer
from locks import services
from locks.api import serializers as shapes
from locks.api.gate import WHOLE
from locks.api.indexing import answer_start
from locks.models import Branch, BranchLock, LockQuerySet, LockType, Scope

HOLD, ADMINISTER = "locks.hold_locks", "locks.administer_locks"
VIEW, VIEW_BRANCH = "locks.view_branchlock", "locks.view_branch"
DETAILS = 100
RECENT = 10


class LockConflictSerializer(ErrorResponseSerializer):
    # Left out where the conflict is not with a lock: an Idempotency-Key used with another body.
    conflicts = shapes.BlockingLockSerializer(many=True, required=False)
    retry_after = serializers.IntegerField(required=False)


CONFLICT = OpenApiResponse(LockConflictSerializer, description="Who holds it, since when, why and until when.")
GONE = OpenApiResponse(ErrorResponseSerializer, description="The lock has ended or expired.")
STALE = OpenApiResponse(ErrorResponseSerializer, description="stale_fence: this fence is not the lock's.")
BUSY = OpenApiResponse(ErrorResponseSerializer, description="The branch's row was not to be had within 5 s.")
BRANCH = OpenApiParameter("branch", str, OpenApiParameter.PATH, description="May hold slashes.")


def client(request: Request) -> str:
    return str(request.user.get_username())


def is_admin(request: Request) -> bool:
    return bool(request.user.has_perm(ADMINISTER))


def valid(serializer: type[serializers.Serializer[Any]], data: Any) -> dict[str, Any]:
    checked = serializer(data=data)
    checked.is_valid(raise_exception=True)
    return dict(checked.validated_data)


def branch_in(path: str) -> str:
    try:
        shapes.refuse_branch_name(path)
    except ValidationError as error:
        raise ValidationError({"branch": error.detail}) from None
    return path


def flag(request: Request, name: str) -> bool:
    word = request.query_params.get(name, "0").lower()
    if word not in ("0", "1", "true", "false"):
        raise ValidationError({name: ["Expected 1 or 0."]})
    return word in ("1", "true")


def key_of(request: Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and not VISIBLE_ASCII.fullmatch(key):
        raise Invalid("Expected 1 to 255 visible ASCII characters.", attr="Idempotency-Key")
    return key


def numbers(query: dict[str, str]) -> dict[str, Any]:
    """In a query every value is text: those of whole numbers as the JSON would have them."""
    return {name: int(text) if WHOLE.fullmatch(text) else text for name, text in query.items()}


def hung_up(request: Request) -> bool:
    """Whether the client closed its connection, where the server lets us see it (gunicorn does)."""
    wire = request.META.get("gunicorn.socket")
    if not isinstance(wire, socket.socket) or wire.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(wire, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        return wire.recv(1, socket.MSG_PEEK) == b""
    except ValueError:  # TLS sockets know no flags
        return False
    except OSError:
        return True


class LockFilters(filters.FilterSet):
    branch_name = filters.CharFilter("branch__name")

    class Meta:
        model = BranchLock
        fields = ["lock_type", "lock_scope", "resource_type", "resource_id", "locked_by"]


HISTORY = OpenApiParameter("history", OpenApiTypes.STR, enum=["0", "1"], description="Ended locks too, with events.")


class LockViewSet(UUIDLookup, mixins.ListModelMixin, GenericViewSet[BranchLock]):
    """Everybody who may see locks gets as far as 404 and 400; then it must be its holder or a lock-admin."""

    queryset = BranchLock.objects.all()
    serializer_class = shapes.LockSerializer
    filterset_class = LockFilters
    ordering_fields = ["locked_at", "expires_at"]
    extra_query_params = ["history"]
    required_permissions = dict.fromkeys(
        ("list", "retrieve", "destroy", "heartbeat", "health", "extend_ttl", "health_summary"), VIEW
    )

    def get_queryset(self) -> QuerySet[BranchLock]:
        rows = BranchLock.objects.clocked().select_related("branch")
        with_history = self.action in ("list", "retrieve") and flag(self.request, "history")
        return rows if with_history else rows.active()

    def found(self, rows: QuerySet[BranchLock] | None = None) -> BranchLock:
        lock = (self.get_queryset() if rows is None else rows).filter(pk=self.kwargs["pk"]).first()
        if lock is None:
            raise Missing("There is no such lock.")
        return lock

    def known(self) -> BranchLock:
        """Ended ones too: those are 410, later."""
        return self.found(BranchLock.objects.clocked().select_related("branch"))

    def refuse_strangers(self, lock: BranchLock) -> None:
        if not is_admin(self.request) and not self.request.user.has_perm(HOLD):
            raise PermissionDenied
        services.refuse_stranger(lock, client(self.request), is_admin(self.request))

    def by_whom(self) -> dict[str, Any]:
        return {"actor": client(self.request), "admin": is_admin(self.request)}

    @extend_schema(parameters=[HISTORY])
    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().list(request, *args, **kwargs)

    @extend_schema(parameters=[HISTORY], responses=shapes.LockHistorySerializer)
    def retrieve(self, request: Request, pk: str) -> Response:
        shape = shapes.LockHistorySerializer if flag(request, "history") else shapes.LockSerializer
        return Response(shape(self.found()).data)

    @extend_schema(
        parameters=[OpenApiParameter("fence", int, description="Here or in the body.")],
        request=shapes.ReleaseLockSerializer,
        responses={204: None, 409: STALE, 410: GONE, 503: BUSY},
    )
    def destroy(self, request: Request, pk: str) -> Response:
        lock = self.known()
        body = request.data if isinstance(request.data, dict) else {"fence": None}
        asked = valid(shapes.ReleaseLockSerializer, {**numbers(request.query_params.dict()), **body})
        self.refuse_strangers(lock)
        services.release_lock(lock.pk, asked["fence"], **self.by_whom())
        return Response(status=204)

    @extend_schema(
        request=shapes.LockHeartbeatSerializer,
        responses={200: shapes.LockHeardSerializer, 409: STALE, 410: GONE, 503: BUSY},
    )
    @action(detail=True, methods=["post"])
    def heartbeat(self, request: Request, pk: str) -> Response:
        lock = self.known()
        asked = valid(shapes.LockHeartbeatSerializer, request.data)
        self.refuse_strangers(lock)
        progress = asked.get("progress_info") or {}
        heard = services.record_heartbeat(
            lock.pk,
            asked["fence"],
            source=asked.get("service_name"),
            status=asked["status"],
            progress=progress.get("progress"),
            remaining=progress.get("estimated_remaining_hours"),
            **self.by_whom(),
        )
        return Response(shapes.LockHeardSerializer(heard).data)

    @extend_schema(
        request=shapes.ExtendLockSerializer,
        responses={200: shapes.ExtendedLockSerializer, 409: STALE, 410: GONE, 503: BUSY},
    )
    @action(detail=True, methods=["post"], url_path="extend-ttl")
    def extend_ttl(self, request: Request, pk: str) -> Response:
        lock = self.known()
        asked = valid(shapes.ExtendLockSerializer, request.data)
        self.refuse_strangers(lock)
        hours, reason = asked["extension_hours"], asked["reason"]
        return Response(
            shapes.ExtendedLockSerializer(
                services.extend_lock(lock.pk, asked["fence"], hours, reason, **self.by_whom())
            ).data
        )

    @extend_schema(responses=shapes.LockHealthSerializer)
    @action(detail=True)
    def health(self, request: Request, pk: str) -> Response:
        return Response(shapes.LockHealthSerializer(self.found()).data)

    @extend_schema(responses=shapes.LockHealthSummarySerializer)
    @action(detail=False, url_path="health-summary", pagination_class=None, extra_query_params=[])
    def health_summary(self, request: Request) -> Response:
        rows = self.filter_queryset(BranchLock.objects.active().clocked().select_related("branch"))
        return Response(shapes.LockHealthSummarySerializer(summary(rows)).data)  # type: ignore[arg-type]


def summary(rows: LockQuerySet) -> dict[str, Any]:
    beating = Q(heartbeat_interval__gt=0)
    counts = rows.aggregate(
        total=Count("pk"),
        enabled=Count("pk", filter=beating),
        **{name: Count("pk", filter=beating & Q(heartbeat_health=name)) for name in shapes.HEALTH},
    )
    return {
        "total_locks": counts["total"],
        "heartbeat_enabled_locks": counts["enabled"],
        "health_summary": {name: counts[name] for name in shapes.HEALTH},
        "lock_details": rows.worst_first()[:DETAILS],
    }


class AcquireView(APIView):
    required_permissions = {"post": HOLD}

    @extend_schema(
        request=shapes.AcquireLockSerializer,
        responses={201: shapes.AcquiredLockSerializer, 409: CONFLICT, 410: GONE, 503: BUSY},
    )
    def post(self, request: Request) -> Response:
        asked = valid(shapes.AcquireLockSerializer, request.data)
        key = key_of(request)
        if asked["lock_type"] == LockType.MANUAL and not is_admin(request):
            raise PermissionDenied("MANUAL locks need a lock-admin.")
        wanted = services.LockRequest(
            branch=asked["branch_name"],
            lock_type=asked["lock_type"],
            lock_scope=asked["lock_scope"],
            client=client(request),
            reason=asked["reason"],
            resource_type=asked.get("resource_type"),
            resource_id=asked.get("resource_id"),
            ttl_seconds=asked.get("ttl_seconds"),
            heartbeat_interval=interval(asked),
            auto_release_enabled=asked["auto_release_enabled"],
            lock_delay=asked["lock_delay"],
            key=key,
            fingerprint=fingerprint(request.data) if key else None,
        )
        lock, replayed = services.acquire_lock(wanted, asked["wait_seconds"], lambda: hung_up(request))
        headers = {"Idempotent-Replay": "true"} if replayed else None
        return Response(shapes.AcquiredLockSerializer(lock).data, status=201, headers=headers)

    post.idempotent = True  # type: ignore[attr-defined]


def interval(asked: dict[str, Any]) -> int | None:
    """What the request says about heartbeats; None leaves it to the type of the lock."""
    enabled = asked.get("enable_heartbeat")
    if enabled is False:
        return 0
    given = asked.get("heartbeat_interval")
    return services.DEFAULT_HEARTBEAT if enabled and given is None else given


class ForceUnlockView(APIView):
    required_permissions = {"post": ADMINISTER}

    @extend_schema(request=shapes.ForceUnlockSerializer, responses={200: shapes.UnlockedLocksSerializer, 503: BUSY})
    def post(self, request: Request) -> Response:
        asked = valid(shapes.ForceUnlockSerializer, request.data)
        ended = services.force_unlock(
            client(request), asked["reason"], branch=asked.get("branch_name"), lock_ids=asked.get("lock_ids")
        )
        return Response({"locks_released": len(ended)})


class StatusView(APIView):
    required_permissions = {"get": VIEW_BRANCH, "post": ADMINISTER}

    @extend_schema(parameters=[BRANCH], responses=shapes.BranchStatusSerializer)
    def get(self, request: Request, branch: str) -> Response:
        name = branch_in(branch)
        return Response(status_of(Branch.objects.filter(name=name).first() or Branch(name=name)))

    @extend_schema(
        parameters=[BRANCH],
        request=shapes.SetBranchStateSerializer,
        responses={200: shapes.BranchStatusSerializer, 409: STALE, 503: BUSY},
    )
    def post(self, request: Request, branch: str) -> Response:
        name, asked = branch_in(branch), valid(shapes.SetBranchStateSerializer, request.data)
        services.set_branch_state(name, asked["state"], client(request), asked["reason"])
        return Response(status_of(Branch.objects.get(name=name)))


def status_of(branch: Branch) -> Any:
    locks = list(BranchLock.objects.active().clocked().filter(branch=branch.pk).select_related("branch").order_by("pk"))
    write_locked = any(lock.lock_scope == Scope.BRANCH and not lock.reapable for lock in locks)
    return shapes.BranchStatusSerializer(
        {
            "branch_name": branch.name,
            "state": branch.state,
            "fence": branch.fence,
            "is_write_locked": write_locked,
            "is_ready_for_merge": branch.is_ready and not write_locked,
            "active_locks": locks,
            "indexing_info": branch if branch.indexing_started_at else None,
        }
    ).data


class StartView(APIView):
    required_permissions = {"post": HOLD}

    @extend_schema(
        parameters=[BRANCH],
        request=shapes.StartIndexingSerializer,
        responses={201: shapes.StartedIndexingSerializer, 409: CONFLICT, 410: GONE, 503: BUSY},
    )
    def post(self, request: Request, branch: str) -> Response:
        name, asked = branch_in(branch), valid(shapes.StartIndexingSerializer, request.data)
        if asked["force_branch_lock"] and not is_admin(request):
            raise PermissionDenied("force_branch_lock needs a lock-admin.")
        return answer_start(
            request,
            key_of(request),
            lambda: services.start_indexing(
                name,
                client(request),
                resource_types=asked.get("resource_types"),
                service_name=asked.get("service_name"),
                reason=asked.get("reason", services.INDEXING_REASON),
                whole_branch=asked["force_branch_lock"],
            ),
        )

    post.idempotent = True  # type: ignore[attr-defined]


class CompleteView(APIView):
    required_permissions = {"post": HOLD}

    @extend_schema(
        parameters=[BRANCH],
        request=shapes.CompleteIndexingSerializer,
        responses={200: shapes.CompletedIndexingSerializer, 409: STALE, 410: GONE, 503: BUSY},
    )
    def post(self, request: Request, branch: str) -> Response:
        name, asked = branch_in(branch), valid(shapes.CompleteIndexingSerializer, request.data)
        fences = {str(lock["lock_id"]): lock["fence"] for lock in asked["locks"]}
        return Response(
            services.complete_indexing(name, fences, client(request), admin=is_admin(request), reason=asked["reason"])
        )


class CheckView(APIView):
    required_permissions = {"post": VIEW}

    @extend_schema(request=shapes.CheckWriteSerializer, responses={200: shapes.CheckedWriteSerializer, 503: BUSY})
    def post(self, request: Request) -> Response:
        asked = valid(shapes.CheckWriteSerializer, request.data)
        refusal = services.may_write(
            asked["branch_name"],
            asked.get("resource_type"),
            asked.get("resource_id"),
            lock_id=asked.get("lock_id"),
            fence=asked.get("fence"),
            actor=client(request),
        )
        return Response(
            {
                "allowed": refusal is None,
                "reason": refusal.code if refusal else None,
                "body": refusal.body if refusal else None,
            }
        )


class DashboardView(APIView):
    required_permissions = {"get": VIEW}

    @extend_schema(responses=shapes.LockDashboardSerializer)
    def get(self, request: Request) -> Response:
        active = BranchLock.objects.active()
        counts = dict(active.values_list("lock_type").annotate(count=Count("pk")))
        names = active.values_list("branch__name", flat=True).distinct().order_by("branch__name")
        recent = active.clocked().select_related("branch").order_by("-locked_at", "-pk")[:RECENT]
        told = {
            "total_active_locks": sum(counts.values()),
            "locks_by_type": {kind: counts.get(kind, 0) for kind in LockType.values},
            "locked_branches": list(names),
            "recent_locks": recent,
        }
        return Response(shapes.LockDashboardSerializer(told).data)


class CleanupView(APIView):
    required_permissions = {"post": ADMINISTER}

    @extend_schema(request=None, responses=shapes.CleanedLocksSerializer)
    def post(self, request: Request) -> Response:
        valid(StrictSerializer, request.data)
        counts: dict[str, int] = {}
        for name in ("locks.expire_ttls", "locks.expire_heartbeats"):
            ran = sweeping.run(name, wait=True) or {"counts": {}}
            for outcome, count in ran["counts"].items():
                counts[outcome] = counts.get(outcome, 0) + count
        return Response({"locks_expired": counts.get("expired", 0), "waiters_dropped": counts.get("gone", 0)})
