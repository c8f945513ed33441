"""The endpoints: who may, what is refused, what is answered."""

import json
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from psycopg.errors import ForeignKeyViolation

from messaging.models import Message
from messaging.services import SubscriptionSpec, upsert_subscriptions
from reminders.models import Alarm, AlarmDelivery, DeletedAlarm, Page, UserInfo
from reminders.services import pull_changes, send_batch
from tests.messaging.factories import purge_messages
from tests.reminders.factories import NOON, AlarmFactory, ApplicationFactory, PageFactory

pytestmark = pytest.mark.django_db
REGISTER, SCHEDULE = "/api/reminder/register-by-page", "/api/reminder/schedule/v2"
ALARMS, PULL, PAGES = "/api/v1/alarms/", "/api/v1/alarms/sync/", "/api/v1/pages/sync/"


def register(client, page_id="p", user_id="ann", status=200, headers=None, **body):
    answer = client.post(REGISTER, {"page_id": page_id, "user_id": user_id, **body}, headers=headers)
    assert answer.status_code == status, answer.json()
    return answer.json()


def sync(client, status=200, **body):
    answer = client.post(PAGES, {"user_id": "ann", **body})
    assert answer.status_code == status, answer.json()
    return answer.json()


def attrs(answer):
    return {error["attr"] for error in answer["errors"]}


def nothing_written():
    return not (Page.objects.exists() or Alarm.objects.exists() or UserInfo.objects.exists())


# --- register -----------------------------------------------------------------------------------------------------


def test_register_makes_page_alarm_and_user(client):
    before = timezone.now()
    answer = register(client, title="<b>Title</b>", body="Text")
    alarm, page = Alarm.objects.get(), Page.objects.get()
    assert answer == {
        "success": True,
        "alarm_id": str(alarm.pk),
        "next_alarm_time": alarm.next_alarm_time.isoformat().replace("+00:00", "Z"),
        "sent_count": 1,
    }
    assert before <= alarm.next_alarm_time <= timezone.now()
    assert (page.title, page.body, page.user_id) == ("<b>Title</b>", "Text", "ann")
    assert (alarm.title, alarm.body, alarm.occurrence) == ("Title", "Text", 1)
    assert UserInfo.objects.get().timezone == "Asia/Seoul"


def test_register_again_keeps_the_count_unless_reset(client):
    first = register(client, title="t", timezone="Europe/Paris")
    Alarm.objects.update(sent_count=5, next_alarm_time=NOON, processed_at=timezone.now(), retry_at=NOON, refusals=3)
    again = register(client)
    assert (again["alarm_id"], again["sent_count"]) == (first["alarm_id"], 5)
    alarm = Alarm.objects.get()
    assert (alarm.processed_at, alarm.retry_at, alarm.refusals, alarm.occurrence) == (None, None, 0, 2)
    assert (alarm.title, UserInfo.objects.get().timezone) == ("t", "Europe/Paris")
    assert register(client, reset=True)["sent_count"] == 1


def test_register_keeps_what_is_absent(client):
    register(client, title="t", body="b")
    register(client, body="new")
    assert Page.objects.values_list("title", "body").get() == ("t", "new")
    register(client, title="")
    assert Alarm.objects.values_list("title", "body").get() == ("", "new")


