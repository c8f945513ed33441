"""The contract in detail, sentence by sentence, over REST."""

from datetime import datetime, timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

from config import sweeping
from locks import services
from locks.models import Branch, BranchLock, LockEvent, LockWaiter
from locks.services.grants import obstacles
from tests.locks.conftest import kinds, shift

pytestmark = pytest.mark.django_db
UNKNOWN = "01980000-0000-7000-8000-000000000000"


def error(answer):
    return answer.data["errors"][0]["code"], answer.data["errors"][0]["attr"]


def when(text):
    return datetime.fromisoformat(text)


def state_of(branch="main"):
    return Branch.objects.get(name=branch).state


# --- acquire -------------------------------------------------------------------------------------------------------


def test_acquire_answers_with_what_the_holder_needs(holder):
    lock = holder.acquire(kind="BACKUP")
    assert set(lock) == {"lock_id", "fence", "expires_at", "ttl_source", "heartbeat_interval"}
    assert (lock["fence"], lock["ttl_source"], lock["heartbeat_interval"]) == (1, "default", 0)
    assert holder.acquire("other", ttl_seconds=5)["ttl_source"] == "request"


@pytest.mark.parametrize(
    ("kind", "hours", "interval"),
    [("INDEXING", 4, 120), ("MAINTENANCE", 1, 0), ("MIGRATION", 6, 0), ("BACKUP", 2, 0), ("MANUAL", 24, 0)],
)
def test_defaults_of_each_type(admin, kind, hours, interval):
    shown = admin.lock(admin.acquire(kind=kind)).data
    assert when(shown["expires_at"]) - when(shown["locked_at"]) == timedelta(hours=hours)
    assert shown["heartbeat_interval"] == interval
    assert (shown["last_heartbeat"] is not None) == (interval > 0)


@pytest.mark.parametrize(
    ("terms", "interval"),
    [
        ({"enable_heartbeat": True}, 120),
        ({"enable_heartbeat": True, "heartbeat_interval": 7}, 7),
        ({"heartbeat_interval": 3600}, 3600),
        ({"heartbeat_interval": 1}, 1),
        ({"enable_heartbeat": False}, 0),
        ({"enable_heartbeat": False, "heartbeat_interval": 60}, 0),
    ],
)
def test_heartbeat_is_settable_per_acquire(holder, terms, interval):
    assert holder.acquire(**terms)["heartbeat_interval"] == interval
    assert holder.acquire("elsewhere", kind="INDEXING", **terms)["heartbeat_interval"] == interval


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", 0.9),
        ("ttl_seconds", 86400.1),
        ("ttl_seconds", True),
        ("ttl_seconds", "60"),
        ("ttl_seconds", 10**400),
        ("heartbeat_interval", 0),
        ("heartbeat_interval", 3601),
        ("heartbeat_interval", 1.5),
        ("wait_seconds", -1),
        ("wait_seconds", 60.1),
        ("lock_delay", -0.1),
        ("lock_delay", 61),
        ("branch_name", ""),
        ("branch_name", "a" * 201),
        ("branch_name", " main"),
        ("branch_name", "ma in"),
        ("branch_name", "main\u00a0"),
        ("branch_name", "a\u0007b"),
        ("branch_name", "/main"),
        ("branch_name", "main/"),
        ("branch_name", "a//b"),
        ("branch_name", None),
        ("branch_name", ["main"]),
        ("branch_name", 7),
        ("reason", 7),
        ("lock_type", "SHARED"),
        ("lock_scope", None),
        ("reason", ""),
        ("reason", "   "),
        ("reason", "x" * 2001),
        ("reason", "a\x00b"),
        ("heartbeat_interval", "60"),
        ("heartbeat_interval", True),
        ("enable_heartbeat", "yes"),
        ("enable_heartbeat", 1),
        ("enable_heartbeat", ""),
        ("auto_release_enabled", "perhaps"),
        ("auto_release_enabled", "false"),
        ("auto_release_enabled", 0),
        ("metadata", {}),
        ("fence", 3),
    ],
)
def test_a_bad_acquire_names_the_field_and_writes_nothing(holder, field, value):
    answer = (
        holder.ask(**{field: value})
        if field != "branch_name"
        else holder.post(
            "/acquire/", {"branch_name": value, "lock_type": "BACKUP", "lock_scope": "BRANCH", "reason": "x"}
        )
    )
    assert answer.status_code == 400
    assert error(answer)[1].startswith(field)
    assert not Branch.objects.exists()


def test_the_limits_themselves_are_allowed(holder):
    holder.acquire("a" * 200, ttl_seconds=1, wait_seconds=60, lock_delay=60, reason="x" * 2000)
    holder.acquire("feature/user-schema/start", ttl_seconds=86400)


@pytest.mark.parametrize("field", ["branch_name", "lock_type", "lock_scope", "reason"])
def test_required_fields(holder, field):
    body = {"branch_name": "main", "lock_type": "BACKUP", "lock_scope": "BRANCH", "reason": "x"}
    del body[field]
    answer = holder.post("/acquire/", body)
    assert (answer.status_code, *error(answer)) == (400, "required", field)


def test_who_may_acquire(holder, viewer, admin, client):
    assert viewer.ask().status_code == 403
    assert holder.ask(kind="MANUAL").status_code == 403
    assert admin.ask(kind="MANUAL").status_code == 201
    assert client.post("/api/v1/branch-locks/acquire/").status_code == 401


def test_every_client_reads_every_lock(holder, viewer, other, make_client):
    lock = holder.acquire()
    for door in (viewer, other):
        assert door.lock(lock).status_code == door.health(lock).status_code == 200
        assert door.get("/status/main/").status_code == door.get("/dashboard/").status_code == 200
    stranger = make_client("message-sender", username="stranger")
    assert stranger.get("/api/v1/branch-locks/locks/").status_code == 403


