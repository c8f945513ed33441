import pytest

from messaging.providers import reset_providers


@pytest.fixture(autouse=True)
def providers(settings):
    """Push and e-mail are not set up unless a test says so; the inbox always works."""

    def use(**names):
        settings.PROVIDERS = names
        reset_providers()

    use()
    yield use
    reset_providers()


@pytest.fixture
def client(make_client, application):
    client = make_client("reminder-client")
    application.members.add(client.user)
    return client


@pytest.fixture
def application(db):
    from tests.reminders.factories import ApplicationFactory

    return ApplicationFactory()


@pytest.fixture
def operator(make_client):
    return make_client("operator", username="operator")


@pytest.fixture
def api_client():
    from rest_framework.test import APIClient

    return APIClient()
