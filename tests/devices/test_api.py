"""The REST contract, sentence by sentence."""

import json
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.utils import timezone

from config.models import IdempotencyKey
from devices.models import PC, Device, Event, Task, TaskDevice
from devices.services import assign_agent

API = "/api/v1"


@pytest.fixture
def operator(make_client):
    return make_client("operator", username="operator")


@pytest.fixture
def viewer(make_client):
    return make_client("viewer", username="viewer")


@pytest.fixture
def make_agent(make_client):
    def make(number="PC-01", devices=1, **labels):
        client = make_client("device-agent", username=f"agent-{number}")
        assign_agent(client.user, number)
        client.number = number
        if devices:
            client.list = [{"serial": f"{number}-{n:02}", "labels": labels} for n in range(devices)]
            answer = post(client, f"/pcs/{number}/heartbeat/", devices=client.list)
            assert answer.status_code == 200, answer.json()
        return client

    return make


def post(client, path, key=None, **body):
    headers = {"Idempotency-Key": key} if key else {}
    return client.post(f"{API}{path}", json.dumps(body), content_type="application/json", headers=headers)


def get(client, path, **params):
    return client.get(f"{API}{path}", params)


def new_task(operator, device_count=1, **body):
    answer = post(operator, "/tasks/", name="job", device_count=device_count, **body)
    assert answer.status_code == 201, answer.json()
    return answer.json()


def claim(agent, n=1, key=None):
    answer = post(agent, f"/pcs/{agent.number}/claim/", key=key, max_to_claim=n)
    assert answer.status_code == 200, answer.json()
    return answer.json()["task_devices"]


def act(agent, grant, verb, **body):
    return post(agent, f"/task-devices/{grant['id']}/{verb}/", **{"token": grant["token"], **body})


def row(client, grant):
    return get(client, f"/task-devices/{grant['id']}/").json()


def test_a_job_from_heartbeat_to_success(operator, make_agent):
    agent = make_agent()
    task = new_task(operator, payload={"do": "it"})
    assert (task["status"], task["devices_done"], task["retry_of"]) == ("running", 0, None)
    assert task["created_at"] == task["started_at"]
    [grant] = claim(agent)
    device = Device.objects.get()
    assert set(grant) == {
        "id", "task_id", "payload", "device", "attempt", "token", "lease_expires_at", "deadline_at",
    }  # fmt: skip
    assert grant["device"] == {"id": str(device.pk), "serial": "PC-01-00", "connection_id": None}
    assert (grant["task_id"], grant["payload"], grant["attempt"]) == (task["id"], {"do": "it"}, 1)
    assert act(agent, grant, "ack").status_code == 200
    assert act(agent, grant, "renew").status_code == 200
    done = act(agent, grant, "complete", result={"ok": 1})
    assert (done.status_code, done.json()["status"], done.json()["result"]) == (200, "success", {"ok": 1})
    assert [event["event"] for event in done.json()["events"]] == ["CREATED", "SENT", "ACKED", "SUCCEEDED"]
    [attempt] = done.json()["attempts"]
    assert {part["task_device_id"] for part in [attempt, *done.json()["events"]]} == {grant["id"]}
    assert (attempt["attempt_no"], attempt["claimed_by"], attempt["outcome"]) == (1, "PC-01", "success")
    ended = get(operator, f"/tasks/{task['id']}/").json()
    assert (ended["status"], ended["devices_done"], ended["devices_failed"]) == ("success", 1, 0)


def test_a_pc_carries_the_fields_of_the_view(viewer, make_agent):
    make_agent(devices=3)
    pc = get(viewer, "/pcs/PC-01/").json()
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM pc_device_summary")
        view = dict(zip([column.name for column in cursor.description], cursor.fetchone(), strict=True))
    assert set(view) == {
        "pc_id", "pc_number", "device_count", "eligible_device_count", "running_count", "target", "free_slots",
        "error_count", "offline_count", "status", "last_heartbeat",
    }  # fmt: skip
    assert set(view) | {"stale", "id", "max_slots", "last_heartbeat_at"} <= set(pc)
    assert {name: pc[name] for name in view if name not in ("pc_id", "last_heartbeat")} == {
        name: value for name, value in view.items() if name not in ("pc_id", "last_heartbeat")
    }
    assert (pc["target"], pc["free_slots"], pc["stale"]) == (3, 3, False)