def test_a_conflict_tells_who_since_when_why_until_when_and_how_it_goes(holder, other):
    lock = holder.acquire(kind="INDEXING")
    holder.beat(lock, progress_info={"progress": 40, "estimated_remaining_hours": 0.1})
    answer = other.ask()
    assert answer.status_code == 409
    assert answer.data["type"] == "client_error"
    assert error(answer)[0] == "lock_conflict"
    [blocker] = answer.data["conflicts"]
    shown = holder.lock(lock).data
    assert blocker.pop("lock_id") == shown["id"]
    assert {name: answer.json()["conflicts"][0][name] for name in blocker} == {
        name: holder.lock(lock).json()[name]
        for name in (
            "locked_by", "locked_at", "reason", "expires_at", "lock_type", "lock_scope", "resource_type",
            "resource_id", "heartbeat_health", "progress",
        )
    }  # fmt: skip
    assert 330 < answer.data["retry_after"] <= 360
    assert answer["Retry-After"] == str(answer.data["retry_after"])
    assert LockEvent.objects.get(kind="CONFLICT").details["blocked_by"] == [str(lock["lock_id"])]


def test_several_blockers_come_widest_then_oldest(holder, other):
    resource = holder.acquire(scope="RESOURCE", resource_type="a", resource_id="1")
    old_type = holder.acquire(scope="RESOURCE_TYPE", resource_type="b")
    new_type = holder.acquire(scope="RESOURCE_TYPE", resource_type="c")
    found = [blocker["lock_id"] for blocker in other.ask().data["conflicts"]]
    assert found == [str(lock["lock_id"]) for lock in (old_type, new_type, resource)]
    assert other.check()["body"]["lock_scope"] == "RESOURCE_TYPE"


def hold_many(count, kind="a", expires="now() + interval '1 hour'"):
    Branch.objects.get_or_create(name="main")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO branch_locks (branch_id, lock_scope, resource_type, resource_id, expires_at)"
            f" SELECT id, 'RESOURCE', %s, n::text, {expires} FROM branches, generate_series(1, %s) AS n",
            [kind, count],
        )


def test_of_very_many_blockers_the_foremost_are_told(holder, other):
    hold_many(101)
    assert len(other.ask().data["conflicts"]) == 100
    other.ask(wait_seconds=0.01)
    assert [len(event.details["blocked_by"]) for event in LockEvent.objects.all()] == [100, 100, 100]


def test_of_very_many_blockers_no_more_are_read(holder):
    hold_many(101)
    asked = services.LockRequest("main", "BACKUP", "BRANCH", "x", "x")
    assert len(obstacles(Branch.objects.get(), asked)) == 100


def test_a_start_tells_the_foremost_blockers_of_each_type(holder):
    hold_many(101, "a")
    hold_many(1, "b")
    told = holder.post("/indexing/main/start/", {"resource_types": ["a", "b", "c"]}).data
    assert [(refused["resource_type"], len(refused["conflicts"])) for refused in told["not_locked"]] == [
        ("a", 100),
        ("b", 1),
    ]
    assert [lock["resource_type"] for lock in told["locks"]] == ["c"]


@pytest.mark.parametrize("path", ["/acquire/", "/indexing/main/start/"])
def test_very_many_expired_locks_stand_in_nobodys_way(holder, path):
    hold_many(150, expires="now() - interval '1 second'")
    asked = {"branch_name": "main", "lock_type": "BACKUP", "lock_scope": "BRANCH", "reason": "x"}
    answer = holder.post(path, asked if path == "/acquire/" else {"resource_types": ["a", "b"]})
    assert answer.status_code == 201
    assert LockEvent.objects.filter(kind="EXPIRED_TTL").count() == 150


def test_there_is_no_re_entrance_without_a_key(holder):
    holder.acquire()
    assert holder.ask().status_code == 409


# --- expiry --------------------------------------------------------------------------------------------------------


def test_expiry_is_strict_and_health_has_its_bounds():
    """At exactly the instant nothing is over: the predicate with a time of our own."""
    branch = Branch.objects.create(name="main")
    at = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
    lock = BranchLock.objects.create(
        branch=branch, lock_type="BACKUP", lock_scope="BRANCH", locked_by="x", reason="x", locked_at=at,
        last_heartbeat=at, heartbeat_interval=10, expires_at=at + timedelta(seconds=100),
    )  # fmt: skip

    def seen(seconds):
        row = BranchLock.objects.clocked(at + timedelta(seconds=seconds)).get(pk=lock.pk)
        return row.heartbeat_health, row.heartbeat_expired, row.ttl_expired

    assert seen(9.999999) == ("healthy", False, False)
    assert seen(10) == ("warning", False, False)
    assert seen(30) == ("warning", False, False)
    assert seen(30.000001) == ("critical", True, False)
    BranchLock.objects.update(heartbeat_interval=0)
    assert seen(100) == (None, False, False)
    assert seen(100.000001) == ("critical", False, True)


def test_an_expired_lock_blocks_nobody_and_is_taken_over_in_the_same_transaction(holder, other):
    lock = holder.acquire()
    shift(lock, expires_at=-1)
    assert other.check()["allowed"] is True
    assert other.acquire()["fence"] == lock["fence"] + 1
    assert kinds(lock) == ["ACQUIRED", "EXPIRED_TTL"]
    old = BranchLock.objects.get(pk=lock["lock_id"])
    assert (old.state, old.released_by) == ("expired", "system")


def test_a_silent_lock_is_taken_over_too(holder, other):
    lock = holder.acquire(heartbeat_interval=1)
    shift(lock, last_heartbeat=-4)
    other.acquire()
    assert kinds(lock) == ["ACQUIRED", "EXPIRED_HEARTBEAT"]


