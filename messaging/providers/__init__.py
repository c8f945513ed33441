"""The carriers behind one small interface: plain values in and out, no models, no exceptions."""

import os
from typing import cast

from django.conf import settings
from django.utils.module_loading import import_string

from messaging.providers.answers import Answer, Outgoing, Provider, masked
from messaging.providers.local import Console, Null

__all__ = ["Answer", "Outgoing", "Provider", "breaker_of", "masked", "provider_for", "reset_providers"]

# Built on first use and kept: a provider owns connections and tokens, which do not survive a fork.
_built: dict[tuple[str, str], Provider] = {}
os.register_at_fork(after_in_child=_built.clear)


def provider_for(subscription_type: str) -> Provider | None:
    """Who carries this type by PROVIDERS; None means that the channel is not configured."""
    name = "in_app" if subscription_type == "InAppMessage" else settings.PROVIDERS.get(subscription_type, "")
    if not name and settings.DEBUG:
        name = "console"
    if not name:
        return None
    key = (name, subscription_type if name in PER_TYPE else "")
    if key not in _built:
        _built[key] = _build(name, subscription_type)
    return _built[key]


def breaker_of(provider: Provider) -> str:
    """By its name, but for a second service under the same name: what is dead stops only itself."""
    return str(getattr(provider, "breaker", provider.name))


def reset_providers() -> None:
    """Forget what was built, after the settings have changed."""
    _built.clear()


# One name, two services with credentials of their own.
PER_TYPE = {"nhn"}


def _build(name: str, subscription_type: str) -> Provider:
    """Imported when needed: a process that sends no push loads no push."""
    if name == "null" or name == "in_app":
        return Null(name)
    if name == "console":
        return Console()
    if name == "nhn":
        from messaging.providers.nhn import NHNKakao, NHNSms

        return NHNKakao() if subscription_type == "KakaoTalk" else NHNSms()
    if name.startswith("anymail-"):
        from messaging.providers.esp import ESP

        return ESP(name)
    return cast(Provider, import_string(MODULES[name])())


MODULES = {
    "fcm": "messaging.providers.fcm.FCM",
    "apns": "messaging.providers.apns.APNs",
    "smtp": "messaging.providers.smtp.SMTP",
    "twilio": "messaging.providers.twilio.Twilio",
    "solapi": "messaging.providers.solapi.Solapi",
}
