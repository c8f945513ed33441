from datetime import timedelta

import pytest

from config import sweeping
from messaging.models import Message
from messaging.providers import reset_providers


@pytest.fixture(autouse=True)
def providers(settings):
    """Whatever is created can be sent: by the provider that does nothing."""
    settings.PROVIDERS = {"Email": "null", "SMS": "null", "KakaoTalk": "null"}
    reset_providers()
    yield
    reset_providers()


@pytest.fixture
def sweep(db, settings):
    """Run a sweep of campaigns as of a time; its counts, and no error. On a busy machine its time is not up earlier."""
    settings.SWEEP_BUDGET = timedelta(minutes=10)
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, "timeout": 3600}

    def run(name, now, **how):
        ran = sweeping.run(f"campaigns.{name}", now=now, wait=True, **how)
        assert ran["error"] is None, ran
        return {key: count for key, count in ran["counts"].items() if count}

    return run


@pytest.fixture
def deliver(db):
    """What the dispatcher does to the messages that are due: all accepted, or failed as told."""

    def run(now, reason=None, scope="recipient", only=None):
        rows = Message.objects.filter(status="pending").exclude(scheduled_at__gt=now)
        rows = rows if only is None else rows.filter(pk__in=only)
        if reason is None:
            return rows.update(status="successful", sent_at=now)
        details = {"scope": scope}
        return rows.update(status="failed", failed_at=now, error_reason=reason, error_details=details)

    return run