def test_when_both_clocks_are_out_the_event_tells_of_the_ttl(holder):
    lock = holder.acquire(heartbeat_interval=1)
    shift(lock, last_heartbeat=-10, expires_at=-1)
    sweeping.run("locks.expire_heartbeats")
    assert kinds(lock) == ["ACQUIRED", "EXPIRED_TTL"]


def test_reading_never_reaps(holder, other):
    lock = holder.acquire(heartbeat_interval=1)
    shift(lock, last_heartbeat=-10)
    for read in (
        holder.lock(lock), holder.health(lock), holder.get("/locks/"), holder.get("/status/main/"),
        holder.get("/dashboard/"), holder.get("/locks/health-summary/"),
    ):  # fmt: skip
        assert read.status_code == 200
    other.check()
    assert holder.lock(lock).data["heartbeat_expired"] is True
    assert kinds(lock) == ["ACQUIRED"]


def test_without_auto_release_it_keeps_blocking_until_released(holder, other, admin):
    lock = holder.acquire(auto_release_enabled=False)
    shift(lock, expires_at=-1)
    assert other.ask().status_code == 409
    assert other.check()["allowed"] is False
    assert holder.get("/status/main/").data["is_write_locked"] is True
    assert holder.health(lock).data["heartbeat_health"] == "critical"
    assert holder.beat(lock).status_code == holder.extend(lock, 1).status_code == 410
    assert holder.release(lock).status_code == 204
    assert other.ask().status_code == 201


def test_an_expired_or_ended_lock_is_never_revived(holder, admin):
    lock = holder.acquire()
    shift(lock, expires_at=-1)
    for door in (holder, admin):
        assert door.beat(lock).status_code == door.extend(lock, 1).status_code == door.release(lock).status_code == 410
    ended = holder.acquire()
    assert holder.release(ended).status_code == 204
    assert holder.beat(ended).status_code == holder.extend(ended, 1).status_code == 410
    assert holder.release(ended).status_code == 410


def test_the_application_clock_changes_nothing(holder, other, monkeypatch):
    import time

    real = time.time
    for off in (-600, 600):
        monkeypatch.setattr(time, "time", lambda off=off: real() + off)
        lock = holder.acquire("off", ttl_seconds=300, heartbeat_interval=10)
        assert other.ask("off").status_code == 409
        assert holder.health(lock).data["heartbeat_health"] == "healthy"
        assert holder.beat(lock).status_code == 200
        sweeping.run("locks.expire_ttls")
        sweeping.run("locks.expire_heartbeats")
        assert holder.release(lock).status_code == 204


# --- refusals in order ---------------------------------------------------------------------------------------------


def verbs(door, lock_id):
    return {
        "heartbeat": lambda body: door.post(f"/locks/{lock_id}/heartbeat/", body),
        "extend": lambda body: door.post(f"/locks/{lock_id}/extend-ttl/", body | {"extension_hours": 1}),
        "release": lambda body: door.delete(f"/locks/{lock_id}/", body),
    }


@pytest.mark.parametrize("verb", ["heartbeat", "extend", "release"])
def test_refusals_come_in_order(holder, other, admin, viewer, verb):
    lock = holder.acquire()
    fence = lock["fence"]
    for door in (holder, other, viewer):
        assert verbs(door, UNKNOWN)[verb]({"nonsense": 1}).status_code == 404
        assert verbs(door, "nonsense")[verb]({"fence": fence}).status_code == 404
        assert verbs(door, lock["lock_id"])[verb]({}).status_code == 400
        assert verbs(door, lock["lock_id"])[verb]({"fence": "x"}).status_code == 400
        assert verbs(door, lock["lock_id"])[verb]({"fence": fence, "more": 1}).status_code == 400
    assert verbs(other, lock["lock_id"])[verb]({"fence": fence + 1}).status_code == 403
    assert verbs(viewer, lock["lock_id"])[verb]({"fence": fence}).status_code == 403
    for door in (holder, admin):
        answer = verbs(door, lock["lock_id"])[verb]({"fence": fence - 1})
        assert (answer.status_code, error(answer)[0]) == (409, "stale_fence")
    shift(lock, expires_at=-1)
    assert verbs(other, lock["lock_id"])[verb]({"fence": fence}).status_code == 403
    assert verbs(holder, lock["lock_id"])[verb]({"fence": fence - 1}).status_code == 410


def test_a_lock_admin_acts_on_locks_of_others_with_the_fence(holder, admin):
    lock = holder.acquire()
    assert admin.beat(lock).status_code == admin.extend(lock, 1).status_code == 200
    assert admin.delete(f"/locks/{lock['lock_id']}/").status_code == 400
    assert admin.release(lock).status_code == 204
    assert BranchLock.objects.get().released_by == "boss"


def test_the_fence_of_a_release_comes_in_the_query_or_the_body(holder):
    lock = holder.acquire()
    for text in ("x", "", "1.0", "１", "true", str(2**63)):
        assert holder.delete(f"/locks/{lock['lock_id']}/?fence={text}").status_code == 400
    for value in ("1", True, None, 1.5, [1]):
        assert holder.delete(f"/locks/{lock['lock_id']}/", {"fence": value}).status_code == 400
    assert holder.delete(f"/locks/{lock['lock_id']}/?fence={lock['fence']}").status_code == 204
    lock = holder.acquire()
    answer = holder.delete(f"/locks/{lock['lock_id']}/", {"fence": lock["fence"]})
    assert (answer.status_code, answer.content) == (204, b"")