def test_creating_a_pc_and_its_slots(operator, viewer, make_agent):
    made = post(operator, "/pcs/", pc_number="PC-77", max_slots=5)
    assert (made.status_code, made.json()["status"], made.json()["max_slots"]) == (200, "offline", 5)
    assert post(operator, "/pcs/", pc_number="PC-77").status_code == 409
    for number in ("PC-1", "PC-1234567", "pc-01", "PC-01\n", "PC-0a", "XPC-01", "PC-٠١"):
        refused = post(operator, "/pcs/", pc_number=number)
        assert (refused.status_code, refused.json()["errors"][0]["attr"]) == (400, "pc_number"), number
    patched = operator.patch(f"{API}/pcs/PC-77/", {"max_slots": 20}, format="json")
    assert (patched.status_code, patched.json()["max_slots"]) == (200, 20)
    for body in (
        {"max_slots": 0},
        {"max_slots": 21},
        {"max_slots": "5"},
        {},
        {"status": "online"},
        {"max_slots": 2, "pc_number": "PC-02"},
    ):
        assert operator.patch(f"{API}/pcs/PC-77/", body, format="json").status_code == 400, body
    for client in (viewer, make_agent(devices=0)):
        assert post(client, "/pcs/", pc_number="PC-78").status_code == 403
        assert client.patch(f"{API}/pcs/PC-77/", {"max_slots": 3}, format="json").status_code == 403


@pytest.mark.parametrize("n", [0, -1, "x", "1", None, 1.5, [], True])
def test_claiming_no_number_above_zero_is_refused(operator, make_agent, n):
    agent = make_agent()
    new_task(operator)
    answer = post(agent, "/pcs/PC-01/claim/", max_to_claim=n)
    assert (answer.status_code, answer.json()["errors"][0]["attr"]) == (400, "max_to_claim")
    assert not TaskDevice.objects.exists()


def test_claims_default_to_one_and_stop_at_the_free_slots(operator, make_agent):
    agent = make_agent(devices=3)
    assert claim(agent) == []
    new_task(operator, 10)
    assert len(post(agent, "/pcs/PC-01/claim/").json()["task_devices"]) == 1
    assert len(claim(agent, 10**30)) == 2
    assert claim(agent) == []


def test_an_unknown_pc_is_404_and_so_is_another_agents(make_agent):
    agent, other = make_agent(), make_agent("PC-02")
    for number in ("PC-99", "PC-02", "nonsense", "%00"):
        assert post(agent, f"/pcs/{number}/heartbeat/").status_code == 404
        assert post(agent, f"/pcs/{number}/claim/").status_code == 404
        assert get(agent, f"/pcs/{number}/").status_code == 404
    assert get(other, "/pcs/PC-02/").status_code == 200


def test_another_pcs_row_is_404_token_or_not(operator, make_agent):
    agent, other = make_agent(), make_agent("PC-02")
    new_task(operator, 2)
    [grant] = claim(agent)
    before = row(agent, grant)
    for verb in ("ack", "renew", "complete", "fail"):
        assert act(other, grant, verb).status_code == 404
        assert post(other, f"/task-devices/{grant['id']}/{verb}/").status_code == 404
    assert get(other, f"/task-devices/{grant['id']}/").status_code == 404
    assert get(other, f"/devices/{grant['device']['id']}/").status_code == 404
    assert get(other, "/task-devices/").json()["results"] == []
    assert [pc["pc_number"] for pc in get(other, "/pcs/").json()["results"]] == ["PC-02"]
    assert [device["pc_number"] for device in get(other, "/devices/").json()["results"]] == ["PC-02"]
    assert row(agent, grant) == before


def test_who_may_do_what(operator, viewer, make_agent, make_client):
    agent, stranger = make_agent(devices=2), make_client("message-sender", username="stranger")
    task = new_task(operator, 2)
    [grant] = claim(agent)
    device = grant["device"]["id"]
    reads = ["/pcs/", "/pcs/PC-01/", "/devices/", f"/devices/{device}/", "/task-devices/"]
    reads += [f"/task-devices/{grant['id']}/", "/tasks/", f"/tasks/{task['id']}/"]
    for path in reads:
        assert get(operator, path).status_code == get(viewer, path).status_code == 200
        assert get(stranger, path).status_code == 403
        assert get(agent, path).status_code == (403 if path.startswith("/tasks") else 200)
    agents_own = ["/pcs/PC-01/heartbeat/", "/pcs/PC-01/claim/"]
    agents_own += [f"/task-devices/{grant['id']}/{verb}/" for verb in ("ack", "renew", "complete", "fail")]
    for path in agents_own:
        for client in (operator, viewer, stranger):
            assert post(client, path, token=grant["token"]).status_code == 403, path
    operators_own = ["/tasks/", f"/tasks/{task['id']}/cancel/", f"/tasks/{task['id']}/retry/", "/pcs/"]
    operators_own += [f"/devices/{device}/recover/", f"/devices/{device}/quarantine/"]
    for path in operators_own:
        for client in (viewer, agent, stranger):
            assert post(client, path, name="x", device_count=1).status_code == 403, path
    assert Task.objects.get().status == "running"


