from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.utils import timezone

from devices import services
from devices.models import PC, Device, Task, TaskDevice


class Farm:
    """PCs with devices, a queue and agents, driven through the services at a time of its own."""

    def __init__(self):
        self.now = timezone.now()

    def later(self, **time):
        self.now += timedelta(**time)
        return self.now

    def pc(self, number="PC-01", devices=1, **labels):
        user, _ = get_user_model().objects.get_or_create(username=f"agent of {number}")
        pc = services.assign_agent(user, number)
        self.beat(pc, [f"{number}-{n:02}" for n in range(devices)], **labels)
        return pc

    def beat(self, pc, serials=(), offline=(), **labels):
        reports = [
            services.DeviceReport(serial, serial in offline, {"labels": labels} if labels else {})
            for serial in [*serials, *offline]
        ]
        services.record_heartbeat(pc, self.now, devices=reports)

    def beat_blind(self, pc):
        services.record_heartbeat(pc, self.now, devices=None)

    def task(self, device_count=1, **kwargs):
        return services.create_task(kwargs.pop("name", "job"), device_count, self.now, **kwargs)

    def claim(self, pc, n=1):
        return services.claim_task_devices(pc, n, self.now)

    def token(self, grant):
        return services.claim_token(grant.id, grant.attempt)

    def agent(self, grant):
        return PC.objects.select_related("agent").get(devices=grant.device.pk).agent

    def complete(self, grant, result=None, token=None):
        services.complete_task_device(grant.id, self.agent(grant), token or self.token(grant), result, self.now)
        return self.row(grant)

    def fail(self, grant, error="broken", token=None, retryable=True):
        services.fail_task_device(
            grant.id, self.agent(grant), token or self.token(grant), error, self.now, retryable=retryable
        )
        return self.row(grant)

    def ack(self, grant):
        services.ack_task_device(grant.id, self.agent(grant), self.token(grant), self.now)

    def renew(self, grant):
        services.renew_lease(grant.id, self.agent(grant), self.token(grant), self.now)
        return self.row(grant)

    def sweep(self, name):
        from config import sweeping

        summary = sweeping.run(f"devices.{name}", now=self.now, wait=True)
        assert summary["error"] is None, summary["error"]
        return summary["counts"]

    def row(self, grant):
        return TaskDevice.objects.get(pk=grant.id)

    def device(self, serial):
        return Device.objects.get(serial=serial)

    def status(self, task):
        return Task.objects.get(pk=task.pk).status

    def events(self, grant):
        return list(self.row(grant).events.order_by("id").values_list("event", flat=True))


@pytest.fixture
def farm(db):
    return Farm()