# --- heartbeats and extension --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"status": "fine"},
        {"progress_info": {"progress": 100.1}},
        {"progress_info": {"progress": -1}},
        {"progress_info": {"estimated_remaining_hours": 8760.5}},
        {"progress_info": {"estimated_remaining_hours": -0.1}},
        {"progress_info": {"indexing_progress": 75}},
        {"progress_info": [1]},
        {"service_name": "x" * 101},
        {"service_name": ""},
        {"unknown": 1},
        {"fence": True},
        {"fence": "1"},
        {"fence": 1.5},
        {"fence": 2**63},
    ],
)
def test_a_bad_heartbeat_is_refused_and_not_recorded(holder, body):
    lock = holder.acquire()
    assert holder.beat(lock, **body).status_code == 400
    assert kinds(lock) == ["ACQUIRED"]


def test_heartbeats_to_a_lock_with_heartbeat_off_are_recorded(holder):
    lock = holder.acquire()
    answer = holder.beat(lock, status="warning", progress_info={"progress": 0})
    assert (answer.status_code, answer.data["next_interval"]) == (200, 0)
    shown = holder.lock(lock).data
    assert (shown["status"], shown["progress"], shown["heartbeat_health"]) == ("warning", 0, None)
    assert kinds(lock) == ["ACQUIRED", "HEARTBEAT"]


def test_a_heartbeat_that_needs_longer_extends_by_two_hours(holder):
    lock = holder.acquire(ttl_seconds=3600)
    unchanged = holder.beat(lock, progress_info={"estimated_remaining_hours": 0.9}).data
    assert when(unchanged["expires_at"]) == when(lock["expires_at"])
    longer = holder.beat(lock, progress_info={"estimated_remaining_hours": 1.1}).data
    assert when(longer["expires_at"]) == when(lock["expires_at"]) + timedelta(hours=2)
    extended = LockEvent.objects.get(kind="EXTENDED")
    assert extended.details["automatic"] is True
    assert sorted(kinds(lock)) == ["ACQUIRED", "EXTENDED", "HEARTBEAT", "HEARTBEAT"]


def test_automatic_extension_is_cut_at_24_hours_then_the_heartbeat_just_counts(holder):
    lock = holder.acquire(ttl_seconds=23 * 3600)
    locked_at = when(holder.lock(lock).data["locked_at"])
    for _again in range(2):
        answer = holder.beat(lock, progress_info={"estimated_remaining_hours": 100})
        assert answer.status_code == 200
        assert when(answer.data["expires_at"]) == locked_at + timedelta(hours=24)
    assert sorted(kinds(lock)) == ["ACQUIRED", "EXTENDED", "HEARTBEAT", "HEARTBEAT"]


def test_only_the_last_hundred_heartbeats_are_kept_and_nothing_else_can_be_deleted(holder):
    lock = holder.acquire()
    for _n in range(103):
        holder.beat(lock)
    assert kinds(lock).count("HEARTBEAT") == 100
    for kind in ("HEARTBEAT", "ACQUIRED"):
        with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("DELETE FROM branch_lock_events WHERE kind = %s", [kind])
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("UPDATE branch_lock_events SET actor = 'x'")


@pytest.mark.parametrize("hours", [0, -1, "1", True, None, "NaN", "Infinity", 10**400])
def test_an_extension_is_a_positive_finite_number(holder, hours):
    lock = holder.acquire()
    answer = holder.extend(lock, hours)
    assert (answer.status_code, error(answer)[1]) == (400, "extension_hours")


def test_a_holder_extends_up_to_24_hours_in_total_a_lock_admin_up_to_30_days(holder, admin):
    lock = holder.acquire(ttl_seconds=3600)
    answer = holder.extend(lock, 23.001)
    assert (answer.status_code, error(answer)[1]) == (400, "extension_hours")
    assert holder.extend(lock, 23).status_code == 200
    assert holder.extend(lock, 0.0001).status_code == 400
    assert admin.extend(lock, 29 * 24 + 0.001).status_code == 400
    assert admin.extend(lock, 1e300).status_code == 400
    assert admin.extend(lock, 29 * 24).status_code == 200
    assert kinds(lock).count("EXTENDED") == 2


# --- reading -------------------------------------------------------------------------------------------------------


def test_the_json_of_a_lock(holder):
    shown = holder.lock(holder.acquire()).data
    assert set(shown) >= {
        "id", "branch_name", "lock_type", "lock_scope", "resource_type", "resource_id", "locked_by", "reason",
        "locked_at", "expires_at", "heartbeat_interval", "last_heartbeat", "heartbeat_source", "status", "progress",
        "auto_release_enabled", "fence", "state", "released_at", "released_by", "metadata", "ttl_expired",
        "heartbeat_expired", "heartbeat_health", "lock_delay", "ttl_source",
    }  # fmt: skip
    assert shown["branch_name"] == "main"
    assert (shown["status"], shown["progress"], shown["heartbeat_health"]) == (None, None, None)


def test_an_ended_lock_is_404_but_for_its_history(holder):
    lock = holder.acquire()
    holder.beat(lock)
    assert "events" not in holder.lock(lock).data
    holder.release(lock)
    assert holder.lock(lock).status_code == holder.health(lock).status_code == 404
    shown = holder.lock(lock, history=1).data
    assert (shown["state"], shown["released_by"]) == ("released", holder.name)
    assert [event["kind"] for event in shown["events"]] == ["ACQUIRED", "HEARTBEAT", "RELEASED"]
    assert set(shown["events"][0]) == {"kind", "actor", "reason", "fence", "details", "created_at"}
    assert holder.lock(lock, history="maybe").status_code == 400
    assert holder.get(f"/locks/{UNKNOWN}/", history=1).status_code == 404