def test_an_agent_that_also_reads_everything_still_acts_for_its_own_pc_only(operator, make_agent, make_client):
    agent = make_agent()
    new_task(operator)
    [grant] = claim(agent)
    both = make_client("device-agent", "viewer", username="both")
    assert get(both, f"/task-devices/{grant['id']}/").status_code == 200
    assert post(both, "/pcs/PC-01/claim/").status_code == 404
    assert act(both, grant, "complete").status_code == 404


def test_only_the_current_token_counts_and_an_old_one_changes_nothing(operator, make_agent):
    agent = make_agent()
    new_task(operator)
    [first] = claim(agent)
    assert act(agent, first, "fail", error="x").json()["status"] == "pending"
    [second] = claim(agent)
    assert (second["id"], second["attempt"]) == (first["id"], 2)
    assert second["token"] != first["token"]
    before = row(agent, second)
    for verb in ("ack", "renew", "complete", "fail"):
        for token in (first["token"], "guess", "ü" * 64, "0" * 64):
            assert act(agent, second, verb, token=token).status_code == 409
    assert row(agent, second) == before


def test_the_same_result_again_is_200_and_writes_nothing_until_the_next_claim(operator, make_agent):
    agent = make_agent()
    new_task(operator)
    [grant] = claim(agent)
    first = act(agent, grant, "fail", error="first").json()
    events = Event.objects.count()
    again = act(agent, grant, "fail", error="second", retryable=False)
    assert (again.status_code, again.json()) == (200, first)
    for verb in ("ack", "renew", "complete"):
        assert act(agent, grant, verb).status_code == 409
    assert Event.objects.count() == events
    [second] = claim(agent)
    assert act(agent, grant, "fail", error="first").status_code == 409
    done = act(agent, second, "complete", result=1)
    assert act(agent, second, "complete", result=2).json() == done.json()
    assert act(agent, second, "fail", error="x").status_code == 409


def test_a_token_appears_in_the_claims_answer_only(operator, viewer, make_agent, caplog):
    agent = make_agent(devices=2)
    task = new_task(operator, 2)
    with caplog.at_level("DEBUG"):
        [grant] = claim(agent, key="once")
        act(agent, grant, "ack")
        act(agent, grant, "complete", result={})
    token = grant["token"]
    for client in (operator, viewer, agent):
        for path in ("/task-devices/", f"/task-devices/{grant['id']}/", "/devices/", "/pcs/", "/tasks/"):
            assert token not in get(client, path).content.decode()
    assert token not in get(operator, f"/tasks/{task['id']}/").content.decode()
    assert token not in caplog.text
    with connection.cursor() as cursor:
        for table in ("task_devices", "task_device_attempts", "tasks_event", "idempotency_keys", "decisions"):
            cursor.execute(f"SELECT string_agg(t::text, ' ') FROM {table} AS t")
            assert token not in (cursor.fetchone()[0] or "")


def test_a_claim_whose_answer_was_lost_is_asked_for_again(operator, make_agent):
    agent = make_agent(devices=3)
    new_task(operator, 3)
    first = claim(agent, 2, key="k1")
    assert claim(agent, 2, key="k1") == first
    assert TaskDevice.objects.count() == 2
    assert post(agent, "/pcs/PC-01/claim/", key="k1", max_to_claim=1).status_code == 409
    assert act(agent, first[0], "complete").status_code == 200
    assert claim(agent, 2, key="k1") == first
    assert IdempotencyKey.objects.get().status == 200


def test_ack_is_noted_once_per_attempt(operator, make_agent):
    agent = make_agent()
    new_task(operator)
    [grant] = claim(agent)
    assert act(agent, grant, "ack").status_code == act(agent, grant, "ack").status_code == 200
    assert Event.objects.filter(event="ACKED").count() == 1
    act(agent, grant, "fail", error="x")
    [grant] = claim(agent)
    act(agent, grant, "ack")
    assert list(Event.objects.filter(event="ACKED").order_by("id").values_list("attempt_no", flat=True)) == [1, 2]


