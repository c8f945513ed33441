"""Real agents against a real server while both are being killed.

Short here; the whole of it is `CHAOS=10x20x50 pytest tests/devices/test_chaos.py` (agents x devices x tasks).
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from urllib.parse import quote

import psutil
import pytest
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.db import connection
from django.utils import timezone
from knox.models import AuthToken

from config import sweeping
from config.integrity import invariants, measure
from devices import services
from devices.models import Attempt, Device, PCSummary, Task, TaskDevice

AGENTS, DEVICES, TASKS = map(int, os.environ.get("CHAOS", "3x4x3").split("x"))
# Kills follow the work, not the clock: on a slow machine nothing but starts would happen otherwise.
ROWS_BETWEEN_KILLS = AGENTS * DEVICES
SURELY_LOST = timedelta(seconds=8)
TIME_LIMIT = 240 + 10 * TASKS


@pytest.fixture
def processes():
    """Started ones, all ended with the test."""
    started = []

    def start(*command, **environment):
        process = subprocess.Popen(
            command,
            cwd=settings.BASE_DIR,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()


@pytest.fixture
def server(processes, transactional_db):
    """Gunicorn with two workers on the test's database; (its process, its address)."""
    connection.ensure_connection()
    place = connection.settings_dict
    host = quote(place["HOST"] or "localhost", safe="")
    login = ":".join(quote(part, safe="") for part in (place["USER"], place.get("PASSWORD") or "") if part)
    port = f":{place['PORT']}" if place.get("PORT") else ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = processes(
        *[sys.executable, "-m", "gunicorn", "-w", "2", "-b", address, "config.wsgi"],
        DATABASE_URL=f"postgresql://{login}@{host}{port}/{place['NAME']}",
        SECRET_KEY=settings.SECRET_KEY,
        API_RATE="1000000/min",
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0:
                return process, f"http://{address}"
        assert not ended_within(process, 0.1), "the server did not start"
    raise AssertionError("the server did not listen in time")


def ended_within(process, seconds):
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def agent_command(url, number, token):
    return [
        *[sys.executable, "manage.py", "device_agent", "--pc", number, "--devices", str(DEVICES), "--url", url],
        *["--token", token, "--failure-rate", "0.1", "--job-seconds", "0.05"],
    ]


def make_client(number):
    user = User.objects.create(username=f"agent-{number}")
    user.groups.add(Group.objects.get(name="device-agent"))
    services.assign_agent(user, number)
    return AuthToken.objects.create(user)[1]


def sweep_up():
    """What the minute's tick would do, and an operator who recovers what broke so that the farm does not dry up."""
    for name in ("time_out_attempts", "expire_leases", "mark_silent_pcs", "promote_next_task"):
        summary = sweeping.run(f"devices.{name}", wait=True)
        assert summary["error"] is None, summary
    broken = list(Device.objects.filter(status="error").values_list("pk", flat=True))
    services.recover_devices(broken, User.objects.first(), "chaos", timezone.now())


def lapse():
    """Leases of runs far older than a job takes, as if five minutes had passed: their agent was killed.

    Also those of a claim that a worker finished after its agent's death, which is why it is not done at the kill.
    """
    lost = TaskDevice.objects.running().filter(started_at__lt=timezone.now() - SURELY_LOST)
    lost.update(lease_expires_at=timezone.now() - timedelta(seconds=1))


def assert_nothing_above_its_slots():
    for summary in PCSummary.objects.all():
        assert summary.running_count <= 20
        assert summary.running_count <= summary.device_count
    running = TaskDevice.objects.running().values_list("device", flat=True)
    assert len(running) == len(set(running))
    assert Task.objects.filter(status="running").count() <= 1


def test_every_task_ends_and_every_attempt_is_accounted_for(server, processes):
    gunicorn, url = server
    numbers = [f"PC-{n:02}" for n in range(1, AGENTS + 1)]
    commands = {number: agent_command(url, number, make_client(number)) for number in numbers}
    for n in range(TASKS):
        services.create_task(f"job {n}", AGENTS * DEVICES, timezone.now(), payload={"n": n})
    agents = {number: processes(*command) for number, command in commands.items()}
    deadline, dice, next_kill = time.monotonic() + TIME_LIMIT, random.Random(7), ROWS_BETWEEN_KILLS // 2
    while Task.objects.filter(status__in=["pending", "running"]).exists():
        assert time.monotonic() < deadline, list(Task.objects.values_list("status", "devices_done", "devices_failed"))
        ended_within(gunicorn, 0.3)
        lapse()
        sweep_up()
        assert_nothing_above_its_slots()
        if TaskDevice.objects.exclude(status__in=["pending", "running"]).count() < next_kill:
            continue
        next_kill += ROWS_BETWEEN_KILLS
        victim = dice.choice(numbers)
        agents[victim].kill()
        agents[victim].wait()
        agents[victim] = processes(*commands[victim])
        if workers := psutil.Process(gunicorn.pid).children():
            os.kill(dice.choice(workers).pid, signal.SIGKILL)
    for agent in agents.values():
        agent.terminate()
    for agent in agents.values():
        assert ended_within(agent, 30)
    assert_accounted_for()


def assert_accounted_for():
    TaskDevice.objects.running().update(lease_expires_at=timezone.now() - timedelta(seconds=1))
    sweep_up()
    assert Task.objects.filter(status__in=["success", "failed"]).count() == TASKS
    assert not TaskDevice.objects.filter(status__in=["pending", "running"]).exists()
    assert Attempt.objects.filter(ended_at=None).count() == 0
    for row in TaskDevice.objects.prefetch_related("attempts", "events"):
        events = [event.event for event in sorted(row.events.all(), key=lambda event: event.pk)]
        assert events[0] == "CREATED"
        assert events.count("SENT") == len(row.attempts.all()) == row.attempt <= row.max_attempts
    for name, invariant in invariants().items():
        if name.startswith("devices."):
            assert measure(invariant).count == 0, name