@pytest.mark.parametrize(
    ("body", "attr"),
    [
        ({"page_id": None}, "page_id"),
        ({"page_id": ""}, "page_id"),
        ({"page_id": "x" * 256}, "page_id"),
        ({"page_id": "a\x00b"}, "page_id"),
        ({"user_id": ""}, "user_id"),
        ({"user_id": " "}, "user_id"),
        ({"user_id": "x" * 256}, "user_id"),
        ({"user_id": ["x"]}, "user_id"),
        ({"user_id": 7}, "user_id"),
        ({"page_id": 7}, "page_id"),
        ({"title": 7}, "title"),
        ({"timezone": 7}, "timezone"),
        ({"reset": "true"}, "reset"),
        ({"reset": 1}, "reset"),
        ({"title": "x" * 10_001}, "title"),
        ({"body": "x" * 1_000_001}, "body"),
        ({"title": None}, "title"),
        ({"title": "", "body": " "}, "title"),
        ({"title": "<br>", "body": "<script>x</script>"}, "title"),
        ({"timezone": "Mars/Base"}, "timezone"),
        ({"timezone": "asia/seoul"}, "timezone"),
        ({"timezone": "localtime"}, "timezone"),
        ({"timezone": ""}, "timezone"),
        ({"timezone": "../etc/passwd"}, "timezone"),
        ({"reset": "perhaps"}, "reset"),
        ({"application": "unknown"}, "application"),
        ({"application": "a b"}, "application"),
        ({"surplus": 1}, "surplus"),
        ({"alarm_id": str(uuid4())}, "alarm_id"),
    ],
)
def test_register_refuses_bad_input_and_writes_nothing(client, body, attr):
    answer = client.post(REGISTER, {"page_id": "p", "user_id": "ann", "title": "t", **body})
    assert answer.status_code == 400
    assert attrs(answer.json()) == {attr}
    assert nothing_written()


@pytest.mark.parametrize("missing", ["page_id", "user_id"])
def test_register_needs_page_and_user(client, missing):
    body = {"page_id": "p", "user_id": "ann", "title": "t"}
    answer = client.post(REGISTER, {key: value for key, value in body.items() if key != missing})
    assert answer.status_code == 400 and attrs(answer.json()) == {missing}


@pytest.mark.parametrize("body", [[], "text", 7, None])
def test_register_refuses_what_is_no_object(client, body):
    assert client.post(REGISTER, body, format="json").status_code == 400


def test_the_longest_texts_are_taken(client):
    register(client, title="x" * 10_000, body="y" * 1_000_000)
    assert Page.objects.get().body == "y" * 1_000_000
    assert len(Alarm.objects.get().title) == len(Alarm.objects.get().body) == 2000


def test_the_limit_counts_characters_however_they_are_escaped(client):
    for body, status in (("😀" * 1_000_000, 200), ("😀" * 1_000_001, 400)):
        text = json.dumps({"page_id": "p", "user_id": "ann", "body": body})
        assert client.post(REGISTER, text, content_type="application/json").status_code == status


def test_register_without_a_token_is_401_before_anything_else(api_client):
    assert api_client.post(REGISTER, {}).status_code == 401


def test_register_without_permission_or_application_is_403_before_400(make_client):
    assert make_client("message-sender", username="a").post(REGISTER, {}).status_code == 403
    assert make_client("reminder-client", username="b").post(REGISTER, {}).status_code == 403


def test_a_client_of_several_applications_names_one(client):
    other = ApplicationFactory(slug="other")
    other.members.add(client.user)
    assert attrs(register(client, title="t", status=400)) == {"application"}
    register(client, title="t", application="other")
    assert Page.objects.get().application == other


def test_an_application_that_is_not_the_clients_is_unknown(client):
    ApplicationFactory(slug="foreign")
    answer = register(client, title="t", application="foreign", status=400)
    assert answer["errors"][0]["code"] == "does_not_exist"


@pytest.mark.parametrize("owner", [{"user_id": "bob"}, {"application__slug": "foreign"}])
@pytest.mark.parametrize("deleted_at", [None, NOON])
def test_another_users_page_is_404_and_untouched(client, owner, deleted_at):
    PageFactory(id="p", title="theirs", deleted_at=deleted_at, **owner)
    register(client, title="mine", timezone="Europe/Paris", status=404)
    assert Page.objects.get().title == "theirs"
    assert not Alarm.objects.exists() and not UserInfo.objects.exists()


def test_what_is_wrong_with_the_body_comes_before_the_unknown_page(client):
    PageFactory(id="p", user_id="bob")
    register(client, title="", body="", status=400)


def test_an_unknown_page_without_text_is_404(client):
    register(client, status=404)
    register(client, title="", status=400)
    assert nothing_written()


def test_a_page_known_from_sync_needs_no_text(client):
    sync(client, created=[{"id": "p", "title": "From sync", "body": ""}])
    register(client)
    assert Alarm.objects.get().title == "From sync"