def test_the_list_shows_active_locks_of_a_branch_and_ended_ones_on_request(holder):
    ended, lock = holder.acquire("a/b"), None
    holder.release(ended)
    lock = holder.acquire("a/b")
    holder.acquire("elsewhere")

    def ids(**query):
        return [row["id"] for row in holder.get("/locks/", **query).data["results"]]

    assert ids(branch_name="a/b") == [str(lock["lock_id"])]
    assert ids(branch_name="a/b", history=1) == [str(lock["lock_id"]), str(ended["lock_id"])]
    assert len(ids()) == 2
    assert ids(branch_name="nowhere") == []
    assert holder.get("/locks/", branch="a/b").status_code == 400
    assert holder.get("/locks/", branch_name="a\x00b").status_code == 400


def test_the_health_summary_counts_and_puts_the_worst_first(holder):
    healthy = holder.acquire("a", heartbeat_interval=60)
    warning = holder.acquire("b", heartbeat_interval=60)
    critical = holder.acquire("c", heartbeat_interval=60)
    holder.acquire("d")
    shift(warning, last_heartbeat=-61)
    shift(critical, expires_at=-1)
    told = holder.get("/locks/health-summary/").data
    assert (told["total_locks"], told["heartbeat_enabled_locks"]) == (4, 3)
    assert told["health_summary"] == {"healthy": 1, "warning": 1, "critical": 1}
    order = [detail["lock_id"] for detail in told["lock_details"]][:3]
    assert order == [str(lock["lock_id"]) for lock in (critical, warning, healthy)]
    assert holder.get("/locks/health-summary/", branch_name="a").data["total_locks"] == 1
    assert holder.get("/locks/health-summary/", nonsense="a").status_code == 400


def test_the_health_has_the_fields_of_the_seed(holder):
    assert set(holder.health(holder.acquire()).data) >= {
        "lock_id", "is_active", "heartbeat_enabled", "last_heartbeat", "heartbeat_source", "ttl_expired",
        "heartbeat_expired", "heartbeat_health", "seconds_since_last_heartbeat", "seconds_until_ttl_expiry",
        "auto_release_enabled",
    }  # fmt: skip


def test_the_dashboard(holder):
    for n in range(11):
        holder.acquire(f"b{n:02}", kind="BACKUP")
    told = holder.get("/dashboard/").data
    assert told["total_active_locks"] == told["locks_by_type"]["BACKUP"] == 11
    assert told["locks_by_type"]["INDEXING"] == 0
    assert told["locked_branches"] == [f"b{n:02}" for n in range(11)]
    assert [lock["branch_name"] for lock in told["recent_locks"]] == [f"b{n:02}" for n in range(10, 0, -1)]


def test_cleanup_expired_is_a_sweep_now(holder, admin):
    lock = holder.acquire()
    shift(lock, expires_at=-1)
    assert holder.post("/cleanup-expired/").status_code == 403
    assert admin.post("/cleanup-expired/").data["locks_expired"] == 1
    assert holder.lock(lock).status_code == 404


# --- the gate over REST --------------------------------------------------------------------------------------------


def test_check_always_answers_200(holder, other):
    assert other.check() == {"allowed": True, "reason": None, "body": None}
    assert not Branch.objects.exists()
    lock = holder.acquire()
    refused = other.check(resource_type="template", resource_id="7")
    assert (refused["allowed"], refused["reason"]) == (False, "locked")
    assert set(refused["body"]) == {
        "error", "message", "branch", "resource_type", "lock_scope", "locked_by", "reason", "progress", "eta_seconds",
        "retry_after", "other_resources_available", "alternative_actions",
    }  # fmt: skip
    assert refused["body"]["error"] == "Locked"
    assert refused["body"]["progress"] is refused["body"]["eta_seconds"] is None
    assert refused["body"]["retry_after"] == 1800
    assert refused["body"]["other_resources_available"] is False
    mine = {"lock_id": str(lock["lock_id"]), "fence": lock["fence"]}
    assert holder.check(**mine)["allowed"] is True
    assert holder.check()["reason"] == "locked"
    for door, claim in (
        (other, mine),
        (holder, mine | {"fence": 99}),
        (holder, mine | {"lock_id": UNKNOWN}),
        (holder, {"lock_id": mine["lock_id"]}),
    ):
        assert door.check(**claim) == {"allowed": False, "reason": "stale_fence", "body": None}
    assert holder.check("elsewhere", **mine)["reason"] == "stale_fence"


def test_a_bad_check_is_a_400(holder):
    for body in ({}, {"branch_name": "a b"}, {"branch_name": "a", "resource_id": "1"}, {"branch_name": "a", "x": 1}):
        assert holder.post("/check/", body).status_code == 400
    for lock_id, fence in (("x", 1), (1, 1), (UNKNOWN, "1")):
        assert holder.post("/check/", {"branch_name": "a", "lock_id": lock_id, "fence": fence}).status_code == 400


def test_eta_and_retry_after(holder, other):
    lock = holder.acquire(scope="RESOURCE_TYPE", resource_type="a", ttl_seconds=100)
    body = other.check(resource_type="a")["body"]
    assert body["eta_seconds"] is None
    assert 70 < body["retry_after"] <= 100
    assert body["other_resources_available"] is True
    holder.beat(lock, progress_info={"progress": 65, "estimated_remaining_hours": 0.01})
    body = other.check(resource_type="a")["body"]
    assert body["progress"] == 65
    assert 6 < body["eta_seconds"] <= 36
    assert body["retry_after"] == body["eta_seconds"]
    shift(lock, estimated_at=-1000)
    body = other.check(resource_type="a")["body"]
    assert (body["eta_seconds"], body["retry_after"]) == (0, 1)


# --- branch state --------------------------------------------------------------------------------------------------