def test_cancelling_lets_running_rows_end_as_cancelled(operator, make_agent):
    agent = make_agent(devices=3)
    task, following = new_task(operator, 3), new_task(operator)
    one, two, three = claim(agent, 3)
    act(agent, three, "fail", error="x")
    cancelled = post(operator, f"/tasks/{task['id']}/cancel/")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    assert row(agent, three)["status"] == "cancelled"
    assert row(agent, one)["status"] == "running"
    assert get(operator, f"/tasks/{following['id']}/").json()["status"] == "running"
    assert act(agent, one, "renew").status_code == 409
    done = act(agent, one, "complete", result={"late": True})
    assert (done.status_code, done.json()["status"], done.json()["failure_kind"]) == (200, "cancelled", "cancelled")
    failed = act(agent, two, "fail", error="x")
    assert (failed.status_code, failed.json()["status"], failed.json()["final"]) == (200, "cancelled", False)
    assert act(agent, one, "complete").status_code == 200
    after = get(operator, f"/tasks/{task['id']}/").json()
    assert (after["devices_done"], after["devices_failed"]) == (0, 0)
    assert set(Device.objects.values_list("status", "total_errors")) == {("online", 0)}
    for _again in range(2):
        assert post(operator, f"/tasks/{task['id']}/cancel/").status_code == 409
    assert [event["event"] for event in row(agent, one)["events"]] == ["CREATED", "SENT", "CANCELLED"]


def test_a_task_without_its_right_fields_is_refused_and_nothing_written(operator):
    good = {"name": "job", "device_count": 1}
    bad = [
        ({"name": ""}, "name"), ({"name": "x" * 201}, "name"), ({"name": "a\x00b"}, "name"), ({"name": None}, "name"),
        ({"device_count": 0}, "device_count"), ({"device_count": -3}, "device_count"),
        ({"device_count": "many"}, "device_count"), ({"device_count": 10**12}, "device_count"), ({"name": 5}, "name"),
        ({"device_count": "5"}, "device_count"),
        ({"device_count": None}, "device_count"), ({"selector": {"a": 1}}, "selector"), ({"selector": []}, "selector"),
        ({"selector": {"a": {}}}, "selector"), ({"selector": None}, "selector"), ({"priority": 5}, "priority"),
        ({"status": "running"}, "status"), ({"payload": {"x": "y" * 65536}}, "payload"),
        ({"payload": {"x": "\x00"}}, "payload"),
    ]  # fmt: skip
    for change, attr in bad:
        answer = post(operator, "/tasks/", **{**good, **change})
        assert (answer.status_code, answer.json()["errors"][0]["attr"]) == (400, attr), change
    assert post(operator, "/tasks/", name="job").status_code == 400
    assert not Task.objects.exists()
    assert new_task(operator, payload=[1, "any", None])["payload"] == [1, "any", None]


def test_creating_a_task_twice_with_one_key_creates_one(operator):
    first = post(operator, "/tasks/", key="t", name="job", device_count=1)
    again = post(operator, "/tasks/", key="t", name="job", device_count=1)
    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    assert post(operator, "/tasks/", key="t", name="other", device_count=1).status_code == 409
    assert Task.objects.count() == 1


def test_retrying_a_task_makes_a_new_one_for_its_failed_devices(operator, make_agent):
    agent = make_agent(devices=3, kind="phone")
    task = new_task(operator, 2, payload={"p": 1}, selector={"kind": "phone"})
    assert post(operator, f"/tasks/{task['id']}/retry/").status_code == 409
    good, bad = claim(agent, 2)
    act(agent, good, "complete")
    act(agent, bad, "fail", error="no", retryable=False)
    retried = post(operator, f"/tasks/{task['id']}/retry/", key="r")
    assert retried.status_code == 201
    body = retried.json()
    assert (body["name"], body["payload"], body["selector"]) == ("job", {"p": 1}, {"kind": "phone"})
    assert (body["device_count"], body["retry_of"], body["status"]) == (1, task["id"], "running")
    assert post(operator, f"/tasks/{task['id']}/retry/", key="r").json() == body
    [grant] = claim(agent, 20)
    assert grant["device"] == bad["device"]
    act(agent, grant, "complete")
    assert get(operator, f"/tasks/{body['id']}/").json()["status"] == "success"
    assert post(operator, f"/tasks/{body['id']}/retry/").status_code == 409