def test_a_page_without_words_is_refused(client):
    sync(client, created=[{"id": "p", "title": "", "body": ""}])
    register(client, status=400)
    assert not Alarm.objects.exists() and not UserInfo.objects.exists()


def test_a_deleted_page_is_revived_with_a_new_alarm(client):
    first = register(client, title="t", body="old")
    sync(client, deleted=["p"])
    register(client, status=404)
    second = register(client, title="back")
    assert second["alarm_id"] != first["alarm_id"]
    page = Page.objects.get()
    assert (page.title, page.body, page.deleted_at) == ("back", "", None)


def test_a_page_deleted_by_hand_is_revived_with_a_new_alarm_too(client):
    first = register(client, title="t", body="old")
    Alarm.objects.update(sent_count=5)
    Page.objects.update(deleted_at=NOON, title="", body="")
    second = register(client, title="back")
    assert second["alarm_id"] != first["alarm_id"] and second["sent_count"] == 1
    assert str(DeletedAlarm.objects.get().pk) == first["alarm_id"]


def test_register_honours_the_idempotency_key(client):
    key = {"Idempotency-Key": "k1"}
    first = register(client, title="t", headers=key)
    assert register(client, title="t", headers=key) == first
    assert Alarm.objects.get().occurrence == 1
    assert register(client, title="other", headers=key, status=409)
    assert attrs(register(client, title="t", headers={"Idempotency-Key": "reminder:x"}, status=400)) == {
        "Idempotency-Key"
    }


def test_no_client_makes_a_message_under_a_reminders_key(make_client, application):
    sender = make_client("message-sender", username="sender")
    application.members.add(sender.user)
    [row] = upsert_subscriptions(application, [SubscriptionSpec("InAppMessage", "ann", user_id="ann")])
    body = {"subscription_id": str(row.pk), "title": "t", "data": {"layout_type": "banner"}}
    single = sender.post("/api/v1/messages/", body, headers={"Idempotency-Key": "reminder:x:1"})
    assert single.status_code == 400 and attrs(single.json()) == {"Idempotency-Key"}
    bulk = sender.post("/api/v1/messages/bulk/", {"messages": [{**body, "idempotency_key": "reminder:x:1"}]})
    assert [result["status"] for result in bulk.json()["results"]] == [400]
    assert not Message.objects.exists()


def test_a_refused_register_does_not_keep_the_key(client):
    key = {"Idempotency-Key": "k1"}
    register(client, headers=key, status=404)
    PageFactory(id="p")
    register(client, headers=key)


# --- schedule/v2 --------------------------------------------------------------------------------------------------


def test_running_a_batch_needs_its_permission(client, make_client, api_client, operator):
    assert api_client.post(SCHEDULE).status_code == api_client.get(SCHEDULE).status_code == 401
    viewer = make_client("viewer", username="viewer")
    assert client.post(SCHEDULE).status_code == viewer.post(SCHEDULE).status_code == 403
    assert client.get(SCHEDULE).status_code == 403
    assert viewer.get(SCHEDULE).status_code == operator.get(SCHEDULE).status_code == 200


def test_a_batch_covers_all_applications(operator):
    AlarmFactory()
    AlarmFactory(page__application__slug="other")
    answer = operator.post(SCHEDULE)
    assert answer.status_code == 200
    body = answer.json()
    assert isinstance(body.pop("processing_time_ms"), int)
    assert body == {"claimed": 2, "sent": 2, "failed": 0, "deferred": 0, "skipped": 0}


@pytest.mark.parametrize(("body", "claimed"), [({}, 100), ({"fetch_limit": 1}, 1), ({"fetch_limit": 1000}, 120)])
def test_the_batch_is_as_large_as_asked(operator, body, claimed):
    AlarmFactory.create_batch(120)
    assert operator.post(SCHEDULE, body).json()["claimed"] == claimed


