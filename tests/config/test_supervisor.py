"""What `up` is made of, in one process: login and token, the broker's lanes, the canary, the verdicts, the cadence."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import override_settings
from django.utils import timezone
from django_q.brokers import get_broker
from django_q.models import OrmQ, Schedule
from django_q.scheduler import scheduler
from django_q.signing import SignedPackage
from knox.models import AuthToken
from redis.exceptions import RedisError

from config.models import Canary
from config.supervisor import boot, broker, canary, watch
from config.supervisor.processes import Child, Signals
from config.supervisor.vigil import SILENT_LIMIT, STOPPED_LIMIT, Vigil

pytestmark = pytest.mark.django_db


@pytest.fixture
def data_dir(tmp_path, settings):
    settings.DATA_DIR = tmp_path
    return tmp_path


def test_the_login_is_made_once_and_told_again(data_dir):
    first = boot.admin_login()
    assert first.startswith("admin / ")
    assert boot.admin_login() == first
    assert (data_dir / "admin-password").stat().st_mode & 0o777 == 0o600


def test_a_password_changed_by_a_person_is_not_touched(data_dir, admin_user):
    assert boot.admin_login() == "admin / (the password set by you)"
    admin_user.refresh_from_db()
    assert admin_user.check_password("password")


def test_the_password_kept_serves_a_new_database_too(data_dir, django_user_model):
    first = boot.admin_login()
    django_user_model.objects.all().delete()
    assert boot.admin_login() == first


def test_the_token_is_told_again_while_it_opens_and_made_anew_when_not(data_dir):
    first = boot.client_token(demo=False)
    assert boot.client_token(demo=False) == first
    AuthToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))
    second = boot.client_token(demo=False)
    assert second != first
    AuthToken.objects.all().delete()
    assert boot.client_token(demo=True) not in (first, second)


def test_demo_data_are_only_for_a_database_nobody_used(data_dir):
    assert boot._empty()
    boot.admin_login()
    assert not boot._empty()


@pytest.mark.parametrize("hosts", [["localhost", "127.0.0.1"], ["localhost", "signalbox.example"], ["*"]])
def test_listens_beyond_loopback_only_for_names_beyond_it(hosts):
    with override_settings(ALLOWED_HOSTS=hosts):
        addresses = boot.addresses()
    assert ("127.0.0.1" in addresses) == (hosts == ["localhost", "127.0.0.1"])
    assert bool({"::", "0.0.0.0"} & set(addresses)) != ("127.0.0.1" in addresses)


@pytest.mark.parametrize("hosts", [["localhost"], ["signalbox.example"]])
def test_all_addresses_can_be_listened_on_at_once_and_ipv4_reaches_them(hosts):
    with override_settings(ALLOWED_HOSTS=hosts), ExitStack() as open_sockets:
        port = 0
        for address in boot.addresses():  # as gunicorn does it
            wire = open_sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wire.bind((address, port))
            wire.listen(1)
            port = wire.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(CommandError, match=f"PORT: {port} cannot be listened on"):
            boot.check_port(port)


def test_a_broker_that_is_away_is_one_sentence(settings):
    settings.REDIS_URL = "redis://127.0.0.1:1"
    with pytest.raises(CommandError, match=r"REDIS_URL: the broker cannot be used: .*refused"):
        boot.check_broker()


def test_a_redis_that_is_away_is_waited_for_not_died_of(monkeypatch):
    monkeypatch.setattr(broker.Conf, "REDIS", "redis://127.0.0.1:1")
    monkeypatch.setattr(broker, "PATIENCE", 0)
    assert broker.LaneRedis().dequeue() is None


def test_a_redis_that_hangs_does_not_hold_up_who_enqueues(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(broker.Conf, "REDIS", f"redis://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(broker, "ANSWER_WITHIN", 0.1)
        with pytest.raises(RedisError):
            broker.LaneRedis().enqueue("task")


@pytest.fixture
def lane(monkeypatch):
    monkeypatch.setattr(broker, "lane", "signalbox@here:1")
    return broker.lane


def queued(key, payload, seconds_ago=10):
    return OrmQ.objects.create(key=key, payload=payload, lock=timezone.now() - timedelta(seconds=seconds_ago))


def test_the_own_lane_goes_first_then_the_oldest_and_a_foreign_lane_never(lane):
    shared = settings.Q_CLUSTER["name"]
    queued("signalbox@there:1", "foreign")
    queued(shared, "old")
    queued(shared, "new", seconds_ago=500)
    queued(lane, "mine")
    claimed = [get_broker().dequeue()[0][1] for _ in range(3)]
    assert claimed == ["mine", "old", "new"]
    assert get_broker().dequeue() is None


def test_a_claimed_task_comes_back_only_after_its_retry_time(lane):
    row = queued(lane, "mine")
    get_broker().dequeue()
    row.refresh_from_db()
    assert row.lock > timezone.now() + timedelta(seconds=settings.Q_CLUSTER["retry"] - 30)


@pytest.mark.django_db(transaction=True)  # django-q2 closes connections it finds in a transaction
def test_a_canary_is_answered_by_the_monitor_and_only_the_latest_question_counts(lane):
    first = canary.ask(lane)
    old = SignedPackage.loads(OrmQ.objects.get(key=lane).payload)
    second = canary.ask(lane)
    new = SignedPackage.loads(OrmQ.objects.get(key=lane).payload)
    canary.hear(None, task={**old, "success": True})
    assert not canary.answered(lane, first)
    canary.hear(None, task={**new, "success": False})
    assert not canary.answered(lane, second)
    canary.hear(None, task={**new, "success": True})
    assert canary.answered(lane, second)
    assert Canary.objects.get().host == lane


def test_other_tasks_are_no_sign_of_life(lane):
    asked = canary.ask(lane)
    canary.hear(None, task={"func": "config.sweeping.tick", "args": ("x",), "success": True})
    assert not canary.answered(lane, asked)


@pytest.fixture
def watching(lane):
    """A watch over a cluster of five minutes' age that nobody started."""
    signals = Signals.__new__(Signals)
    signals.stop = False
    cluster = Child("cluster", [lane], {})
    cluster.started_at = time.monotonic() - 300
    watcher = watch.Watch(cluster, lane, signals)
    watcher._forget(4242)
    return watcher


