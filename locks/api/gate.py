"""For doors whose writes pass the gate: the lock a client holds comes in two headers.

with transaction.atomic():
    check_write("main", "template", str(pk), actor=request.user, **gate_headers(request))
    ...
"""

import re
from typing import Any
from uuid import UUID

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.request import Request

from config.errors import Invalid

LOCK_ID, LOCK_FENCE = "X-Lock-Id", "X-Lock-Fence"
BIGINT = 2**63
WHOLE = re.compile(r"-?[0-9]{1,19}")


def gate_headers(request: Request) -> dict[str, Any]:
    """{"lock_id", "fence"} of the lock the client holds, {} when it names none; 400 when one is malformed or alone."""
    lock_id, fence = request.headers.get(LOCK_ID), request.headers.get(LOCK_FENCE)
    if lock_id is None and fence is None:
        return {}
    if lock_id is None:
        raise Invalid(f"{LOCK_FENCE} needs {LOCK_ID}.", code="required", attr=LOCK_ID)
    if fence is None:
        raise Invalid(f"{LOCK_ID} needs {LOCK_FENCE}.", code="required", attr=LOCK_FENCE)
    return {"lock_id": _uuid(lock_id.strip()), "fence": _fence(fence.strip())}


def _uuid(text: str) -> UUID:
    try:
        found = UUID(text)
    except ValueError:
        raise Invalid("Expected the id of a lock.", attr=LOCK_ID) from None
    if str(found) != text.lower():
        raise Invalid("Expected the id of a lock.", attr=LOCK_ID)
    return found


def _fence(text: str) -> int:
    if not WHOLE.fullmatch(text) or not -BIGINT <= int(text) < BIGINT:
        raise Invalid("Expected the fence of the lock, a whole number.", attr=LOCK_FENCE)
    return int(text)


class LockedSerializer(serializers.Serializer[Any]):
    """Why a write is refused: it stands alone, not in the form of other errors."""

    error = serializers.CharField()
    message = serializers.CharField()
    branch = serializers.CharField()
    resource_type = serializers.CharField(allow_null=True)
    lock_scope = serializers.CharField(allow_null=True)
    locked_by = serializers.CharField(allow_null=True)
    reason = serializers.CharField(allow_null=True)
    progress = serializers.FloatField(allow_null=True)
    eta_seconds = serializers.IntegerField(allow_null=True)
    retry_after = serializers.IntegerField()
    other_resources_available = serializers.BooleanField()
    alternative_actions = serializers.ListField(child=serializers.CharField())


GATE_HEADERS = [
    OpenApiParameter(LOCK_ID, str, OpenApiParameter.HEADER, description="The lock this client holds."),
    OpenApiParameter(LOCK_FENCE, int, OpenApiParameter.HEADER, description="The fence of that lock."),
]
LOCKED = OpenApiResponse(LockedSerializer, description="Somebody else holds a lock on it; see Retry-After.")


def gated(status: int, answer: Any = None, **kwargs: Any) -> Any:
    """extend_schema for a write that passes the gate."""
    return extend_schema(parameters=GATE_HEADERS, responses={status: answer, 423: LOCKED}, **kwargs)
