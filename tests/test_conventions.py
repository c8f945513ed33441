"""What holds for every endpoint of the API, whichever app it belongs to. The endpoints are those of the schema."""

import json
import re
from datetime import timedelta
from functools import cache
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission
from django.utils import timezone
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from knox.models import AuthToken
from rest_framework.test import APIClient

from devices import services as devices
from devices.models import Task
from locks import services as locks
from messaging import services as messaging
from messaging.models import Application
from messaging.providers import reset_providers
from messaging.services import webhooks
from tests.campaigns import factories as campaigns
from tests.messaging.factories import message, message_in, subscribe
from tests.reminders.factories import AlarmFactory, PageFactory

JSON = "application/json"
METHODS = ("get", "post", "put", "patch", "delete")


@cache
def schema():
    with GENERATOR_STATS.silence():
        return SchemaGenerator().get_schema(request=None, public=True)


def operations():
    return [
        pytest.param(method, path, id=f"{method} {path}")
        for path, methods in schema()["paths"].items()
        for method in methods
        if method in METHODS and "/webhooks/" not in path  # theirs is the provider's signature, not ours
    ]


def described(method, path):
    return schema()["paths"][path][method]


def resolved(part):
    while "$ref" in part or "allOf" in part:
        if "allOf" in part:
            part = {**{k: v for k, v in part.items() if k != "allOf"}, **resolved(part["allOf"][0])}
        else:
            part = schema()["components"]["schemas"][part["$ref"].rsplit("/", 1)[1]]
    return part


def fields_of(method, path):
    content = described(method, path).get("requestBody", {}).get("content", {})
    return resolved(content[JSON]["schema"]).get("properties", {}) if JSON in content else {}


def parameters_of(method, path):
    return {p["name"]: p for p in described(method, path).get("parameters", ())}


ALL = operations()
LISTS = [p for p in ALL if "cursor" in parameters_of(*p.values)]
WRITES = [p for p in ALL if p.values[0] in ("post", "put", "patch")]
DETAILS = [p for p in ALL if "{id}" in p.values[1] or "{pc_number}" in p.values[1]]
CREATES = [p for p in ALL if "Idempotency-Key" in parameters_of(*p.values)]


# --- the rows the paths point at ---------------------------------------------------------------------------------


def a_lock(_application, user):
    wanted = locks.LockRequest("main", "MAINTENANCE", "BRANCH", user.username, "night work")
    return locks.acquire_lock(wanted, 0, lambda: False)[0]


def a_pc(_application, user):
    pc = devices.assign_agent(user, "PC-77")
    devices.record_heartbeat(pc, timezone.now(), devices=[devices.DeviceReport("serial-1", False, {})])
    return pc


def a_task(_application, _user):
    return devices.create_task("job", 1, timezone.now())


def a_run(application, user):
    pc = a_pc(application, user)
    a_task(application, user)
    return devices.claim_task_devices(pc, 1, timezone.now())[0]


def a_failed_task(user):
    run = a_run(None, user)
    token = devices.claim_token(run.id, run.attempt)
    devices.fail_task_device(run.id, user, token, "broken", timezone.now(), retryable=False)
    return Task.objects.get(rows=run.id)


def a_template(application, _user):
    wanted = {"name": "welcome", "channel": "push", "title_template": "Hi", "body_template": "Hello"}
    return messaging.create_template(application, wanted, now=timezone.now())


def a_suppression(application, _user):
    return messaging.add_suppression(application, "email", "a@example.com", "manual", {}, now=timezone.now())[0]


MAKERS = {
    "alarms": lambda application, _user: AlarmFactory(page=PageFactory(application=application)),
    "locks": a_lock,
    "enrollments": lambda application, _user: campaigns.EnrollmentFactory(sequence__application=application),
    "leads": lambda application, _user: campaigns.LeadFactory(application=application),
    "replies": lambda application, _user: campaigns.ReplyFactory(
        enrollment=campaigns.EnrollmentFactory(sequence__application=application)
    ),
    "senders": lambda application, _user: campaigns.SenderFactory(application=application),
    "sequences": lambda application, _user: campaigns.SequenceFactory(application=application, status="draft"),
    "steps": lambda application, _user: campaigns.StepFactory(sequence__application=application),
    "step-executions": lambda application, _user: campaigns.ExecutionFactory(
        enrollment=campaigns.EnrollmentFactory(sequence__application=application)
    ),
    "devices": lambda application, user: a_pc(application, user).devices.get(),
    "messages": lambda application, _user: message(subscribe(application), now=timezone.now()),
    "pcs": a_pc,
    "subscriptions": lambda application, _user: subscribe(application),
    "suppressions": a_suppression,
    "task-devices": a_run,
    "tasks": a_task,
    "templates": a_template,
    "webhook-endpoints": lambda application, _user: webhooks.create_endpoint(application, "https://example.com/")[0],
}
# Everybody who may see these at all may see all of them.
SHARED = {"locks", "tasks"}


