import json
import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import Group, Permission, User
from django.db import connection, transaction
from django.db.models import F
from rest_framework import serializers
from rest_framework.test import APIClient

from config.models import IdempotencyKey, SweepRun, ThrottleWindow
from config.rest import Moment
from tests.config import rest_urls

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.config.rest_urls")]


@pytest.fixture
def client(make_client):
    return make_client(username="root", is_superuser=True)


def first_error(response, status):
    assert response.status_code == status, response.content
    return response.json()["errors"][0]


def post_raw(client, body, content_type="application/json"):
    return client.generic("POST", "/api/v1/echo/", body, content_type)


# errors


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("transition", 409, "illegal_transition"),
        ("graph", 409, "illegal_transition"),
        ("unique", 409, "conflict"),
        ("null", 400, "null"),
        ("lock_timeout", 503, "busy"),
        ("deadlock", 503, "busy"),
        ("canceled", 503, "busy"),
        ("too_long", 400, "invalid"),
        ("away", 503, "unavailable"),
        ("range", 400, "invalid"),
        ("nul", 400, "invalid"),
        ("data", 400, "invalid"),
        ("404", 404, "not_found"),
        ("nameless", 500, "error"),
        ("bug", 500, "error"),
    ],
)
@pytest.mark.django_db(transaction=True)
def test_every_exception_has_its_answer(client, what, status, code):
    client.raise_request_exception = False
    response = client.get(f"/api/v1/raise/{what}/")
    assert first_error(response, status)["code"] == code
    assert (response.headers.get("Retry-After") is not None) == (status == 503)


def test_domain_error_carries_extra_attr_and_rounded_wait(client):
    response = client.get("/api/v1/raise/conflict/")
    assert response.json() == {
        "type": "client_error",
        "errors": [{"code": "taken", "detail": "no", "attr": "name"}],
        "id": 7,
    }
    assert (response.status_code, response["Retry-After"]) == (409, "2")


def test_domain_error_with_body_answers_with_it_alone(client):
    response = client.get("/api/v1/raise/held/")
    assert (response.status_code, response.json(), response["Retry-After"]) == (423, {"holder": "someone"}, "1")


@pytest.mark.django_db(transaction=True)
def test_constraint_is_named(client):
    assert "auth_group_name" in first_error(client.get("/api/v1/raise/unique/"), 409)["detail"]


# bodies


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": NaN}',
        b'{"text": 1e999}',
        b'{"text": Infinity}',
        b'{"text": "\xff"}',
        b'{"text": "\x00"}',
        b'{"a\\u0000": 1}',
        b'{"a\\ud800": 1}',
        b'["\\u0000"]',
        b"{",
        b"1" * 5000,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"[" * 102 + b"1" + b"]" * 102,
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
)
def test_unreadable_json_is_400(client, body):
    assert first_error(post_raw(client, body), 400)["code"] == "parse_error"


@pytest.mark.parametrize("text", ["\\u0000", "a\\ud800", "\\uDC00b", "\\uD83D", "\\udead\\ud83d"])
@pytest.mark.parametrize("shape", ['{"text": "%s"}', '{"ok": 1, "text": [{"x": ["%s"]}]}', '{"text": {"%s": 1}}'])
def test_nul_and_lone_surrogates_are_400_naming_the_field(client, text, shape):
    assert first_error(post_raw(client, shape % text), 400)["attr"] == "text"


def test_surrogate_pairs_duplicate_keys_and_100_levels_are_fine(client):
    assert post_raw(client, b'{"text": "a", "text": "\\ud83d\\ude00"}').json() == {"text": "\U0001f600"}
    assert first_error(post_raw(client, b"[" * 100 + b"]" * 100), 400)["code"] != "parse_error"


