"""Two PCs and a queue. `up` may let `manage.py device_agent` play them; without agents the queue just waits."""

from collections.abc import Callable

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.utils import timezone

from devices import services
from devices.models import PC, Device, Task

PCS = ("PC-01", "PC-02")
DEVICES = 20
TASKS = 30
# What the two demo agents are started with: jobs of a length one can watch, and some that fail.
AGENT_OPTIONS = ("--devices", str(DEVICES), "--failure-rate", "0.15", "--job-seconds", "4")


def agent_name(pc_number: str) -> str:
    return f"demo-agent-{pc_number}"


def seed(scale: int, say: Callable[[str], object]) -> None:
    if PC.objects.filter(pc_number__in=PCS).exists():
        say("devices: the demo PCs are there already")
        return
    now = timezone.now()
    for number in PCS:
        _pc(number)
    for n in range(1, TASKS * scale + 1):
        selector = {"kind": "simulated"} if n % 5 == 0 else {}
        services.create_task(
            f"Health check {n}", 2 * DEVICES, now, payload={"command": "health-check", "round": n}, selector=selector
        )
    say(f"devices: {PC.objects.count()} PCs, {Device.objects.count()} devices, {Task.objects.count()} tasks")


def _pc(number: str) -> None:
    user, created = get_user_model().objects.get_or_create(username=agent_name(number))
    if created:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    user.groups.add(Group.objects.get(name="device-agent"))
    services.assign_agent(user, number)
