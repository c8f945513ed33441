"""The Python client against a real server."""

import threading
from types import SimpleNamespace

import pytest
from django.db import connection

from config import integrity
from locks import client as client_module
from locks import demo
from locks.client import LockBusy, LockClient, LockError, LockLost
from locks.models import BranchLock
from tests.locks.conftest import kinds

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def lock_client(live_server, make_client):
    def make(username="script", group="lock-holder", url=""):
        token = make_client(group, username=username)._credentials["HTTP_AUTHORIZATION"].split()[1]
        return LockClient(url or live_server.url, token, service_name="test")

    return make


def ran_out():
    BranchLock.objects.update(expires_at="2020-01-01T00:00Z")


def events(lock):
    return kinds({"lock_id": lock.id})


def test_holding_a_lock(lock_client):
    with lock_client().hold("main", lock_type="MIGRATION", reason="v2") as lock:
        row = BranchLock.objects.get(pk=lock.id)
        assert (row.fence, row.reason, row.lock_scope, row.heartbeat_interval) == (lock.fence, "v2", "BRANCH", 120)
        assert lock.headers == {"X-Lock-Id": lock.id, "X-Lock-Fence": str(lock.fence)}
        lock.check()
        lock.progress = 50
        lock.heartbeat()
        lock.extend(1)
    assert events(lock) == ["ACQUIRED", "HEARTBEAT", "EXTENDED", "RELEASED"]
    assert BranchLock.objects.get().progress == 50


def test_an_error_inside_releases_too(lock_client):
    with pytest.raises(ZeroDivisionError), lock_client().hold("main", lock_type="BACKUP") as lock:
        1 / 0  # noqa: B018
    assert events(lock)[-1] == "RELEASED"


def test_somebody_elses_lock_is_busy(lock_client):
    with lock_client("one").hold("main", lock_type="BACKUP", reason="theirs", resource_type="a"):
        with pytest.raises(LockBusy) as busy, lock_client("two").hold("main", lock_type="BACKUP"):
            pass
        assert busy.value.conflicts[0]["reason"] == "theirs"


def test_a_lost_lock_raises(lock_client):
    with pytest.raises(LockLost), lock_client().hold("main", lock_type="BACKUP") as lock:
        ran_out()
        with pytest.raises(LockLost):
            lock.heartbeat()
        assert lock.lost
        lock.check()


def test_a_lock_lost_unnoticed_raises_on_leaving(lock_client):
    with pytest.raises(LockLost), lock_client().hold("main", lock_type="BACKUP", enable_heartbeat=False):
        ran_out()


def test_heartbeats_run_in_the_background(lock_client):
    with lock_client().hold("main", lock_type="BACKUP", heartbeat_interval=1) as lock:
        pause = threading.Event()
        for _try in range(1000):
            if "HEARTBEAT" in events(lock):
                break
            pause.wait(0.01)
        lock.check()
    assert "HEARTBEAT" in events(lock)


def test_silence_is_noticed_without_the_server(lock_client):
    client = lock_client()
    lock = client.acquire("main", lock_type="BACKUP", heartbeat_interval=1)
    lock._heard_at -= 4
    with pytest.raises(LockLost):
        lock.check()


def test_the_end_of_the_ttl_is_noticed_without_the_server(lock_client):
    lock = lock_client().acquire("main", lock_type="BACKUP", ttl_seconds=60)
    lock.check()
    lock._ends_at -= 61
    assert lock.lost
    with pytest.raises(LockLost):
        lock.check()
    lock.extend(1)
    lock.check()
    lock._ends_at -= 3601
    lock.heartbeat()
    lock.check()


def test_the_end_of_the_default_ttl_is_noticed_too(lock_client):
    lock = lock_client().acquire("main", lock_type="BACKUP")
    lock.check()
    lock._ends_at -= 2 * 3600
    with pytest.raises(LockLost):
        lock.check()


def test_an_answer_from_before_an_extension_does_not_undo_it(lock_client, monkeypatch):
    client = lock_client()
    lock = client.acquire("main", lock_type="BACKUP", ttl_seconds=3600)
    call, answered, extended = client.call, threading.Event(), threading.Event()
    beating = threading.Thread(target=lock.heartbeat)

    def out_of_order(method, path, *args, **kwargs):
        if path.endswith("/extend-ttl/"):
            beating.start()
            answered.wait(0.3)
            return call(method, path, *args, **kwargs)
        answer = call(method, path, *args, **kwargs)
        answered.set()
        extended.wait(30)
        return answer

    monkeypatch.setattr(client, "call", out_of_order)
    lock.extend(1)
    extended.set()
    beating.join()
    assert lock.expires_at == BranchLock.objects.get().expires_at.isoformat().replace("+00:00", "Z")
    connection.close()


def test_the_clocks_of_a_lock_that_was_waited_for_begin_with_the_lock(lock_client, monkeypatch):
    """Asked for long ago and granted just now: neither silent nor over."""
    client, late = lock_client(), []
    call = client.call

    def slowly(method, path, *args, **kwargs):
        answer = call(method, path, *args, **kwargs)
        late.append(10)
        return answer

    monkeypatch.setattr(client, "call", slowly)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: sum(late[:1])))
    lock = client.acquire("main", lock_type="BACKUP", wait_seconds=20, ttl_seconds=5, heartbeat_interval=1)
    lock.check()


def test_other_refusals_are_errors(lock_client):
    with pytest.raises(LockError) as refused:
        lock_client().acquire("a b", lock_type="BACKUP")
    assert refused.value.status == 400
    with pytest.raises(LockError) as refused:
        lock_client("viewer", "viewer").acquire("main", lock_type="BACKUP")
    assert refused.value.status == 403
    connection.close()


def test_the_demo_world_is_sound_and_made_once():
    said = []
    for _n in range(2):
        demo.seed(3, said.append)
    assert "already" in said[1]
    readings = {reading.name: reading.count for reading in integrity.report() if reading.name.startswith("locks.")}
    assert set(readings.values()) == {0}
    assert BranchLock.objects.expired().count() == 1
    assert {lock.branch.name.split("/")[0] for lock in BranchLock.objects.select_related("branch")} == {"demo"}