def test_too_large_body_is_413(client, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 30
    assert post_raw(client, b'{"text": "%s"}' % (b"a" * 18)).status_code == 200
    assert first_error(post_raw(client, b'{"text": "%s"}' % (b"a" * 19)), 413)["code"] == "too_large"


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_other_content_type_is_415(client, content_type):
    assert first_error(post_raw(client, b'{"text": "a"}', content_type), 415)


@pytest.mark.parametrize("content_type", ["application/json", ""])
def test_empty_body_is_an_empty_object(client, content_type):
    assert post_raw(client, b"", content_type).json() == {}


def test_unknown_fields_are_named_also_in_nested_objects(client):
    response = client.post("/api/v1/echo/", {"txt": 1, "inner": {"size": "x", "sice": 2}})
    assert {(e["attr"], e["code"]) for e in response.json()["errors"]} == {
        ("txt", "unknown_field"),
        ("inner.sice", "unknown_field"),
        ("inner.size", "invalid"),
    }


def test_read_only_field_in_a_request_is_refused(client):
    error = first_error(client.post("/api/v1/groups/", {"id": 5, "name": "a"}), 400)
    assert (error["attr"], error["code"]) == ("id", "read_only")


@pytest.mark.parametrize("payload", [[], "x", 1, None, {"a": "x" * 100}, {"a": "é" * 50}])
def test_json_object_refuses_other_kinds_and_sizes(client, payload):
    assert first_error(client.post("/api/v1/echo/", {"payload": payload}), 400)["attr"] == "payload"


@pytest.mark.parametrize("text", ["2026-12-01T09:00:00", "2026-12-01 09:00", "2026-12-01", "1899-12-31T00:00:00Z", 7])
def test_a_time_without_its_zone_or_beyond_reckoning_is_refused(text):
    with pytest.raises(serializers.ValidationError):
        Moment().run_validation(text)


@pytest.mark.parametrize("text", ["2026-12-01T09:00:00Z", "2026-12-01T18:00:00+09:00", "2026-12-01 09:00Z"])
def test_a_time_is_kept_in_utc(text):
    assert Moment().run_validation(text) == datetime(2026, 12, 1, 9, tzinfo=UTC)


def test_json_object_is_kept_as_sent(client):
    assert client.post("/api/v1/echo/", {"payload": {"a": [1, None]}}).json() == {"payload": {"a": [1, None]}}


# lists


def make_runs(*ended, name="x"):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for minutes in ended:
        end = None if minutes is None else start + timedelta(minutes=minutes)
        SweepRun.objects.create(name=name, now=start, started_at=start, ended_at=end)


def walk(client, url, link="next"):
    while url:
        page = client.get(url).json()
        yield page["results"]
        url = page[link]


@pytest.mark.parametrize("ordering", ["ended_at", "-ended_at", "name", "-name", "slot"])
@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_pages_show_every_row_once_over_ties_and_nulls_and_back_again(client, ordering, size):
    make_runs(1, 1, 1, None, None, 2, 3, None, 3)
    expected = list(SweepRun.objects.order_by(ordering, "-pk" if ordering[0] == "-" else "pk").values_list("pk"))
    url = f"/api/v1/runs/?ordering={ordering}&page_size={size}"
    pages = list(walk(client, url))
    assert [(uuid.UUID(row["id"]),) for page in pages for row in page] == expected
    last = url
    while link := client.get(last).json()["next"]:
        last = link
    back = list(walk(client, last, "previous"))
    assert [page for page in back if page] == pages[::-1]


def test_default_is_fifty_newest_first_and_five_hundred_at_most(client):
    Group.objects.bulk_create(Group(name=f"g{n}") for n in range(501))
    page = client.get("/api/v1/groups/").json()
    assert set(page) == {"next", "previous", "results"} and page["previous"] is None
    ids = [row["id"] for row in page["results"]]
    assert len(ids) == 50 and ids == sorted(ids, reverse=True)
    assert len(client.get("/api/v1/groups/?page_size=99999999").json()["results"]) == 500


@pytest.mark.parametrize("size", ["0", "-1", "x", "", "1.5", "+1", "٣", "000"])
def test_bad_page_size_is_400(client, size):
    assert first_error(client.get("/api/v1/groups/", {"page_size": size}), 400)["attr"] == "page_size"


@pytest.mark.parametrize("ordering", ["password", "--name", "", "name,id", "user__password", "-"])
def test_ordering_outside_the_list_is_400(client, ordering):
    assert first_error(client.get("/api/v1/groups/", {"ordering": ordering}), 400)["attr"] == "ordering"


@pytest.mark.parametrize("cursor", ["", "x", "é", "bnVsbA==", "W10=", "cD0xMjM=", "WyItaWQiLCBmYWxzZSwgIngiLCAieCJd"])
def test_bad_cursor_is_400(client, cursor):
    assert first_error(client.get("/api/v1/groups/", {"cursor": cursor}), 400)["attr"] == "cursor"


def test_cursor_of_another_ordering_is_400(client):
    make_runs(1, 2)
    link = client.get("/api/v1/runs/?ordering=ended_at&page_size=1").json()["next"]
    response = client.get(link.replace("ordering=ended_at", "ordering=name"))
    assert first_error(response, 400)["attr"] == "cursor"


def test_unknown_query_parameter_is_400_naming_it(client):
    error = first_error(client.get("/api/v1/groups/?nmae=x"), 400)
    assert (error["attr"], error["code"]) == ("nmae", "unknown_parameter")
    assert client.get("/api/v1/groups/?name=x&verbose=1&page_size=2&ordering=name").status_code == 200
    assert client.get("/api/v1/runs/?started_at_after=2026-01-01T00:00:00Z").status_code == 200


@pytest.mark.parametrize("query", ["name=%00", "verbose=a%00", "name=a&name=%00", "%00=1"])
def test_nul_in_a_query_is_400(client, query):
    assert first_error(client.get(f"/api/v1/groups/?{query}"), 400)


@pytest.mark.parametrize("query", ["slot=x", "started_at_after=yesterday", "slot=NaN"])
def test_bad_filter_value_is_400(client, query):
    assert first_error(client.get(f"/api/v1/runs/?{query}"), 400)


# access


def granted(make_client, *codenames):
    client = make_client(username="someone")
    client.user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    return client


def test_no_credentials_is_401_before_anything_else(client):
    client.credentials()
    for response in (
        client.get("/api/v1/groups/?nonsense=1"),
        client.get("/api/v1/runs/not-a-uuid/"),
        post_raw(client, b"{"),
        client.get("/api/v1/guarded/"),
    ):
        assert first_error(response, 401)["code"] == "not_authenticated"


def test_staff_use_their_session_and_writes_need_the_token_of_its_forms():
    staff = User.objects.create_superuser("staff")
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(staff, settings.AUTHENTICATION_BACKENDS[-1])
    assert client.get("/api/v1/groups/").status_code == 200
    assert first_error(client.post("/api/v1/echo/", {}), 403)["code"] == "permission_denied"
    client.cookies["csrftoken"] = "c" * 32
    assert client.post("/api/v1/echo/", {}, headers={"X-CSRFToken": "c" * 32}).status_code == 200
    User.objects.filter(pk=staff.pk).update(is_active=False)
    assert client.get("/api/v1/groups/").status_code == 401


def test_missing_permission_is_403_before_404_and_400(make_client):
    client = granted(make_client)
    for response in (
        client.get("/api/v1/groups/?nonsense=1"),
        client.get("/api/v1/groups/999999/"),
        client.post("/api/v1/groups/", {"nonsense": 1}),
        client.get("/api/v1/runs/not-a-uuid/"),
        client.get("/api/v1/guarded/"),
        client.post("/api/v1/guarded/"),
    ):
        assert first_error(response, 403)["code"] == "permission_denied"


def test_model_permissions_follow_the_verb(make_client):
    Group.objects.create(pk=77_000, name="a")
    url = "/api/v1/groups/77000/"
    assert granted(make_client, "view_group").get(url).status_code == 200
    assert granted(make_client, "view_group").patch(url, {"name": "b"}).status_code == 403
    assert granted(make_client, "change_group").patch(url, {"name": "b"}).status_code == 200
    assert granted(make_client, "change_group").get(url).status_code == 403
    assert granted(make_client, "add_group").post(f"{url}touch/").status_code == 403
    assert granted(make_client, "change_group").post(f"{url}touch/").status_code == 200
    assert granted(make_client, "delete_group").delete(url).status_code == 204


def test_required_permission_of_the_action_wins(make_client):
    Group.objects.create(pk=77_000, name="a")
    url = "/api/v1/groups/77000/rename/"
    assert granted(make_client, "change_group").post(url, {"name": "b"}).status_code == 403
    assert granted(make_client, "delete_group").post(url, {"name": "b"}).status_code == 204


def test_view_without_model_needs_authentication_only(make_client):
    assert granted(make_client).post("/api/v1/echo/", {}).status_code == 200


def test_unsupported_method_is_405(make_client):
    assert granted(make_client).put("/api/v1/echo/", {}).status_code == 405


@pytest.mark.parametrize("pk", ["x", "1", "a.b", "%00", "urn:uuid:0190a5b4-0000-7000-8000-000000000000", "0" * 32])
def test_malformed_uuid_is_404(client, pk):
    assert first_error(client.get(f"/api/v1/runs/{pk}/"), 404)["code"] == "not_found"


def test_well_formed_uuid_finds_its_row(client):
    make_runs(1)
    pk = str(SweepRun.objects.get().pk)
    assert client.get(f"/api/v1/runs/{pk}/").status_code == 200
    assert client.get(f"/api/v1/runs/{pk.upper()}/").status_code == 200


def test_tenant_sees_own_rows_and_who_may_sees_all(make_client):
    mine, foreign = Group.objects.create(name="mine"), Group.objects.create(name="foreign")
    client = granted(make_client, "view_group")
    client.user.groups.set([mine])
    assert [row["id"] for row in client.get("/api/v1/tenants/").json()["results"]] == [mine.pk]
    assert client.get(f"/api/v1/tenants/{foreign.pk}/").status_code == 404
    client.user.user_permissions.add(Permission.objects.get(codename="see_all_tenants"))
    assert client.get(f"/api/v1/tenants/{foreign.pk}/").status_code == 200


# idempotency


def create(client, name="a", key="k", **more):
    return client.post("/api/v1/groups/", {"name": name, **more}, headers={"Idempotency-Key": key})


def test_same_key_and_body_gets_the_first_answer_again(client):
    first, again = create(client), create(client)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert "Idempotent-Replay" not in first and again["Idempotent-Replay"] == "true"
    assert Group.objects.filter(name="a").count() == 1


def test_key_order_and_number_form_do_not_make_another_body(client):
    from config.rest.idempotency import fingerprint

    same = ['{"a": 1, "b": [{"c": 2.0, "d": null}]}', '{ "b":[{"d":null,"c":2}],"a":1.0}']
    assert len({fingerprint(json.loads(text)) for text in same}) == 1
    assert len({fingerprint(value) for value in (1, True, "1", None, [1], {"1": 1})}) == 6


def test_other_body_is_409(client):
    create(client)
    assert first_error(create(client, "b"), 409)["code"] == "idempotency_conflict"
    assert not Group.objects.filter(name="b").exists()


def test_keys_of_other_users_and_paths_are_apart(client, make_client):
    create(client)
    other = make_client(username="other", is_superuser=True)
    assert create(other, "b").status_code == 201


def test_key_older_than_the_window_is_taken_over(client, settings):
    create(client)
    IdempotencyKey.objects.update(created_at=F("created_at") - settings.IDEMPOTENCY_WINDOW)
    assert create(client, "b").status_code == 201
    assert create(client, "b")["Idempotent-Replay"] == "true"
    assert IdempotencyKey.objects.count() == 1


def test_refused_request_leaves_key_free_and_nothing_written(client):
    group = Group.objects.create(name="old")
    assert create(client, "old").status_code == 400
    assert create(client, "new").status_code == 201
    url, header = f"/api/v1/groups/{group.pk}/rename/", {"Idempotency-Key": "r"}
    assert client.post(url, {"name": "refused"}, headers=header).status_code == 409
    assert client.post(url, {"name": "refused"}).status_code == 409
    group.refresh_from_db()
    assert group.name == "old"
    assert client.post(url, {"name": "b"}, headers=header).status_code == 204
    again = client.post(url, {"name": "b"}, headers=header)
    assert (again.status_code, again["Idempotent-Replay"], again.content) == (204, "true", b"")


@pytest.mark.parametrize("key", ["", "a b", "é", "a" * 256, "a\tb"])
def test_malformed_key_is_400(client, key):
    assert first_error(create(client, key=key), 400)["attr"] == "Idempotency-Key"


def test_longest_key_is_fine(client):
    assert create(client, key="~" * 255).status_code == 201


def waiting_for_a_lock():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return cursor.fetchone()[0]


@pytest.mark.django_db(transaction=True)
def test_concurrent_twin_waits_and_gets_the_first_answer(client, monkeypatch):
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def hold():
        inside.set()
        assert go_on.wait(20)

    def send():
        answers.append(create(client))
        connection.close()

    monkeypatch.setattr(rest_urls, "after_write", [hold])
    first = threading.Thread(target=send)
    first.start()
    assert inside.wait(20)
    second = threading.Thread(target=send)
    second.start()
    for _ in range(2000):
        if waiting_for_a_lock():
            break
        second.join(0.01)
    assert waiting_for_a_lock() and not answers
    go_on.set()
    first.join(20)
    second.join(20)
    assert [a.status_code for a in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()
    assert sorted("Idempotent-Replay" in a for a in answers) == [False, True]
    assert Group.objects.filter(name="a").count() == 1


# throttle


@pytest.fixture
def late_in_no_window(monkeypatch):
    """Stops the clock in the middle of a window, so that none ends during the test."""
    from config.rest import throttle

    clock = [1_800_000_030.5]
    monkeypatch.setattr(throttle.time, "time", lambda: clock[0])
    monkeypatch.setattr(throttle, "WINDOWS", throttle.Windows())
    return clock


def test_small_limit_is_exact_and_says_when_to_come_back(client, settings, late_in_no_window):
    settings.API_RATE = (3, 60)
    assert [client.post("/api/v1/echo/", {}).status_code for _ in range(5)] == [200, 200, 200, 429, 429]
    response = client.post("/api/v1/echo/", {})
    assert first_error(response, 429)["code"] == "throttled" and response["Retry-After"] == "30"
    late_in_no_window[0] += 60
    assert client.post("/api/v1/echo/", {}).status_code == 200


def test_limit_is_shared_by_processes_and_not_by_users(client, make_client, settings, late_in_no_window, monkeypatch):
    from config.rest import throttle

    settings.API_RATE = (3, 60)
    statuses = []
    for _process in range(4):
        monkeypatch.setattr(throttle, "WINDOWS", throttle.Windows())
        statuses.append(client.post("/api/v1/echo/", {}).status_code)
    assert statuses == [200, 200, 200, 429]
    assert make_client(username="other").post("/api/v1/echo/", {}).status_code == 200


def test_big_limit_touches_the_table_once_per_hundredth(client, settings, late_in_no_window):
    settings.API_RATE = (1000, 60)
    for _ in range(21):
        client.post("/api/v1/echo/", {})
    # The first request hands itself in, then ten at a time.
    assert ThrottleWindow.objects.get(client=f"user:{client.user.pk}").count == 21
    client.post("/api/v1/echo/", {})
    assert ThrottleWindow.objects.get().count == 21
    late_in_no_window[0] += 1.1
    client.post("/api/v1/echo/", {})
    assert ThrottleWindow.objects.get().count == 23


@pytest.mark.django_db(transaction=True)
def test_failed_request_is_counted_too(client, settings, late_in_no_window):
    settings.API_RATE = (2, 60)
    assert create(client, "").status_code == 400
    assert create(client, "").status_code == 400
    assert not connection.in_atomic_block and not transaction.get_connection().needs_rollback
    assert create(client, "").status_code == 429


# schema


def test_schema_names_error_answers_and_the_idempotency_key(client):
    client.credentials()
    schema = client.get("/api/schema/", {"format": "json"}).json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert {"400", "401", "403", "404", "409", "429"} <= set(operation["responses"]), (method, path)
            keyed = any(p["name"] == "Idempotency-Key" for p in operation.get("parameters", []))
            assert keyed == (method == "post" and (path.endswith(("/groups/", "/rename/")))), (method, path)
    names = {p["name"] for p in schema["paths"]["/api/v1/groups/"]["get"]["parameters"]}
    assert {"cursor", "page_size", "ordering", "name"} <= names