def test_an_estimate_is_as_old_as_the_heartbeat_that_told_it(holder, other):
    lock = holder.acquire(heartbeat_interval=600)
    holder.beat(lock, progress_info={"estimated_remaining_hours": 0.25})
    shift(lock, last_heartbeat=-300)
    body = other.check()["body"]
    assert 570 < body["eta_seconds"] == body["retry_after"] <= 600


def test_a_get_of_an_unknown_branch_answers_active_and_writes_nothing(viewer):
    told = viewer.get("/status/feature/user-schema/start/").data
    assert told["branch_name"] == "feature/user-schema/start"
    assert (told["state"], told["is_write_locked"], told["active_locks"]) == ("ACTIVE", False, [])
    assert told["indexing_info"] is None
    assert not Branch.objects.exists()
    for bad in ("/status/a//b/", "/status/a b/", "/status/a%00b/", "/status/a%0Ab/", f"/status/{'x' * 201}/"):
        assert viewer.get(bad).status_code == 400


def test_who_may_set_the_state_and_which_moves_are_legal(holder, admin):
    body = {"state": "ERROR", "reason": "broken"}
    assert holder.post("/status/main/", body).status_code == 403
    assert admin.post("/status/main/", {"state": "READY", "reason": "x"}).status_code == 409
    assert not Branch.objects.exists()
    assert admin.post("/status/main/", {"state": "MERGED", "reason": "x"}).status_code == 400
    assert admin.post("/status/main/", {"state": "ERROR"}).status_code == 400
    assert admin.post("/status/main/", body).data["state"] == "ERROR"
    assert admin.post("/status/main/", body).status_code == 409
    changed = LockEvent.objects.get(kind="STATE_CHANGED")
    assert (changed.actor, changed.reason, changed.details) == ("boss", "broken", {"from": "ACTIVE", "to": "ERROR"})


@pytest.mark.parametrize("state", ["ERROR", "ARCHIVED"])
def test_a_closed_branch_holds_no_lock_and_takes_no_write(holder, admin, state):
    lock = holder.acquire(scope="RESOURCE_TYPE", resource_type="a")
    admin.post("/status/main/", {"state": state, "reason": "over"})
    assert kinds(lock) == ["ACQUIRED", "FORCE_RELEASED"]
    assert holder.check()["body"]["locked_by"] is None
    assert holder.get("/status/main/").status_code == 200
    refused = holder.ask(scope="RESOURCE_TYPE", resource_type="a")
    assert (refused.status_code, refused.data["conflicts"]) == (409, [])
    assert holder.ask().status_code == (201 if state == "ERROR" else 409)


def test_a_full_indexing_moves_the_branch(holder):
    lock = holder.acquire(kind="INDEXING")
    told = holder.get("/status/main/").data
    assert (told["state"], told["is_write_locked"], told["is_ready_for_merge"]) == ("LOCKED_FOR_WRITE", True, False)
    assert told["indexing_info"]["service"] == holder.name
    body = {"locks": [{"lock_id": str(lock["lock_id"]), "fence": lock["fence"]}]}
    assert holder.post("/indexing/main/complete/", body).data == {
        "completion_type": "complete",
        "remaining": [],
        "branch_state": "READY",
    }
    told = holder.get("/status/main/").data
    assert (told["state"], told["is_write_locked"], told["is_ready_for_merge"]) == ("READY", False, True)
    assert told["indexing_info"]["duration_seconds"] >= 0
    assert holder.check()["allowed"] is True
    holder.acquire(kind="INDEXING")
    assert state_of() == "LOCKED_FOR_WRITE"
    moves = [event.details["to"] for event in LockEvent.objects.filter(kind="STATE_CHANGED").order_by("id")]
    assert moves == ["LOCKED_FOR_WRITE", "READY", "ACTIVE", "LOCKED_FOR_WRITE"]


def test_a_full_indexing_by_bare_sql_is_completed_to_ready_too(holder):
    branch = Branch.objects.create(name="main")
    lock = BranchLock.objects.create(
        branch=branch, lock_type="INDEXING", lock_scope="BRANCH", locked_by=holder.name, reason="x",
        expires_at=Now() + timedelta(hours=1),
    )  # fmt: skip
    body = {"locks": [{"lock_id": str(lock.pk), "fence": 1}]}
    assert holder.post("/indexing/main/complete/", body).data["branch_state"] == "READY"


def test_any_other_end_of_a_full_indexing_leaves_the_branch_active(holder, other, admin):
    def release(lock):
        holder.release(lock)

    def force(lock):
        admin.post("/force-unlock/", {"branch_name": "main", "reason": "stuck"})

    def sweep(lock):
        shift(lock, last_heartbeat=-1000)
        sweeping.run("locks.expire_heartbeats")

    for end in (release, force, sweep):
        lock = holder.acquire(kind="INDEXING")
        assert state_of() == "LOCKED_FOR_WRITE"
        end(lock)
        assert state_of() == "ACTIVE"
    shift(holder.acquire(kind="INDEXING"), expires_at=-1)
    assert other.check()["allowed"] is True
    assert state_of() == "LOCKED_FOR_WRITE"
    other.acquire()
    assert state_of() == "ACTIVE"


def test_type_and_resource_locks_leave_the_branch_active(holder):
    holder.acquire(kind="INDEXING", scope="RESOURCE_TYPE", resource_type="a")
    holder.acquire(kind="INDEXING", scope="RESOURCE", resource_type="b", resource_id="1")
    assert state_of() == "ACTIVE"
    assert holder.get("/status/main/").data["is_write_locked"] is False


