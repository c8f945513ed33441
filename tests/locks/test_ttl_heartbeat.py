"""The fourteen cases of the seed, by their names, with real rows and the database's clock."""

from datetime import datetime, timedelta

import pytest
from django.db import connection

from config import sweeping
from locks.models import BranchLock
from tests.locks.conftest import kinds, shift

pytestmark = pytest.mark.django_db


def since(text):
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp() - %s::timestamptz)", [text])
        return float(cursor.fetchone()[0])


def test_heartbeat_enabled_lock_creation(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=60)
    shown = holder.lock(lock).data
    assert lock["heartbeat_interval"] == shown["heartbeat_interval"] == 60
    assert since(shown["last_heartbeat"]) < 5
    assert shown["heartbeat_source"] == holder.name
    assert shown["auto_release_enabled"] is True


def test_send_heartbeat(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=120)
    shift(lock, last_heartbeat=-50)
    answer = holder.beat(lock, service_name="funnel-service", status="healthy", progress_info={"progress": 75})
    assert answer.status_code == 200
    shown = holder.lock(lock).data
    assert (shown["heartbeat_source"], shown["status"], shown["progress"]) == ("funnel-service", "healthy", 75)
    assert since(answer.data["last_heartbeat"]) < 2
    assert answer.data["next_interval"] == 120


def test_heartbeat_for_nonexistent_lock(holder):
    answer = holder.post("/locks/01980000-0000-7000-8000-000000000000/heartbeat/", {"fence": 1})
    assert answer.status_code == 404


def test_lock_health_status(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=60)
    health = holder.health(lock).data
    assert health["is_active"] is health["heartbeat_enabled"] is health["auto_release_enabled"] is True
    assert health["ttl_expired"] is health["heartbeat_expired"] is False
    assert health["heartbeat_source"] == holder.name
    assert health["heartbeat_health"] == "healthy"
    assert health["seconds_since_last_heartbeat"] in (0, 1, 2)
    assert 14390 < health["seconds_until_ttl_expiry"] <= 14400


def test_ttl_expiry_detection(admin):
    lock = admin.acquire(kind="MANUAL", ttl_seconds=1)
    shift(lock, expires_at=-0.1)
    shown = admin.lock(lock)
    assert shown.status_code == 200
    assert shown.data["ttl_expired"] is True
    assert shown.data["state"] == "active"
    assert admin.health(lock).data["ttl_expired"] is True


def test_heartbeat_expiry_detection(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=1)
    shift(lock, last_heartbeat=-10)
    health = holder.health(lock).data
    assert health["heartbeat_expired"] is True
    assert health["heartbeat_health"] == "critical"


def test_ttl_cleanup(holder):
    lock = holder.acquire()
    assert holder.lock(lock).status_code == 200
    shift(lock, expires_at=-0.1)
    assert sweeping.run("locks.expire_ttls")["counts"] == {"expired": 1}
    assert holder.lock(lock).status_code == 404
    assert kinds(lock) == ["ACQUIRED", "EXPIRED_TTL"]
    assert sweeping.run("locks.expire_ttls")["counts"] == {}


def test_heartbeat_cleanup(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=1)
    shift(lock, last_heartbeat=-10)
    assert sweeping.run("locks.expire_heartbeats")["counts"] == {"expired": 1}
    assert holder.lock(lock).status_code == 404
    assert kinds(lock) == ["ACQUIRED", "EXPIRED_HEARTBEAT"]
    assert sweeping.run("locks.expire_heartbeats")["counts"] == {}


def test_extend_lock_ttl(holder, admin):
    lock = holder.acquire(ttl_seconds=3600)
    answer = admin.extend(lock, 2, reason="large dataset")
    assert answer.status_code == 200
    before, after = (datetime.fromisoformat(text) for text in (lock["expires_at"], answer.data["new_expires_at"]))
    assert after - before == timedelta(hours=2)
    assert kinds(lock) == ["ACQUIRED", "EXTENDED"]


def test_auto_release_disabled_locks_not_cleaned(holder):
    lock = holder.acquire(auto_release_enabled=False, enable_heartbeat=True, heartbeat_interval=1)
    shift(lock, expires_at=-10, last_heartbeat=-10)
    sweeping.run("locks.expire_ttls")
    sweeping.run("locks.expire_heartbeats")
    assert holder.lock(lock).data["state"] == "active"
    assert holder.health(lock).data["heartbeat_health"] == "critical"


def test_write_permission_respects_expired_locks(holder, other):
    lock = holder.acquire(kind="INDEXING", scope="RESOURCE_TYPE", resource_type="object_type")
    refused = other.check(resource_type="object_type")
    assert refused["allowed"] is False
    assert "locked" in refused["reason"]
    shift(lock, expires_at=-0.1)
    assert other.check(resource_type="object_type")["allowed"] is True


def test_heartbeat_grace_period(holder):
    lock = holder.acquire(kind="INDEXING", heartbeat_interval=2)
    shift(lock, last_heartbeat=-5)
    health = holder.health(lock).data
    assert (health["heartbeat_expired"], health["heartbeat_health"]) == (False, "warning")
    shift(lock, last_heartbeat=-7)
    health = holder.health(lock).data
    assert (health["heartbeat_expired"], health["heartbeat_health"]) == (True, "critical")


def test_indexing_locks_with_heartbeat(holder):
    body = {"resource_types": ["object_type", "link_type"], "service_name": "funnel-service"}
    answer = holder.post("/indexing/main/start/", body)
    assert answer.status_code == 201
    assert [lock["resource_type"] for lock in answer.data["locks"]] == ["object_type", "link_type"]
    for started in answer.data["locks"]:
        shown = holder.lock(started).data
        assert started["heartbeat_interval"] == shown["heartbeat_interval"] == 120
        assert shown["last_heartbeat"] is not None
        assert shown["heartbeat_source"] == "funnel-service"
        assert shown["auto_release_enabled"] is True


def test_stuck_lock_prevention_scenario(holder, other):
    [lock] = holder.post("/indexing/main/start/", {"resource_types": ["object_type"]}).data["locks"]
    for progress in (0, 25, 50):
        assert holder.beat(lock, progress_info={"progress": progress}).status_code == 200
    shift(lock, last_heartbeat=-400)
    assert holder.health(lock).data["heartbeat_expired"] is True
    assert sweeping.run("locks.expire_heartbeats")["counts"] == {"expired": 1}
    assert holder.lock(lock).status_code == 404
    assert other.check(resource_type="object_type")["allowed"] is True
    assert BranchLock.objects.get().released_by == "system"