@pytest.mark.parametrize("limit", [0, 1001, -1, "many", "7", None, 1.5, True, [1]])
def test_a_limit_out_of_range_is_refused(operator, limit):
    AlarmFactory()
    answer = operator.post(SCHEDULE, {"fetch_limit": limit})
    assert answer.status_code == 400 and attrs(answer.json()) == {"fetch_limit"}
    assert not Message.objects.exists()


def test_the_schedule_tells_and_does_nothing(operator):
    assert operator.get(SCHEDULE).json() == {"next_alarm_time": None, "due": 0, "processing": 0, "zombies": 0}
    now = timezone.now()
    AlarmFactory(next_alarm_time=now - timedelta(hours=1))
    AlarmFactory(next_alarm_time=now - timedelta(hours=9), processed_at=now)
    AlarmFactory(next_alarm_time=now - timedelta(hours=8), processed_at=now - timedelta(hours=7))
    AlarmFactory(next_alarm_time=now + timedelta(hours=1))
    answer = operator.get(SCHEDULE).json()
    assert answer.pop("next_alarm_time") == (now - timedelta(hours=8)).isoformat().replace("+00:00", "Z")
    assert answer == {"due": 2, "processing": 1, "zombies": 1}
    assert not Message.objects.exists()


# --- alarms -------------------------------------------------------------------------------------------------------


def test_alarms_without_a_time_come_first_then_by_time(client):
    later, sooner = AlarmFactory(next_alarm_time=NOON), AlarmFactory(next_alarm_time=NOON - timedelta(days=1))
    timeless = AlarmFactory.create_batch(2, next_alarm_time=None)
    wanted = [*(str(row.pk) for row in timeless), str(sooner.pk), str(later.pk)]
    assert [row["id"] for row in client.get(ALARMS).json()["results"]] == wanted
    seen, url = [], f"{ALARMS}?page_size=1"
    while url:
        page = client.get(url).json()
        seen += [row["id"] for row in page["results"]]
        last, url = page, page["next"]
    assert seen == wanted
    back = []
    while last["previous"]:
        last = client.get(last["previous"]).json()
        back += [row["id"] for row in last["results"]]
    assert back == wanted[-2::-1]
    down = client.get(f"{ALARMS}?ordering=-next_alarm_time").json()["results"]
    assert [row["id"] for row in down] == wanted[::-1]


@pytest.mark.parametrize(("ordering", "reverse"), [("updated_at", False), ("-updated_at", True)])
def test_alarms_are_ordered_by_their_change_as_the_index_is(client, ordering, reverse):
    alarms = AlarmFactory.create_batch(3)
    with CaptureQueriesContext(connection) as caught:
        rows = client.get(f"{ALARMS}?ordering={ordering}").json()["results"]
    assert [row["id"] for row in rows] == [str(row.pk) for row in alarms][:: -1 if reverse else 1]
    assert not [query["sql"] for query in caught if "NULLS" in query["sql"]]


def test_an_alarm_shows_these_fields(client):
    AlarmFactory()
    assert list(client.get(ALARMS).json()["results"][0]) == [
        "id", "page_id", "user_id", "title", "body", "next_alarm_time", "sent_count", "last_notification_id",
        "processed_at", "created_at", "updated_at",
    ]  # fmt: skip


def test_alarms_are_filtered_by_user_and_tenant(client, operator):
    mine, bobs = AlarmFactory(), AlarmFactory(page__user_id="bob")
    AlarmFactory(page__application__slug="foreign")
    assert [row["id"] for row in client.get(f"{ALARMS}?user_id=ann").json()["results"]] == [str(mine.pk)]
    assert {row["id"] for row in client.get(ALARMS).json()["results"]} == {str(mine.pk), str(bobs.pk)}
    assert len(operator.get(ALARMS).json()["results"]) == 3
    assert client.get(f"{ALARMS}?user_id=a%00b").status_code == 400
    assert client.get(f"{ALARMS}?user=ann").status_code == 400


def test_deleting_an_alarm_leaves_its_page_and_a_tombstone(client):
    alarm = AlarmFactory()
    assert client.delete(f"{ALARMS}{alarm.pk}/").status_code == 204
    assert client.delete(f"{ALARMS}{alarm.pk}/").status_code == 404
    assert Page.objects.get().deleted_at is None
    stone = DeletedAlarm.objects.get()
    assert (stone.pk, stone.application_id, stone.user_id) == (alarm.pk, alarm.application_id, "ann")