def test_retrying_does_not_recover_the_devices(operator, make_agent):
    agent = make_agent(devices=2)
    task = new_task(operator)
    for _attempt in range(3):
        [grant] = claim(agent)
        act(agent, grant, "fail", error="no")
    retried = post(operator, f"/tasks/{task['id']}/retry/").json()
    assert claim(agent, 5) == []
    assert post(operator, f"/devices/{grant['device']['id']}/recover/").status_code == 200
    [again] = claim(agent, 5)
    assert (again["task_id"], again["device"]) == (retried["id"], grant["device"])


def test_recovering_and_quarantining_leave_a_history(operator, make_agent):
    make_agent()
    device = Device.objects.get()
    path = f"/devices/{device.pk}"
    assert post(operator, f"{path}/recover/").status_code == 409
    quarantined = post(operator, f"{path}/quarantine/", reason="smells")
    assert (quarantined.status_code, quarantined.json()["status"]) == (200, "quarantined")
    assert post(operator, f"{path}/quarantine/").status_code == 409
    recovered = post(operator, f"{path}/recover/").json()
    assert recovered["status"] == "online"
    assert [(entry["action"], entry["who"], entry["why"]) for entry in recovered["history"]] == [
        ("quarantine", "operator", "smells"),
        ("recover", "operator", ""),
    ]
    assert all(entry["when"] for entry in recovered["history"])
    assert get(operator, "/devices/").json()["results"][0]["history"] == recovered["history"]
    assert post(operator, f"{path}/recover/", reason="x" * 501).status_code == 400
    assert post(operator, f"{path}/recover/", force=True).status_code == 400


def bad_lists():
    one = {"serial": "S1"}
    return [
        ([one, one], "devices"), ([{"serial": "S1"}, {"serial": " S1 "}], "devices"),
        ([{**one, "status": "error"}], "devices.0.status"), ([{**one, "status": "quarantined"}], "devices.0.status"),
        ([{**one, "status": None}], "devices.0.status"), ([{**one, "battery": 101}], "devices.0.battery"),
        ([{**one, "battery": -1}], "devices.0.battery"), ([{**one, "labels": {"a": 1}}], "devices.0.labels"),
        ([{"serial": ""}], "devices.0.serial"), ([{"serial": "x" * 101}], "devices.0.serial"),
        ([{}], "devices.0.serial"), ([{"serial": 5}], "devices.0.serial"),
        ([{**one, "battery": "50"}], "devices.0.battery"), ([{**one, "connection_id": 5}], "devices.0.connection_id"),
        ([{**one, "colour": "red"}], "devices.0.colour"), ([one, "text"], "devices.1.non_field_errors"),
        ([{"serial": f"S{n}"} for n in range(201)], "devices"), ({"serial": "S1"}, "devices"), ("all", "devices"),
    ]  # fmt: skip


@pytest.mark.parametrize(("devices", "attr"), bad_lists(), ids=range(len(bad_lists())))
def test_a_bad_list_is_refused_and_nothing_written(make_agent, devices, attr):
    agent = make_agent(devices=0)
    answer = post(agent, "/pcs/PC-01/heartbeat/", devices=devices)
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["attr"].startswith(attr.split(".non_field")[0]), answer.json()
    assert not Device.objects.exists()
    assert PC.objects.get().last_heartbeat_at is None


def test_a_heartbeat_tells_about_pc_and_devices(make_agent, viewer):
    agent = make_agent(devices=0)
    told = {"serial": "S1", "connection_id": "10.0.0.1:5555", "battery": 50, "model": "M", "labels": {"a": "b"}}
    answer = post(agent, "/pcs/PC-01/heartbeat/", agent_version="1.2", system={"cpu": 1}, devices=[told])
    assert answer.status_code == 200
    assert (answer.json()["agent_version"], answer.json()["system"]) == ("1.2", {"cpu": 1})
    [device] = get(viewer, "/devices/").json()["results"]
    assert {name: device[name] for name in told} == told
    assert (device["status"], device["pc_number"]) == ("online", "PC-01")
    post(agent, "/pcs/PC-01/heartbeat/", devices=[{"serial": "S1", "status": "busy", "battery": 40}])
    [device] = get(viewer, "/devices/").json()["results"]
    assert {name: device[name] for name in told} == {**told, "battery": 40}
    assert device["status"] == "online"
    for body in ({}, {"devices": None}):
        assert post(agent, "/pcs/PC-01/heartbeat/", **body).status_code == 200
    for body in (
        {"hostname": "x"},
        {"agent_version": "x" * 101},
        {"system": {"x": "y" * 65536}},
        {"system": 3},
        {"agent_version": 5},
    ):
        assert post(agent, "/pcs/PC-01/heartbeat/", **body).status_code == 400
    assert Device.objects.get().status == "online"


