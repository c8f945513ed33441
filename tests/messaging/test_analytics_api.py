from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from tests.messaging.factories import ApplicationFactory, message, message_in, subscribe

pytestmark = pytest.mark.django_db
URL = "/api/v1/analytics/messages/"
DAY = datetime(2026, 3, 10, tzinfo=UTC)


@pytest.fixture
def sender(make_client):
    client = make_client("message-sender")
    client.application = ApplicationFactory()
    client.application.members.add(client.user)
    return client


def test_the_form_of_the_answer(sender):
    message_in("received", subscribe(sender.application), at=DAY + timedelta(hours=1))
    answer = sender.get(URL, {"from": "2026-03-10", "to": "2026-03-11", "group_by": "channel"})
    assert answer.status_code == 200
    found = answer.json()
    assert list(found) == ["from", "to", "group_by", "totals", "results"]
    assert (found["from"], found["to"], found["group_by"]) == (
        "2026-03-10T00:00:00Z",
        "2026-03-11T00:00:00Z",
        "channel",
    )
    (row,) = found["results"]
    assert row["key"] == "push" and row["received"] == 1
    assert {name: value for name, value in row.items() if name != "key"} == found["totals"]
    assert set(found["totals"]) == {
        "created", "sent", "received", "converted", "failed", "errored", "pending", "cancelled", "failed_after_send",
        "send_rate", "reach_rate", "conversion_rate", "overall_conversion_rate", "latencies", "retry_effectiveness",
    }  # fmt: skip


def test_a_rate_is_not_rounded(sender):
    to = subscribe(sender.application)
    for state in ("successful", *["failed"] * 5):
        message_in(state, to, at=DAY)
    assert sender.get(URL, {"from": "2026-03-10", "to": "2026-03-11"}).json()["totals"]["send_rate"] == 1 / 6


def test_only_own_applications_are_counted(sender, make_client):
    message(subscribe(), now=DAY)
    query = {"from": "2026-03-10", "to": "2026-03-11"}
    assert sender.get(URL, query).json()["totals"]["created"] == 0
    assert make_client("viewer", username="v").get(URL, query).json()["totals"]["created"] == 1


def test_without_a_range_the_last_thirty_days_are_told(sender):
    message(subscribe(sender.application), now=timezone.now())
    message(subscribe(sender.application), now=timezone.now() - timedelta(days=60))
    assert sender.get(URL).json()["totals"]["created"] == 1


@pytest.mark.parametrize(
    ("start", "end", "count"),
    [
        ("2026-03-10T09:00:00Z", "2026-03-10T09:00:01Z", 1),
        ("2026-03-10T18:00:00+09:00", "2026-03-10T18:00:01+09:00", 1),
        ("2026-03-10T18:00:00 09:00", "2026-03-11", 1),
        ("2026-03-10T09:00:00", "2026-03-10T09:00:00", 0),
        ("2026-03-10T09:00:00.000001Z", "2026-03-11", 0),
        ("0001-01-01", "9999-12-31", 1),
    ],
)
def test_times_may_have_any_form(sender, start, end, count):
    message(subscribe(sender.application), now=DAY + timedelta(hours=9))
    answer = sender.get(URL, {"from": start, "to": end})
    assert answer.status_code == 200 and answer.json()["totals"]["created"] == count


@pytest.mark.parametrize(
    ("query", "attr"),
    [
        ({"from": "soon"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"to": ""}, "to"),
        ({"from": "2026-03-11", "to": "2026-03-10"}, "from"),
        ({"group_by": "week"}, "group_by"),
        ({"group_by": "tag"}, "tag"),
        ({"group_by": "tag", "tag": ""}, "tag"),
        ({"group_by": "tag", "tag": "a\x00"}, "tag"),
        ({"tag": "x"}, "tag"),
        ({"until": "2026-03-10"}, "until"),
        ({"from": "0001-01-01T00:00:00+14:00"}, "from"),
    ],
)
def test_a_bad_query_is_a_400_naming_it(sender, query, attr):
    answer = sender.get(URL, query)
    assert answer.status_code == 400 and answer.json()["errors"][0]["attr"] == attr


def test_who_may(make_client, client):
    assert client.get(URL).status_code == 401
    assert make_client("message-client", username="phone").get(URL).status_code == 403
    assert make_client("operator", username="op").get(URL).status_code == 200
    assert make_client("viewer", username="v").post(URL).status_code == 405
