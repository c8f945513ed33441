"""What clients send and get, and the limits of it."""

import math
import unicodedata
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ValidationError

from config.rest import Flag, Key, StrictSerializer, Text, Whole
from locks.api.gate import BIGINT, LockedSerializer
from locks.models import LONGEST_DELAY, NAME, REASON, RESOURCE, TYPE, Branch, BranchLock, LockEvent, LockType, Scope

DAY = 24 * 3600
HEALTH = ["healthy", "warning", "critical"]
REPORTED = ["healthy", "warning", "error"]


class Number(serializers.FloatField):
    """A finite JSON number: no text, no boolean."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, int | float):
            self.fail("invalid")
        try:
            number = float(data)
        except OverflowError:
            self.fail("invalid")
        if not math.isfinite(number):
            self.fail("invalid")
        return number


class Fence(Whole):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=-BIGINT, max_value=BIGINT - 1, **kwargs)


def refuse_branch_name(name: str) -> None:
    """Also of the one in the path."""
    if not 1 <= len(name) <= NAME:
        raise ValidationError(f"Expected 1 to {NAME} characters.")
    if any(letter.isspace() or unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise ValidationError("White space and control characters are not allowed.")
    if "" in name.split("/"):
        raise ValidationError("No leading, trailing or double slash.")


class BranchName(Text):
    def __init__(self, **kwargs: Any) -> None:
        # Beyond the longest name nothing is looked at letter by letter.
        super().__init__(trim_whitespace=False, max_length=NAME, **kwargs)
        self.validators.append(refuse_branch_name)


def text(limit: int, **kwargs: Any) -> serializers.CharField:
    return Text(max_length=limit, trim_whitespace=False, **kwargs)


def reason(**kwargs: Any) -> serializers.CharField:
    return Text(max_length=REASON, **kwargs)


FITS = {
    Scope.BRANCH: (False, False),
    Scope.RESOURCE_TYPE: (True, False),
    Scope.RESOURCE: (True, True),
}


class AcquireLockSerializer(StrictSerializer):
    branch_name = BranchName()
    lock_type = serializers.ChoiceField(LockType.choices)
    lock_scope = serializers.ChoiceField(Scope.choices)
    resource_type = text(TYPE, required=False, allow_null=True)
    resource_id = text(RESOURCE, required=False, allow_null=True)
    reason = reason()
    ttl_seconds = Number(required=False, allow_null=True, min_value=1, max_value=DAY)
    enable_heartbeat = Flag(required=False, allow_null=True)
    heartbeat_interval = Whole(required=False, allow_null=True, min_value=1, max_value=3600)
    auto_release_enabled = Flag(required=False, default=True)
    wait_seconds = Number(required=False, default=0, min_value=0, max_value=LONGEST_DELAY)
    lock_delay = Number(required=False, default=0, min_value=0, max_value=LONGEST_DELAY)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        needed = FITS[Scope(attrs["lock_scope"])]
        errors = {}
        for name, wanted in zip(("resource_type", "resource_id"), needed, strict=True):
            if (attrs.get(name) is not None) != wanted:
                scope = attrs["lock_scope"]
                errors[name] = [f"The scope {scope} needs it." if wanted else f"The scope {scope} has none."]
        if errors:
            raise ValidationError(errors)
        return attrs


class AcquiredLockSerializer(serializers.Serializer[Any]):
    lock_id = serializers.UUIDField(source="pk")
    fence = serializers.IntegerField()
    expires_at = serializers.DateTimeField()
    ttl_source = serializers.ChoiceField(["default", "request"])
    heartbeat_interval = serializers.IntegerField()


class LockSerializer(serializers.ModelSerializer[BranchLock]):
    branch_name = serializers.CharField(source="branch.name", read_only=True)
    ttl_expired = serializers.BooleanField(read_only=True)
    heartbeat_expired = serializers.BooleanField(read_only=True)
    heartbeat_health = serializers.ChoiceField(HEALTH, allow_null=True, read_only=True)

    class Meta:
        model = BranchLock
        fields: ClassVar[list[str]] = [
            "id", "branch_name", "lock_type", "lock_scope", "resource_type", "resource_id", "locked_by", "reason",
            "locked_at", "expires_at", "heartbeat_interval", "last_heartbeat", "heartbeat_source", "status", "progress",
            "estimated_remaining_hours", "auto_release_enabled", "lock_delay", "fence", "state", "released_at",
            "released_by", "metadata", "ttl_source", "ttl_expired", "heartbeat_expired", "heartbeat_health",
        ]  # fmt: skip
        read_only_fields = fields


class LockEventSerializer(serializers.ModelSerializer[LockEvent]):
    class Meta:
        model = LockEvent
        fields: ClassVar[list[str]] = ["kind", "actor", "reason", "fence", "details", "created_at"]


class LockHistorySerializer(LockSerializer):
    """With `?history=1`: the events of the lock too, oldest first."""

    events = serializers.SerializerMethodField()

    class Meta(LockSerializer.Meta):
        fields: ClassVar[list[str]] = [*LockSerializer.Meta.fields, "events"]
        read_only_fields = fields

    @extend_schema_field(LockEventSerializer(many=True))
    def get_events(self, lock: BranchLock) -> Any:
        return LockEventSerializer(LockEvent.objects.filter(lock=lock).order_by("id"), many=True).data


class LockProgressSerializer(StrictSerializer):
    progress = Number(required=False, allow_null=True, min_value=0, max_value=100)
    estimated_remaining_hours = Number(required=False, allow_null=True, min_value=0, max_value=8760)


class LockHeartbeatSerializer(StrictSerializer):
    fence = Fence()
    service_name = text(TYPE, required=False)
    status = serializers.ChoiceField(REPORTED, required=False, default="healthy")
    progress_info = LockProgressSerializer(required=False, allow_null=True)


class LockHeardSerializer(serializers.Serializer[Any]):
    last_heartbeat = serializers.DateTimeField()
    next_interval = serializers.IntegerField()
    expires_at = serializers.DateTimeField()


class ExtendLockSerializer(StrictSerializer):
    fence = Fence()
    extension_hours = Number()
    reason = reason(required=False, allow_blank=True, default="")

    def validate_extension_hours(self, hours: float) -> float:
        if hours <= 0:
            raise ValidationError("Expected more than 0.")
        return hours


class ExtendedLockSerializer(serializers.Serializer[Any]):
    lock_id = serializers.UUIDField(source="pk")
    new_expires_at = serializers.DateTimeField(source="expires_at")


class ReleaseLockSerializer(StrictSerializer):
    fence = Fence()


class LockHealthSerializer(serializers.Serializer[BranchLock]):
    """As the seed has it; whole seconds, none below zero."""

    lock_id = serializers.UUIDField(source="pk")
    branch_name = serializers.CharField(source="branch.name")
    is_active = serializers.SerializerMethodField()
    heartbeat_enabled = serializers.SerializerMethodField()
    heartbeat_interval = serializers.IntegerField()
    last_heartbeat = serializers.DateTimeField(allow_null=True)
    heartbeat_source = serializers.CharField(allow_null=True)
    ttl_expired = serializers.BooleanField()
    heartbeat_expired = serializers.BooleanField()
    heartbeat_health = serializers.ChoiceField(HEALTH, allow_null=True)
    seconds_since_last_heartbeat = serializers.SerializerMethodField()
    seconds_until_ttl_expiry = serializers.SerializerMethodField()
    auto_release_enabled = serializers.BooleanField()

    def get_is_active(self, lock: BranchLock) -> bool:
        return not lock.released_at

    def get_heartbeat_enabled(self, lock: BranchLock) -> bool:
        return lock.heartbeat_interval > 0

    def get_seconds_since_last_heartbeat(self, lock: BranchLock) -> int | None:
        return None if lock.last_heartbeat is None else max(0, int((lock.now - lock.last_heartbeat).total_seconds()))

    def get_seconds_until_ttl_expiry(self, lock: BranchLock) -> int:
        return max(0, int((lock.expires_at - lock.now).total_seconds()))


class LockHealthCountsSerializer(serializers.Serializer[Any]):
    healthy = serializers.IntegerField()
    warning = serializers.IntegerField()
    critical = serializers.IntegerField()


class LockHealthSummarySerializer(serializers.Serializer[Any]):
    total_locks = serializers.IntegerField()
    heartbeat_enabled_locks = serializers.IntegerField()
    health_summary = LockHealthCountsSerializer()
    lock_details = LockHealthSerializer(many=True)


class ForceUnlockSerializer(StrictSerializer):
    branch_name = BranchName(required=False)
    lock_ids = serializers.ListField(child=Key(), required=False, min_length=1, max_length=1000)
    reason = reason()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "branch_name" not in attrs and "lock_ids" not in attrs:
            raise ValidationError({"branch_name": ["Name a branch, or lock_ids."]})
        return attrs


class UnlockedLocksSerializer(serializers.Serializer[Any]):
    locks_released = serializers.IntegerField()


class StartIndexingSerializer(StrictSerializer):
    resource_types = serializers.ListField(child=text(TYPE), required=False, min_length=1, max_length=100)
    service_name = text(TYPE, required=False)
    reason = reason(required=False)
    force_branch_lock = Flag(required=False, default=False)


class StartedLockSerializer(serializers.Serializer[Any]):
    lock_id = serializers.UUIDField()
    fence = serializers.IntegerField()
    resource_type = serializers.CharField(allow_null=True)
    expires_at = serializers.DateTimeField()
    heartbeat_interval = serializers.IntegerField()


class BlockingLockSerializer(serializers.Serializer[Any]):
    """Who is in the way, since when, why, until when, and how it is doing."""

    lock_id = serializers.UUIDField()
    locked_by = serializers.CharField()
    locked_at = serializers.DateTimeField()
    reason = serializers.CharField()
    expires_at = serializers.DateTimeField()
    lock_type = serializers.ChoiceField(LockType.choices)
    lock_scope = serializers.ChoiceField(Scope.choices)
    resource_type = serializers.CharField(allow_null=True)
    resource_id = serializers.CharField(allow_null=True)
    heartbeat_health = serializers.ChoiceField(HEALTH, allow_null=True)
    progress = serializers.FloatField(allow_null=True)


class NotLockedSerializer(serializers.Serializer[Any]):
    resource_type = serializers.CharField(allow_null=True)
    conflicts = BlockingLockSerializer(many=True)


class StartedIndexingSerializer(serializers.Serializer[Any]):
    locks = StartedLockSerializer(many=True)
    not_locked = NotLockedSerializer(many=True)
    lock_scope = serializers.ChoiceField(Scope.choices)
    branch_state = serializers.ChoiceField(Branch.State.choices)
    other_resources_available = serializers.BooleanField()


class HeldLockSerializer(StrictSerializer):
    lock_id = Key()
    fence = Fence()


class CompleteIndexingSerializer(StrictSerializer):
    locks = HeldLockSerializer(many=True, min_length=1, max_length=1000)  # type: ignore[call-arg]
    reason = reason(required=False, allow_blank=True, default="")

    def validate_locks(self, locks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len({lock["lock_id"] for lock in locks}) < len(locks):
            raise ValidationError("A lock is named twice.")
        return locks


class CompletedIndexingSerializer(serializers.Serializer[Any]):
    completion_type = serializers.ChoiceField(["partial", "complete"])
    remaining = serializers.ListField(child=serializers.CharField())
    branch_state = serializers.ChoiceField(Branch.State.choices)


class CheckWriteSerializer(StrictSerializer):
    branch_name = BranchName()
    resource_type = text(TYPE, required=False, allow_null=True)
    resource_id = text(RESOURCE, required=False, allow_null=True)
    lock_id = Key(required=False, allow_null=True)
    fence = Fence(required=False, allow_null=True)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs.get("resource_id") is not None and attrs.get("resource_type") is None:
            raise ValidationError({"resource_type": ["A resource needs its type."]})
        return attrs


class CheckedWriteSerializer(serializers.Serializer[Any]):
    allowed = serializers.BooleanField()
    reason = serializers.CharField(allow_null=True)
    body = LockedSerializer(allow_null=True)


class IndexingInfoSerializer(serializers.Serializer[Branch]):
    started_at = serializers.DateTimeField(source="indexing_started_at", allow_null=True)
    completed_at = serializers.DateTimeField(source="indexing_completed_at", allow_null=True)
    service = serializers.CharField(source="indexing_service", allow_null=True)
    duration_seconds = serializers.SerializerMethodField()

    def get_duration_seconds(self, branch: Branch) -> float | None:
        started, completed = branch.indexing_started_at, branch.indexing_completed_at
        return (completed - started).total_seconds() if started and completed else None


class BranchStatusSerializer(serializers.Serializer[Any]):
    branch_name = serializers.CharField()
    state = serializers.ChoiceField(Branch.State.choices)
    fence = serializers.IntegerField()
    is_write_locked = serializers.BooleanField()
    is_ready_for_merge = serializers.BooleanField()
    active_locks = LockSerializer(many=True)
    indexing_info = IndexingInfoSerializer(allow_null=True)


class SetBranchStateSerializer(StrictSerializer):
    state = serializers.ChoiceField(Branch.State.choices)
    reason = reason()


class LockDashboardSerializer(serializers.Serializer[Any]):
    total_active_locks = serializers.IntegerField()
    locks_by_type = serializers.DictField(child=serializers.IntegerField())
    locked_branches = serializers.ListField(child=serializers.CharField())
    recent_locks = LockSerializer(many=True)


class CleanedLocksSerializer(serializers.Serializer[Any]):
    locks_expired = serializers.IntegerField()
    waiters_dropped = serializers.IntegerField()
