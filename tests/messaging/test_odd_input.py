"""Input nobody means to send: each a 4xx, none a 500."""

import pytest
from django.utils import timezone

from tests.messaging.factories import ApplicationFactory, message_in, subscribe

pytestmark = pytest.mark.django_db
ODD_TIMES = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "2026-02-30T00:00:00Z", "", 5, None, "now"]


@pytest.fixture
def client(make_client):
    client = make_client("operator")
    ApplicationFactory(slug="shop").members.add(client.user)
    return client


@pytest.fixture
def row(client):
    return message_in("successful", subscribe(client.user.applications.get()), at=timezone.now())


@pytest.mark.parametrize("time", ODD_TIMES)
def test_odd_times(client, row, time):
    sending = {"subscription_id": str(row.subscription_id), "title": "x", "scheduled_at": time}
    assert client.post("/api/v1/messages/", sending).status_code in (201, 400)
    assert client.post(f"/api/v1/messages/{row.pk}/receive/", {"occurred_at": time}).status_code in (200, 400)
    assert client.get("/api/v1/messages/", {"created_after": str(time)}).status_code in (200, 400)


@pytest.mark.parametrize("body", [[], "x", 5, True, [[]]])
@pytest.mark.parametrize(
    "url",
    ["messages/", "messages/bulk/", "subscriptions/", "templates/", "suppressions/", "messages/{}/receive/",
     "messages/{}/convert/", "messages/{}/cancel/", "messages/{}/resolve/"],
)  # fmt: skip
def test_bodies_that_are_no_object(client, row, url, body):
    response = client.post(f"/api/v1/{url.format(row.pk)}", body, format="json")
    assert response.status_code == 400


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é".encode().decode("latin-1")])
def test_odd_keys(client, row, key):
    sending = {"subscription_id": str(row.subscription_id), "title": "x"}
    response = client.post("/api/v1/messages/", sending, HTTP_IDEMPOTENCY_KEY=key)
    assert (response.status_code, response.json()["errors"][0]["attr"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("query", ["status=%00", "campaign=a%00b", "subscription_id=x", "page_size=0", "cursor=x"])
def test_odd_queries(client, query):
    assert client.get(f"/api/v1/messages/?{query}").status_code == 400


@pytest.mark.parametrize("pk", ["x", "%00", "01900000-0000-7000-8000-000000000000", "1" * 5000])
def test_ids_of_nothing(client, pk):
    for url in ("messages", "subscriptions", "templates", "suppressions"):
        assert client.get(f"/api/v1/{url}/{pk}/").status_code == 404