# --- indexing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branch", "types"),
    [
        ("feature/Object-changes", ["object_type"]),
        ("ENTITY", ["object_type"]),
        ("relation-links", ["link_type"]),
        ("functions/entity", ["object_type", "action_type"]),
        ("object/link/action", ["object_type", "link_type", "action_type"]),
        ("main", ["object_type"]),
    ],
)
def test_types_are_guessed_from_the_name(holder, branch, types):
    answer = holder.post(f"/indexing/{branch}/start/")
    assert [lock["resource_type"] for lock in answer.data["locks"]] == types


def test_start_locks_what_it_can_and_reports_the_rest(holder, other):
    other.acquire(scope="RESOURCE", resource_type="link_type", resource_id="5")
    body = {"resource_types": ["object_type", "link_type", "action_type", "object_type"]}
    answer = holder.post("/indexing/main/start/", body)
    assert answer.status_code == 201
    assert set(answer.data) == {
        "locks", "not_locked", "lock_scope", "branch_state", "other_resources_available",
    }  # fmt: skip
    assert [lock["resource_type"] for lock in answer.data["locks"]] == ["object_type", "action_type"]
    assert [lock["fence"] for lock in answer.data["locks"]] == [2, 3]
    [missed] = answer.data["not_locked"]
    assert missed["resource_type"] == "link_type"
    assert missed["conflicts"][0]["locked_by"] == other.name
    assert (answer.data["lock_scope"], answer.data["branch_state"]) == ("RESOURCE_TYPE", "ACTIVE")
    assert answer.data["other_resources_available"] is True
    again = holder.post("/indexing/main/start/", body)
    assert again.status_code == 409
    assert len(again.data["conflicts"]) == 3
    assert LockEvent.objects.filter(kind="CONFLICT").count() == 4


def test_force_branch_lock_needs_a_lock_admin_and_takes_the_branch(holder, admin):
    body = {"force_branch_lock": True}
    assert holder.post("/indexing/main/start/", body).status_code == 403
    answer = admin.post("/indexing/main/start/", body)
    assert (answer.data["lock_scope"], answer.data["branch_state"]) == ("BRANCH", "LOCKED_FOR_WRITE")
    assert answer.data["other_resources_available"] is False
    assert answer.data["locks"][0]["resource_type"] is None
    assert answer.data["locks"][0]["heartbeat_interval"] == 120


@pytest.mark.parametrize(
    "body",
    [
        {"resource_types": []},
        {"resource_types": ["x"] * 101},
        {"resource_types": ["x" * 101]},
        {"resource_types": [""]},
        {"resource_types": "object_type"},
        {"service_name": "x" * 101},
        {"force_branch_lock": "true"},
        {"nonsense": 1},
    ],
)
def test_a_bad_start_is_refused(holder, body):
    assert holder.post("/indexing/main/start/", body).status_code == 400
    assert not Branch.objects.exists()


@pytest.mark.parametrize("locks", [[], "none", None])
def test_a_completion_without_locks_names_the_field(holder, locks):
    answer = holder.post("/indexing/main/complete/", {"locks": locks})
    assert answer.status_code == 400
    assert [error["attr"] for error in answer.data["errors"]] == ["locks"]


def test_complete_is_all_or_nothing(holder, other):
    started = holder.post("/indexing/a/start/start/", {"resource_types": ["x", "y", "z"]}).data["locks"]
    named = [{"lock_id": lock["lock_id"], "fence": lock["fence"]} for lock in started]
    path = "/indexing/a/start/complete/"
    answer = holder.post(path, {"locks": named[:1]})
    assert answer.data == {"completion_type": "partial", "remaining": ["y", "z"], "branch_state": "ACTIVE"}
    assert holder.post(path, {"locks": named}).status_code == 410
    assert other.post(path, {"locks": named[1:]}).status_code == 403
    wrong = [named[1], named[2] | {"fence": 77}]
    assert error(holder.post(path, {"locks": wrong}))[0] == "stale_fence"
    assert holder.post(path, {"locks": []}).status_code == 400
    assert holder.post(path, {}).status_code == 400
    assert holder.post(path, {"locks": [named[1], named[1]]}).status_code == 400
    assert holder.post(path, {"locks": [named[1] | {"lock_id": UNKNOWN}]}).status_code == 404
    assert holder.post("/indexing/b/complete/", {"locks": named[1:]}).status_code == 404
    assert BranchLock.objects.active().count() == 2
    answer = holder.post(path, {"locks": named[1:]})
    assert answer.data == {"completion_type": "complete", "remaining": [], "branch_state": "ACTIVE"}


def test_only_indexing_locks_are_completed_those_of_acquire_too(holder):
    backup = holder.acquire(kind="BACKUP", scope="RESOURCE_TYPE", resource_type="a")
    indexing = holder.acquire(kind="INDEXING", scope="RESOURCE", resource_type="b", resource_id="1")
    for lock, status in ((backup, 409), (indexing, 200)):
        body = {"locks": [{"lock_id": str(lock["lock_id"]), "fence": lock["fence"]}]}
        assert holder.post("/indexing/main/complete/", body).status_code == status


# --- force-unlock --------------------------------------------------------------------------------------------------


def test_force_unlock(holder, admin):
    first, second = holder.acquire("a"), holder.acquire("b")
    newer = None
    assert holder.post("/force-unlock/", {"branch_name": "a", "reason": "x"}).status_code == 403
    for bad in (
        {"reason": "x"},
        {"branch_name": "a"},
        {"lock_ids": [], "reason": "x"},
        {"lock_ids": ["x"]},
        {"lock_ids": [7], "reason": "x"},
    ):
        assert admin.post("/force-unlock/", bad).status_code == 400
    body = {"branch_name": "a", "lock_ids": [str(first["lock_id"]), str(second["lock_id"])], "reason": "stuck"}
    assert admin.post("/force-unlock/", body).data == {"locks_released": 1}
    newer = holder.acquire("a")
    assert admin.post("/force-unlock/", body).data == {"locks_released": 0}
    assert holder.lock(newer).status_code == 200
    assert admin.post("/force-unlock/", {"branch_name": "a", "reason": "stuck"}).data == {"locks_released": 1}
    assert admin.post("/force-unlock/", {"branch_name": "nowhere", "reason": "stuck"}).data == {"locks_released": 0}
    event = LockEvent.objects.filter(kind="FORCE_RELEASED").order_by("id").first()
    assert (event.actor, event.reason, event.fence) == ("boss", "stuck", first["fence"])
    assert BranchLock.objects.get(pk=first["lock_id"]).state == "force_released"