def test_filters_know_aliases_and_refuse_unknown_words(operator, make_agent):
    agent = make_agent(devices=3)
    task = new_task(operator, 3)
    new_task(operator)
    one, two, _three = claim(agent, 3)
    act(agent, one, "complete")
    act(agent, two, "fail", error="x")

    def found(path, **params):
        answer = get(operator, path, **params)
        assert answer.status_code == 200, (params, answer.json())
        return len(answer.json()["results"])

    for word, count in {"running": 1, "pending": 1, "queued": 1, "done": 0, "completed": 0, "canceled": 0}.items():
        assert found("/tasks/", status=word) == count, word
    for word in ("success", "completed", "done", "running", "pending", "queued", "retrying"):
        assert found("/task-devices/", status=word) == 1, word
    assert found("/task-devices/", status="failed") == found("/task-devices/", status="canceled") == 0
    assert found("/task-devices/", task_id=task["id"]) == 3
    assert found("/task-devices/", task_id=str(uuid4())) == 0
    assert found("/devices/", serial="PC-01-01") == found("/devices/", serial="PC-01-01", pc_number="PC-01") == 1
    assert found("/devices/", status="busy") == 1
    assert found("/devices/", pc_number="PC-02") == 0
    for path, params in [
        ("/tasks/", {"status": "stopped"}), ("/tasks/", {"state": "running"}), ("/task-devices/", {"status": "x"}),
        ("/task-devices/", {"task_id": "x"}), ("/devices/", {"status": "idle"}), ("/devices/", {"serial": "a\x00"}),
        ("/devices/", {"labels": "x"}), ("/pcs/", {"status": "up"}), ("/tasks/", {"ordering": "payload"}),
    ]:  # fmt: skip
        assert get(operator, path, **params).status_code == 400, (path, params)
    said = get(operator, "/task-devices/").content.decode() + get(operator, "/tasks/").content.decode()
    for word in ("completed", "canceled", "queued", "retrying"):
        assert f'"{word}"' not in said


def test_stale_is_derived_when_read(viewer, make_agent):
    make_agent()
    for seconds, stale in ((89, False), (91, True)):
        PC.objects.update(last_heartbeat_at=timezone.now() - timedelta(seconds=seconds))
        pc = get(viewer, "/pcs/PC-01/").json()
        assert (pc["stale"], pc["status"]) == (stale, "online")


def test_a_failure_may_be_long_but_not_too_long(operator, make_agent):
    agent = make_agent()
    new_task(operator)
    [grant] = claim(agent)
    for body in (
        {"error": "x" * 10_001}, {"error": "a\x00"}, {"error": None}, {"retryable": "maybe"}, {"retryable": "true"},
        {"retryable": 0}, {"error": 5}, {"result": 1}, {"token": None}, {"token": ""},
    ):  # fmt: skip
        assert act(agent, grant, "fail", **body).status_code == 400, body
    assert act(agent, grant, "complete", result={"x": "y" * 65536}).status_code == 400
    assert act(agent, grant, "complete", error="x").status_code == 400
    assert act(agent, grant, "fail", error="x" * 10_000).json()["error"] == "x" * 10_000


@pytest.mark.parametrize("path", ["/devices/x/", "/tasks/x/", "/task-devices/x/", "/tasks/%00/", "/devices/%00/"])
def test_an_id_that_is_none_is_an_unknown_row(operator, path):
    assert get(operator, path).status_code == 404
    assert get(operator, path.replace("x", str(uuid4())).replace("%00", str(uuid4()))).status_code == 404


def test_tasks_and_rows_cannot_be_changed_or_deleted_over_rest(operator, make_agent):
    agent = make_agent()
    task = new_task(operator)
    [grant] = claim(agent)
    for path in (f"/tasks/{task['id']}/", f"/task-devices/{grant['id']}/", f"/devices/{grant['device']['id']}/"):
        for method in ("put", "patch", "delete"):
            assert getattr(operator, method)(f"{API}{path}", {}, format="json").status_code == 405, (method, path)
    assert operator.delete(f"{API}/pcs/PC-01/").status_code == 405
    assert operator.put(f"{API}/pcs/PC-01/", {"max_slots": 3}, format="json").status_code == 405