def test_a_foreign_alarm_cannot_be_deleted(client, make_client):
    alarm = AlarmFactory(page__application__slug="foreign")
    assert client.delete(f"{ALARMS}{alarm.pk}/").status_code == 404
    assert client.delete(f"{ALARMS}nonsense/").status_code == 404
    assert make_client("viewer", username="viewer").delete(f"{ALARMS}{alarm.pk}/").status_code == 403
    assert Alarm.objects.exists()


# --- pages/sync ---------------------------------------------------------------------------------------------------


def test_pages_are_created_updated_and_deleted_in_this_order(client):
    PageFactory(id="old", title="before")
    PageFactory(id="gone")
    done = sync(
        client,
        created=[{"id": "new", "title": "a", "body": "b"}, {"id": "short", "title": "x", "body": ""}],
        updated=[{"id": "old", "title": "after", "body": "c"}],
        deleted=["gone", "missing", "short"],
    )
    assert done == {"created": 2, "updated": 1, "deleted": 2}
    pages = {page.pk: page for page in Page.objects.all()}
    assert (pages["new"].title, pages["old"].title) == ("a", "after")
    assert pages["gone"].deleted_at and pages["short"].deleted_at
    assert (pages["gone"].title, pages["gone"].body) == ("", "")


def test_created_of_an_existing_page_updates_and_updated_of_a_missing_creates(client):
    PageFactory(id="old", title="before")
    done = sync(
        client, created=[{"id": "old", "title": "t", "body": "b"}], updated=[{"id": "new", "title": "n", "body": ""}]
    )
    assert done == {"created": 1, "updated": 1, "deleted": 0}
    assert Page.objects.get(pk="old").title == "t"
    assert Page.objects.get(pk="new").title == "n"


def test_deleting_a_page_deletes_its_alarm(client):
    alarm = AlarmFactory(page__id="p")
    assert sync(client, deleted=["p", "p"]) == {"created": 0, "updated": 0, "deleted": 1}
    assert not Alarm.objects.exists()
    assert DeletedAlarm.objects.get().pk == alarm.pk
    assert sync(client, deleted=["p"])["deleted"] == 0
    assert sync(client, created=[{"id": "p", "title": "back", "body": ""}])["created"] == 1
    assert Page.objects.get().deleted_at is None


@pytest.mark.parametrize("owner", [{"user_id": "bob"}, {"application__slug": "foreign"}])
@pytest.mark.parametrize("name", ["created", "updated"])
def test_writing_anothers_page_is_404_and_writes_nothing(client, owner, name):
    PageFactory(id="theirs", title="theirs", **owner)
    items = [{"id": "new", "title": "n", "body": ""}, {"id": "theirs", "title": "mine", "body": ""}]
    assert attrs(sync(client, status=404, **{name: items})) == {f"{name}.1.id"}
    assert Page.objects.get().title == "theirs"


def test_deleting_anothers_page_counts_as_missing(client):
    AlarmFactory(page__id="theirs", page__user_id="bob")
    assert sync(client, deleted=["theirs"])["deleted"] == 0
    assert Alarm.objects.exists()


@pytest.mark.parametrize(
    ("body", "attr"),
    [
        ({"created": [{"id": "a", "title": "t", "body": ""}, {"title": "no id", "body": ""}]}, "created.1.id"),
        ({"created": [{"id": "x" * 256, "title": "t", "body": ""}]}, "created.0.id"),
        ({"updated": [{"id": "a", "title": "x" * 10_001, "body": ""}]}, "updated.0.title"),
        ({"updated": [{"id": "a", "surplus": 1}]}, "updated.0.surplus"),
        ({"updated": {"id": "a"}}, "updated"),
        ({"deleted": [{}]}, "deleted.0"),
        ({"deleted": [7]}, "deleted.0"),
        ({"deleted": ["a"] * 501}, "deleted"),
        ({"created": [{"id": str(n), "title": "t", "body": ""} for n in range(501)]}, "created"),
        ({"user_id": ""}, "user_id"),
        ({"surplus": []}, "surplus"),
    ],
)
def test_one_bad_item_refuses_all(client, body, attr):
    assert attrs(sync(client, status=400, **{"created": [{"id": "good", "title": "t", "body": ""}], **body})) == {attr}
    assert nothing_written()