# --- idempotency and delay -----------------------------------------------------------------------------------------


def test_the_same_key_and_body_get_the_same_lock(holder, other):
    lock = holder.acquire(key="k1")
    again = holder.ask(key="k1")
    assert (again.status_code, again.data) == (201, lock)
    assert again["Idempotent-Replay"] == "true"
    assert error(holder.ask("elsewhere", key="k1"))[0] == "idempotency_conflict"
    assert other.ask(key="k1").status_code == 409
    assert holder.ask(key="b\u00e4d").status_code == 400
    assert BranchLock.objects.count() == 1


@pytest.mark.parametrize("end", ["release", "expire", "sweep"])
def test_the_same_key_after_the_end_is_410(holder, end):
    lock = holder.acquire(key="k1")
    if end == "release":
        holder.release(lock)
    else:
        shift(lock, expires_at=-1)
    if end == "sweep":
        sweeping.run("locks.expire_ttls")
    assert holder.ask(key="k1").status_code == 410
    assert holder.ask(key="k2").status_code == 201


def test_only_successes_are_kept(holder, other):
    lock = other.acquire()
    assert holder.ask(key="k1").status_code == 409
    other.release(lock)
    assert holder.ask(key="k1").status_code == 201


def test_a_start_is_idempotent_too(holder, other):
    def start(**body):
        return holder.post("/indexing/main/start/", body, **{"Idempotency-Key": "s1"})

    blocker = other.acquire()
    assert start().status_code == 409
    assert LockEvent.objects.filter(kind="CONFLICT").count() == 1
    other.release(blocker)
    first = start()
    assert first.status_code == 201
    assert start().json() == first.json()
    assert start(reason="x").status_code == 409
    holder.release(first.data["locks"][0])
    assert start().status_code == 410


def test_lock_delay_binds_others_from_the_instant_of_expiry(holder, other, admin):
    lock = holder.acquire(lock_delay=60, ttl_seconds=60)
    assert holder.lock(lock).data["lock_delay"] == 60
    shift(lock, expires_at=-20)
    refused = other.ask()
    assert refused.status_code == 409
    assert 0 < refused.data["retry_after"] <= 40
    assert refused.data["conflicts"][0]["lock_id"] == str(lock["lock_id"])
    assert kinds(lock)[-1] == "EXPIRED_TTL"
    assert other.check()["allowed"] is True
    assert other.ask("elsewhere").status_code == 201
    own = holder.ask()
    assert own.status_code == 201
    holder.release(own.data)
    shift(lock, expired_at=-61)
    assert other.ask().status_code == 201


def test_there_is_no_delay_after_a_clean_release(holder, other):
    holder.release(holder.acquire(lock_delay=60))
    assert other.ask().status_code == 201


# --- waiting -------------------------------------------------------------------------------------------------------


def test_a_wait_that_times_out_is_a_409_with_the_conflict(holder, other):
    lock = holder.acquire()
    answer = other.ask(wait_seconds=0.05)
    assert answer.status_code == 409
    assert answer.data["conflicts"][0]["lock_id"] == str(lock["lock_id"])
    assert LockWaiter.objects.get().state == "timed_out"
    assert [event.kind for event in LockEvent.objects.filter(lock=None).order_by("id")] == ["WAIT_QUEUED", "CONFLICT"]


def test_the_event_of_a_wait_tells_what_blocked_it(holder, other):
    lock = holder.acquire()
    other.ask("main", "BACKUP", "RESOURCE_TYPE", resource_type="a", wait_seconds=0.1)
    queued, refused = LockEvent.objects.filter(lock=None).order_by("id")
    assert [queued.kind, refused.kind] == ["WAIT_QUEUED", "CONFLICT"]
    for event in (queued, refused):
        assert (event.actor, event.reason) == ("migrator", "night work")
        assert event.details["blocked_by"] == [str(lock["lock_id"])]
        assert (event.details["lock_scope"], event.details["resource_type"]) == ("RESOURCE_TYPE", "a")


def test_a_wait_that_is_not_needed_is_granted_at_once(holder):
    assert holder.ask(wait_seconds=30).status_code == 201
    assert not LockWaiter.objects.exists()


# --- what is not JSON ----------------------------------------------------------------------------------------------


def test_json_nested_too_deep_is_400(holder):
    raw = "[" * 5000 + "]" * 5000
    path = "/api/v1/branch-locks/acquire/"
    assert holder.client.post(path, raw, content_type="application/json").status_code == 400
    body = '{"branch_name": "main", "reason": ' + '{"a":' * 200 + "1" + "}" * 200 + "}"
    assert holder.client.post(path, body, content_type="application/json").status_code == 400


@pytest.mark.parametrize("raw", ["[]", '"x"', "1", "null", "{", '{"branch_name": "\\ud800"}'])
@pytest.mark.parametrize(
    "path", ["/acquire/", "/check/", "/force-unlock/", "/status/main/", "/indexing/main/start/", "/cleanup-expired/"]
)
def test_bodies_that_are_no_object(admin, path, raw):
    answer = admin.client.post(f"/api/v1/branch-locks{path}", raw, content_type="application/json")
    assert answer.status_code == 400