def kind_of(path):
    found = re.search(r"/([a-z-]+)/\{(?:id|pc_number)\}", path)
    return found and found.group(1)


def filled(path, key):
    return re.sub(r"\{[a-z_]+\}", str(key), path)


def with_row(path, application, user):
    kind = kind_of(path)
    if "{sequence_id}" in path:
        step = MAKERS["steps"](application, user)
        return filled(path.replace("{sequence_id}", str(step.sequence_id)), step.pk)
    row = MAKERS[kind](application, user) if kind else None
    return filled(
        path, "main" if row is None else row.pc_number if kind == "pcs" else getattr(row, "pk", None) or row.id
    )


@pytest.fixture(autouse=True)
def carriers(settings):
    settings.PROVIDERS = dict.fromkeys(("iOSPush", "AndroidPush", "Email", "SMS", "KakaoTalk"), "null")
    reset_providers()
    yield
    reset_providers()


@pytest.fixture
def application(db):
    return Application.objects.create(slug="mine")


@pytest.fixture
def boss(make_client, application):
    """May do everything, also as an agent and as a member."""
    client = make_client(username="boss", is_superuser=True)
    application.members.add(client.user)
    return client


@pytest.fixture
def tenant(make_client):
    """May do everything, but only with what is its own: nothing yet."""
    client = make_client(username="tenant")
    client.user.user_permissions.set(Permission.objects.exclude(codename="see_all_tenants"))
    Application.objects.create(slug="theirs").members.add(client.user)
    return client


def call(client, method, path, body=None, **more):
    if method == "get" or (body is None and method == "delete"):
        return getattr(client, method)(path, **more)
    return getattr(client, method)(path, {} if body is None else body, format="json", **more)


def raw(client, method, path, body, content_type=JSON):
    return client.generic(method.upper(), path, body, content_type=content_type)


def assert_error(answer, *statuses, attr=None):
    said = f"{answer.status_code} {answer.content[:500]!r}"
    assert answer.status_code in statuses, said
    found = json.loads(answer.content)
    assert found["type"] in ("validation_error", "client_error"), said
    assert found["errors"], said
    for error in found["errors"]:
        assert set(error) == {"code", "detail", "attr"}, said
    if attr is not None:
        assert any(re.match(rf"{re.escape(attr)}(\.|\Z)", error["attr"] or "") for error in found["errors"]), said


# --- who may ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ALL)
def test_without_a_good_token_it_is_401_and_without_the_right_403_before_anything_else(make_client, method, path):
    path = filled(path, "nonsense")
    client = make_client(username="nobody")
    assert_error(call(client, method, path, {"surprise": 1}), 403)
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    assert_error(call(client, method, path, {"surprise": 1}), 401)
    assert not AuthToken.objects.filter(user=client.user).exists()
    answer = call(APIClient(), method, path, {"surprise": 1})
    assert_error(answer, 401)
    assert answer["WWW-Authenticate"] == "Token"


@pytest.mark.django_db
@pytest.mark.parametrize(
    "header", ["", "Token", "Token ", "Token garbage", "Token a b", "Token \xff", "Bearer x", "Basic eA==", "\xff"]
)
def test_garbage_is_no_token(header):
    assert_error(APIClient().get("/api/v1/messages/", headers={"Authorization": header}), 401)


@pytest.mark.parametrize(("method", "path"), DETAILS)
def test_unknown_and_malformed_ids_are_404_before_the_body_is_looked_at(boss, method, path):
    for key in (uuid4(), uuid4().hex, "nonsense", "0", "%00", "%FF", "%ED%A0%80", "a" * 300, "../x", "%0A", "-1"):
        assert_error(call(boss, method, filled(path, key), {"surprise": 1}), 404)


@pytest.mark.parametrize(("method", "path"), [p for p in DETAILS if kind_of(p.values[1]) not in SHARED])
def test_foreign_rows_are_404(boss, tenant, application, method, path):
    path = with_row(path, application, boss.user)
    assert_error(call(tenant, method, path, {"surprise": 1}), 404)