def test_pages_of_the_largest_sync_take_few_queries(client, django_assert_max_num_queries):
    items = [{"id": f"p{n}", "title": "t", "body": "b"} for n in range(500)]
    with django_assert_max_num_queries(20):
        assert sync(client, created=items, updated=items, deleted=[item["id"] for item in items]) == {
            "created": 500,
            "updated": 500,
            "deleted": 500,
        }


# --- pull ---------------------------------------------------------------------------------------------------------


def pull(client, **query):
    answer = client.get(PULL, query)
    assert answer.status_code == 200, answer.json()
    return answer.json()


def test_a_pull_brings_what_changed_and_what_is_gone(client):
    kept, gone = AlarmFactory(), AlarmFactory()
    first = pull(client)
    assert {row["id"] for row in first["changed"]} == {str(kept.pk), str(gone.pk)}
    assert first["deleted"] == []
    Alarm.objects.filter(pk=gone.pk).delete()
    second = pull(client, since=first["until"])
    assert (second["changed"], second["deleted"]) == ([], [str(gone.pk)])
    third = pull(client, since=second["until"])
    assert (third["changed"], third["deleted"]) == ([], [])
    send_batch(NOON)
    assert [row["sent_count"] for row in pull(client, since=third["until"])["changed"]] == [2]


def test_what_is_too_much_for_one_pull_comes_with_the_next(application):
    kept, gone = ([AlarmFactory().pk for _n in range(n)] for n in (5, 3))
    for key in gone:
        Alarm.objects.filter(pk=key).delete()
    pulls, since = [], None
    while not pulls or pulls[-1].changed or pulls[-1].deleted:
        pulls.append(pull_changes([application.pk], None, since, most=2))
        since = pulls[-1].until
    assert [alarm.pk for part in pulls for alarm in part.changed] == kept
    assert [key for part in pulls for key in part.deleted] == gone
    assert max(len(part.changed) for part in pulls) == max(len(part.deleted) for part in pulls) == 2


def test_alarms_changed_at_one_instant_are_pulled_together(application):
    alarms = {AlarmFactory().pk for _n in range(5)}
    at = timezone.now() - timedelta(hours=1)
    Alarm.objects.update(updated_at=at)
    first = pull_changes([application.pk], None, None, most=2)
    assert {alarm.pk for alarm in first.changed} == alarms and first.until == at
    assert pull_changes([application.pk], None, first.until, most=2).changed == []


def test_a_claim_or_a_refusal_is_not_pulled(client):
    AlarmFactory(page__title="", page__body="")
    since = pull(client)["until"]
    send_batch(NOON)
    assert Alarm.objects.get().retry_at
    assert pull(client, since=since)["changed"] == []


def test_a_pull_is_the_clients_and_the_users_own(client, operator):
    AlarmFactory()
    AlarmFactory(page__user_id="bob")
    AlarmFactory(page__application__slug="foreign").delete()
    assert len(pull(client)["changed"]) == 2 and pull(client)["deleted"] == []
    assert [row["user_id"] for row in pull(client, user_id="bob")["changed"]] == ["bob"]
    assert len(pull(operator)["deleted"]) == 1


@pytest.mark.parametrize(
    ("query", "attr"),
    [
        ("since=yesterday", "since"),
        ("since=", "since"),
        ("since=0001-01-01T00:00:00%2B14:00", "since"),
        ("since=2026-01-01T00:00:00Z%00", "since"),
        ("user_id=%00", "user_id"),
        ("user_id=", "user_id"),
        ("page=2", "page"),
    ],
)
def test_a_pull_refuses_bad_input(client, query, attr):
    answer = client.get(f"{PULL}?{query}")
    assert answer.status_code == 400 and attrs(answer.json()) == {attr}


