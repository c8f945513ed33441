"""DRF pieces that every api.py uses and settings.REST_FRAMEWORK names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from config.rest.access import SEE_ALL_TENANTS, ModelPermissions, TenantQuerysetMixin, UUIDLookup
from config.rest.bodies import (
    BoundedJSON,
    Flag,
    JSONObject,
    Key,
    Moment,
    StrictJSONParser,
    StrictModelSerializer,
    StrictSerializer,
    Text,
    Whole,
)
from config.rest.idempotency import IdempotentMixin, idempotent
from config.rest.lists import CursorPages, StrictFilterBackend
from config.rest.throttle import ClientThrottle

if TYPE_CHECKING:
    from config.rest.handler import exception_handler
    from config.rest.schema import Schema, transition_responses

# rest_framework.views looks the names above up in this module while it is itself half imported, so what needs it
# finished comes on first use.
LATE = {"exception_handler": "handler", "Schema": "schema", "transition_responses": "schema"}

__all__ = [
    "SEE_ALL_TENANTS",
    "BoundedJSON",
    "ClientThrottle",
    "CursorPages",
    "Flag",
    "IdempotentMixin",
    "JSONObject",
    "Key",
    "ModelPermissions",
    "Moment",
    "Schema",
    "StrictFilterBackend",
    "StrictJSONParser",
    "StrictModelSerializer",
    "StrictSerializer",
    "TenantQuerysetMixin",
    "Text",
    "UUIDLookup",
    "Whole",
    "exception_handler",
    "idempotent",
    "transition_responses",
]


def __getattr__(name: str) -> Any:
    if name in LATE:
        return getattr(import_module(f"config.rest.{LATE[name]}"), name)
    raise AttributeError(name)