@pytest.mark.parametrize(("method", "path"), [p for p in LISTS if "{" not in p.values[1]])
def test_lists_hold_no_foreign_rows(boss, tenant, application, method, path):
    kind = path.rstrip("/").rsplit("/", 1)[1]
    if kind == "inbox" or kind in SHARED:
        return
    MAKERS[kind](application, boss.user)
    assert len(call(boss, method, path).data["results"]) == 1
    assert call(tenant, method, path).data["results"] == []


# --- bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_unreadable_bodies_are_refused(boss, application, settings, method, path):
    path = with_row(path, application, boss.user)
    for body in (b"{", b"[]", b"[1]", b'"text"', b"1", b"null", b"true", b'{"a": NaN}', b"\xff\xfe{", b'{"a": "\xff"}',
                 b"[" * 5000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a": "\\u0000"}', b'{"\\ud800": 1}'):  # fmt: skip
        assert_error(raw(boss, method, path, body), 400)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense"):
        assert_error(raw(boss, method, path, b"a=1", kind), 415)
    assert_error(call(boss, method, path, {"surprise": 1}), 400, attr="surprise")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    assert_error(raw(boss, method, path, b'{"a": "%s"}' % (b"x" * 100)), 413)


def bad_values(field):
    """Values that no field of this description may take."""
    nullable = field.get("nullable", False)
    field = resolved(field)
    kind = field.get("type")
    if kind is None and not field.get("enum"):
        return []
    bad = [] if nullable or field.get("nullable") else [None]
    if kind == "object":
        return [*bad, "text", 1, [1], True]
    if kind == "array":
        return [*bad, "text", 1, {"a": 1}, True, [[]], [None]]
    bad += [{}, [], {"a": 1}, [1], [[["x"]]]]
    if kind in ("integer", "number"):
        return [*bad, "x", True, -(10**30), "9" * 2000]
    if kind == "boolean":
        return [*bad, "maybe", 2, -1, 10**30]
    bad += ["a\x00b", "\x00"]
    if field.get("enum") or field.get("format"):
        bad += ["nonsense", 10**40, "x" * 10_000]
    if "maxLength" in field:
        bad += ["x" * (field["maxLength"] + 1)]
    return bad


@pytest.mark.parametrize(("method", "path"), [p for p in WRITES if fields_of(*p.values)])
def test_every_field_refuses_what_it_cannot_be_by_name(boss, application, method, path):
    fields = fields_of(method, path)
    path = with_row(path, application, boss.user)
    for name, field in fields.items():
        for value in bad_values(field):
            answer = call(boss, method, path, {name: value})
            if answer.status_code == 200 and path.endswith("/bulk/") and isinstance(value, list):
                # An entry that is wrong is told by its place; the others are taken.
                assert answer.json()["results"][0]["errors"], (name, value, answer.content[:300])
                continue
            assert answer.status_code == 400, (name, str(value)[:50], answer.status_code, answer.content[:300])
            named = {re.split(r"\.", error["attr"] or "")[0] for error in answer.json()["errors"]}
            assert name in named, (name, str(value)[:50], answer.content[:300])
        assert_error(raw(boss, method, path, b'{"%s": "a\\ud800"}' % name.encode()), 400, attr=name)


# --- lists and query strings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), LISTS)
def test_lists_refuse_what_they_do_not_know(boss, application, method, path):
    known = parameters_of(method, path)
    path = with_row(path, application, boss.user)
    needed = "".join(f"&{name}={uuid4()}" for name, p in known.items() if p.get("required") and p["in"] == "query")
    for query, attr in (
        ("page_size=0", "page_size"), ("page_size=-1", "page_size"), ("page_size=abc", "page_size"),
        ("page_size=", "page_size"), ("page_size=1.5", "page_size"), ("page_size=%00", "page_size"),
        ("cursor=x", "cursor"), ("cursor=", "cursor"), ("cursor=%00", "cursor"), ("cursor=%FF", "cursor"),
        ("cursor=W10=", "cursor"), ("ordering=nonsense", "ordering"), ("ordering=", "ordering"),
        ("ordering=-", "ordering"), ("ordering=--created_at", "ordering"), ("ordering=pk__x", "ordering"),
        ("ordering=%00", "ordering"), ("surprise=1", "surprise"), ("surprise", "surprise"),
    ):  # fmt: skip
        assert_error(boss.get(f"{path}?{query}{needed}"), 400, attr=attr)
    for name, parameter in known.items():
        if parameter["in"] != "query":
            continue
        assert_error(boss.get(f"{path}?{name}=a%00b"), 400, attr=name)
        for value in (
            "%FF",
            "%ED%A0%80",
            "9" * 400,
            "x" * 5000,
            "%F0%9F%98%80",
            "[]",
            "'",
            "-1",
            "99999-01-01T00:00:00Z",
        ):
            answer = boss.get(f"{path}?{name}={value}")
            assert answer.status_code in (200, 400), (name, value[:20], answer.content)
    for size in ("1", "500", "501", "1" + "0" * 30):
        answer = boss.get(f"{path}?page_size={size}{needed}")
        assert answer.status_code == 200, answer.content
        assert set(answer.data) == {"next", "previous", "results"}
    for order in known.get("ordering", {}).get("schema", {}).get("enum", ()):
        assert boss.get(f"{path}?ordering={order}{needed}").status_code == 200


@pytest.mark.parametrize(("method", "path"), [p for p in ALL if p.values[0] == "get"])
def test_reads_answer_head_options_and_any_query(boss, application, method, path):
    known = parameters_of(method, path)
    path = with_row(path, application, boss.user)
    needed = "&".join(f"{name}={uuid4()}" for name, p in known.items() if p.get("required") and p["in"] == "query")
    answer = boss.get(f"{path}?{needed}")
    assert answer.status_code == 200, answer.content
    assert boss.head(f"{path}?{needed}").status_code == 200
    assert boss.options(path).status_code == 200
    for query in ("%00=1", "a%00=%00", "%FF=%FF", "a[]=1&a[]=2", "=", "&&&", "a=" + "x" * 5000, "%ED%A0%80=1"):
        assert boss.get(f"{path}?{needed}&{query}").status_code in (200, 400)
    for name, parameter in known.items():
        if parameter["in"] == "query":
            for value in ("%00", "a%00", "2026-01-01T00:00:00Z%00", "%FF", "9" * 400, "x" * 5000, "-0", "inf", "nan"):
                answer = boss.get(f"{path}?{needed}&{name}={value}")
                assert answer.status_code in (200, 400), (name, value[:20], answer.content)


@pytest.mark.parametrize("path", schema()["paths"])
def test_other_methods_are_405_and_say_which_are_there(boss, application, path):
    there = schema()["paths"][path]
    path = with_row(path, application, boss.user) if "/webhooks/" not in path else filled(path, "twilio")
    for method in METHODS:
        if method in there:
            continue
        answer = call(boss, method, path, {})
        assert_error(answer, 405)
        assert not {m.strip().lower() for m in answer["Allow"].split(",")} ^ {
            *there,
            *(["head"] if "get" in there else []),
            "options",
        }


# --- Idempotency-Key ----------------------------------------------------------------------------------------------


def a_lead(application):
    return str(campaigns.LeadFactory(application=application).pk)


def a_reply(application):
    enrollment = campaigns.EnrollmentFactory(sequence__application=application)
    return {"enrollment_id": str(enrollment.pk), "kind": "human", "text": "Yes"}


BODIES = {
    "/api/v1/leads/": {"application": "mine", "name": "Ann", "email": "ann@example.com"},
    "/api/v1/leads/bulk/": {"application": "mine", "leads": [{"name": "Ann", "email": "ann@example.com"}]},
    "/api/v1/replies/": a_reply,
    "/api/v1/senders/": {"application": "mine", "channel": "email", "address": "us@example.com"},
    "/api/v1/sequences/": {"application": "mine", "name": "Spring"},
    "/api/v1/sequences/{id}/clone/": {"name": "Autumn"},
    "/api/v1/sequences/{id}/enroll/": lambda application: {"lead_ids": [a_lead(application)]},
    "/api/v1/sequences/{id}/reenroll-failed/": {},
    "/api/v1/sequences/{id}/test-send/": lambda application: {"lead_id": a_lead(application)},
    "/api/v1/sequences/{sequence_id}/steps/": {"channel": "email", "subject": "Hi", "body": "Hello"},
    "/api/reminder/register-by-page": {"application": "mine", "user_id": "ann", "page_id": "p1", "title": "Water"},
    "/api/v1/branch-locks/acquire/": {"branch_name": "b", "lock_type": "BACKUP", "lock_scope": "BRANCH", "reason": "x"},
    "/api/v1/branch-locks/indexing/{branch}/start/": {"resource_types": ["template"]},
    "/api/v1/messages/": lambda application: {
        "subscription_id": str(subscribe(application).pk),
        "title": "a",
        "body": "b",
    },
    "/api/v1/messages/bulk/": lambda application: {
        "messages": [{"subscription_id": str(subscribe(application).pk), "title": "a", "body": "b"}]
    },
    "/api/v1/messages/{id}/retry/": {},
    "/api/v1/pages/sync/": {"application": "mine", "user_id": "ann", "created": [{"id": "p2", "title": "t"}]},
    "/api/v1/pcs/": {"pc_number": "PC-05"},
    "/api/v1/pcs/{pc_number}/claim/": {"max_to_claim": 1},
    "/api/v1/subscriptions/": {"application": "mine", "type": "AndroidPush", "token": "fcm-token"},
    "/api/v1/suppressions/": {
        "application": "mine",
        "channel": "email",
        "address": "b@example.com",
        "reason": "manual",
    },
    "/api/v1/tasks/": {"name": "job", "device_count": 1},
    "/api/v1/tasks/{id}/retry/": {},
    "/api/v1/templates/": {"application": "mine", "name": "t", "channel": "push", "body_template": "Hi"},
    "/api/v1/webhook-endpoints/": {"application": "mine", "url": "https://example.com/hook"},
}


def test_every_post_that_creates_knows_the_key():
    creating = [
        path for path, there in schema()["paths"].items() if "201" in there.get("post", {}).get("responses", ())
    ]
    assert {path for path in creating if "Idempotency-Key" not in parameters_of("post", path)} == set()


@pytest.mark.parametrize(("method", "path"), CREATES)
def test_the_same_key_gets_the_first_answer_again(boss, application, make_client, method, path):
    body = BODIES[path]
    body = body(application) if callable(body) else body
    if path.endswith("/messages/{id}/retry/"):
        where = filled(path, message_in("failed", subscribe(application), at=timezone.now()).pk)
    elif path.endswith("/tasks/{id}/retry/"):
        where = filled(path, a_failed_task(boss.user).pk)
    elif "/sequences/{id}/" in path:
        where = filled(path, campaigns.StepFactory(sequence__application=application).sequence_id)
    else:
        where = with_row(path, application, boss.user)
    for key in ("", " ", "a b", "x" * 256, "\xe9", "\x7f", "a\x00"):
        assert_error(call(boss, method, where, body, headers={"Idempotency-Key": key}), 400, attr="Idempotency-Key")
    first = call(boss, method, where, body, headers={"Idempotency-Key": "k-1"})
    assert first.status_code in (200, 201), first.content
    again = call(boss, method, where, body, headers={"Idempotency-Key": "k-1"})
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    other = {**body, next(iter(fields_of(method, path)), "surprise"): "other"}
    assert_error(call(boss, method, where, other, headers={"Idempotency-Key": "k-1"}), 409, 400)


# --- the schema ---------------------------------------------------------------------------------------------------


def test_the_schema_is_valid_and_without_warnings():
    GENERATOR_STATS.reset()
    found = SchemaGenerator().get_schema(request=None, public=True)
    told = [*GENERATOR_STATS._warn_cache, *GENERATOR_STATS._error_cache]
    assert told == []
    validate_schema(found)


def test_the_schema_tells_the_error_answers():
    for method, path in (p.values for p in ALL):
        told = set(described(method, path)["responses"])
        assert {"400", "401", "403", "404", "409", "429", "503"} <= told, (method, path)
        if method in ("post", "put", "patch"):
            assert {"413", "415"} <= told, (method, path)


# --- addresses ----------------------------------------------------------------------------------------------------


def test_a_write_without_its_slash_is_404_and_a_read_is_led_there(boss, settings):
    settings.DEBUG = True  # where Django would raise instead
    assert_error(boss.post("/api/v1/messages", {}), 404)
    assert_error(boss.get("/api/v1/nothing/"), 404)
    assert boss.get("/api/v1/messages").status_code == 301


@pytest.mark.parametrize("path", ["/api/%FF", "/api/v1/messages//", "/api/v2/messages/", "/api/"])
def test_unknown_addresses_are_404_in_the_form_of_errors(boss, path):
    assert_error(boss.get(path), 404)
    assert_error(boss.post(path, {}), 404)