@pytest.mark.parametrize("sign", ["+", "%2B"])
def test_a_pull_reads_a_zone_whether_its_plus_is_encoded_or_not(client, sign):
    AlarmFactory()
    Alarm.objects.update(updated_at=NOON)
    for since, found in (("11:59:59.999999", 1), ("12:00:00", 0)):
        answer = client.get(f"{PULL}?since=2026-03-04T{since}{sign}09:00")
        assert answer.status_code == 200 and len(answer.json()["changed"]) == found


def test_an_alarm_made_again_under_its_old_id_is_alive(client):
    alarm = AlarmFactory()
    key = alarm.pk
    alarm.delete()
    AlarmFactory(pk=key)
    assert pull(client)["deleted"] == []
    Alarm.objects.get().delete()
    assert pull(client)["deleted"] == [str(key)]
    assert DeletedAlarm.objects.count() == 1


# --- what the database itself holds -------------------------------------------------------------------------------


def sql(text, *values):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(text, values)


def test_an_alarm_inserted_by_hand_is_completed_by_the_database():
    page = PageFactory(id="p")
    sql("INSERT INTO alarm (page_id) VALUES ('p')")
    alarm = Alarm.objects.get()
    assert (alarm.application_id, alarm.user_id, alarm.sent_count, alarm.occurrence) == (
        page.application_id,
        "ann",
        1,
        1,
    )


def test_an_alarm_of_no_page_inserted_by_hand_is_refused_for_its_page():
    with pytest.raises(IntegrityError) as refused:
        sql("INSERT INTO alarm (page_id, user_id) VALUES ('p', 'ann')")
    assert isinstance(refused.value.__cause__, ForeignKeyViolation)


def test_an_alarm_may_be_dated_back_when_inserted_or_changed_by_hand():
    PageFactory(id="p")
    sql("INSERT INTO alarm (page_id, updated_at) VALUES ('p', '2020-01-01Z')")
    assert Alarm.objects.get().updated_at == datetime(2020, 1, 1, tzinfo=UTC)
    sql("UPDATE alarm SET sent_count = 2, next_alarm_time = now(), updated_at = '2021-01-01Z'")
    assert Alarm.objects.get().updated_at == datetime(2021, 1, 1, tzinfo=UTC)
    sql("UPDATE alarm SET sent_count = 3, updated_at = '2999-01-01Z'")
    assert Alarm.objects.get().updated_at <= timezone.now()


@pytest.mark.parametrize(
    "change", ["sent_count = 0", "sent_count = NULL", "sent_count = 2, next_alarm_time = NULL", "occurrence = 0"]
)
def test_the_database_refuses_impossible_alarms(change):
    AlarmFactory()
    with pytest.raises(IntegrityError):
        sql(f"UPDATE alarm SET {change}")


def test_one_alarm_per_page():
    page = PageFactory()
    AlarmFactory(page=page)
    with pytest.raises(IntegrityError):
        AlarmFactory(page=page)


def test_deleting_a_page_in_sql_takes_its_alarm_along():
    AlarmFactory()
    sql("DELETE FROM pages")
    assert not Alarm.objects.exists() and DeletedAlarm.objects.exists()


def test_deleting_an_application_leaves_tombstones_and_deliveries():
    alarm = AlarmFactory()
    send_batch(NOON)
    purge_messages()
    alarm.application.delete()
    assert not Alarm.objects.exists() and not Page.objects.exists()
    assert DeletedAlarm.objects.exists() and AlarmDelivery.objects.exists()


def test_updated_at_follows_changes_and_may_be_moved_by_hand():
    AlarmFactory()
    sql("UPDATE alarm SET updated_at = '2020-01-01Z'")
    sql("UPDATE alarm SET processed_at = now(), retry_at = now()")
    assert Alarm.objects.get().updated_at == datetime(2020, 1, 1, tzinfo=UTC)
    sql("UPDATE alarm SET processed_at = NULL, sent_count = sent_count + 1")
    assert Alarm.objects.get().updated_at > datetime(2026, 1, 1, tzinfo=UTC)