def test_an_unanswered_canary_condemns_the_cluster(watching):
    watching._ask(limit=0)
    watching._look_at_answer()
    assert watching.verdict and watching.verdict[0] == 4242


def test_an_answered_canary_does_not(watching):
    watching._ask(limit=0)
    Canary.objects.update(answered_at=timezone.now())
    watching._look_at_answer()
    assert (watching.verdict, watching.question) == (None, None)


def test_schedules_that_stand_still_condemn_the_cluster(watching):
    call_command("sync_schedules")
    watching.next_look_at_schedules = 0
    watching._look_at_schedules()
    assert watching.verdict is None
    Schedule.objects.update(next_run=timezone.now() - watch.OVERDUE - timedelta(seconds=1))
    watching.next_look_at_schedules = 0
    watching._look_at_schedules()
    assert watching.verdict == (4242, "its schedules stand still")


def test_every_sweep_is_asked_for_at_the_start_and_they_do_not_pile_up(watching):
    for _ in range(5):
        watching._tick_all()
    assert OrmQ.objects.count() < 2 * len(settings.SWEEPS)
    asked = {SignedPackage.loads(row.payload)["args"] for row in OrmQ.objects.all()}
    assert asked == {(name,) for name in settings.SWEEPS}


@pytest.mark.django_db(transaction=True)  # django-q2 closes connections it finds in a transaction
def test_the_scheduler_ticks_a_half_minute_cron_once_per_slot(settings):
    settings.SWEEPS = {"config.purge_expired": {"cron": settings.HALF_MINUTE}}
    call_command("sync_schedules")
    Schedule.objects.update(next_run=timezone.now() - timedelta(minutes=10))
    scheduler(get_broker())
    assert OrmQ.objects.count() == 1  # not one for each of the slots missed
    after = Schedule.objects.get().next_run
    assert after.second in (0, 30)
    assert timedelta(0) < after - timezone.now() <= timedelta(seconds=30)
    scheduler(get_broker())
    assert OrmQ.objects.count() == 1


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def vigil(sleeper):
    signals = Signals.__new__(Signals)
    signals.stop = False
    web = Child("web", [], {})
    web.process = sleeper
    return Vigil([web], web, lambda: False, signals)


def test_a_stopped_process_is_killed_after_its_limit(vigil, sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    vigil.look_at_processes()
    assert sleeper.poll() is None
    vigil.stopped = {process: since - STOPPED_LIMIT for process, since in vigil.stopped.items()}
    vigil.look_at_processes()
    assert sleeper.wait(timeout=30) == -signal.SIGKILL


def test_a_process_that_goes_on_in_time_is_left_alone(vigil, sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    vigil.look_at_processes()
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    vigil.look_at_processes()
    assert vigil.stopped == {}


def test_a_web_server_that_does_not_answer_is_killed_after_its_limit(vigil, sleeper):
    vigil.listen_to_web()
    vigil.listen_to_web()
    assert sleeper.poll() is None
    vigil.heard = (sleeper.pid, time.monotonic() - SILENT_LIMIT)
    vigil.listen_to_web()
    assert sleeper.wait(timeout=30) == -signal.SIGKILL


def test_a_web_server_that_answers_is_left_alone(vigil, sleeper):
    vigil.answers = lambda: True
    vigil.heard = (sleeper.pid, time.monotonic() - SILENT_LIMIT)
    vigil.listen_to_web()
    assert vigil.heard[1] > time.monotonic() - SILENT_LIMIT / 2
    assert sleeper.poll() is None
