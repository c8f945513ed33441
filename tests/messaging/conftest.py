import pytest

from messaging.providers import reset_providers
from tests.messaging.carriers import carrier  # noqa: F401

TYPES = ("iOSPush", "AndroidPush", "Email", "SMS", "KakaoTalk")


@pytest.fixture(autouse=True)
def null_providers(settings):
    """Every channel carried by the null provider; a test that wants another says so."""
    settings.PROVIDERS = dict.fromkeys(TYPES, "null")
    reset_providers()
    yield
    reset_providers()
