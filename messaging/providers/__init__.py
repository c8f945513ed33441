"""The carriers behind one small interface: plain values in and out, no models, no exceptions."""

import os
from collections.abc import Callable

from django.conf import settings

from messaging.providers.answers import Answer, Outgoing, Provider, masked
from messaging.providers.local import Console, Null

__all__ = ["Answer", "Outgoing", "Provider", "masked", "provider_for", "reset_providers"]

# Built on first use and kept: a provider owns connections, tokens and their loop.
_built: dict[tuple[int, str, str], Provider] = {}


def provider_for(subscription_type: str) -> Provider | None:
    """Who carries this type by PROVIDERS; None means that the channel is not configured."""
    name = "in_app" if subscription_type == "InAppMessage" else settings.PROVIDERS.get(subscription_type, "")
    if not name and settings.DEBUG:
        name = "console"
    if not name:
        return None
    # Connections do not survive a fork: a child builds its own.
    key = (os.getpid(), name, subscription_type if name in PER_TYPE else "")
    if key not in _built:
        _built[key] = _build(name, subscription_type)
    return _built[key]


def reset_providers() -> None:
    """Forget what was built, after the settings have changed."""
    _built.clear()


# One name, two services with credentials of their own.
PER_TYPE = {"nhn", "solapi"}
BUILDERS: dict[str, Callable[[], Provider]] = {"null": Null, "console": Console, "in_app": lambda: Null("in_app")}


def _build(name: str, subscription_type: str) -> Provider:
    return BUILDERS[name]()
