"""The REST door of locks, and what the doors of other apps need of it."""

from locks.api.gate import GATE_HEADERS, LOCKED, gate_headers

__all__ = ["GATE_HEADERS", "LOCKED", "gate_headers", "urlpatterns"]

urlpatterns: list[object] = []
