from datetime import timedelta

from devices import services
from devices.models import Attempt, Event, Task, TaskDevice
from devices.retention import KEPT, purge


def test_ended_tasks_go_with_their_history_once_they_are_old(farm):
    pc = farm.pc(devices=2)
    old, retried = farm.task(1, name="old"), farm.task(1, name="retried")
    farm.complete(*farm.claim(pc))
    farm.fail(*farm.claim(pc), retryable=False)
    services.retry_task(retried, farm.now)
    farm.complete(*farm.claim(pc))
    left_open = farm.task(1, name="left open")
    farm.claim(pc)
    services.cancel_task(left_open, farm.now)
    aged = farm.now + KEPT
    assert purge(aged, dry_run=False) == {"task_devices": 0, "tasks": 0}
    aged += timedelta(seconds=1)
    assert purge(aged, dry_run=True) == {"task_devices": 2, "tasks": 2}
    assert Task.objects.filter(pk=old.pk).exists()
    assert purge(aged, dry_run=False) == {"task_devices": 2, "tasks": 2}
    assert set(Task.objects.values_list("name", "retry_of")) == {("retried", None), ("left open", None)}
    assert TaskDevice.objects.count() == Attempt.objects.count() == 2
    assert set(Event.objects.values_list("task_device__task__name", flat=True)) == {"retried", "left open"}
    assert purge(aged, dry_run=False) == {"task_devices": 1, "tasks": 1}
    assert purge(aged, dry_run=False) == {"task_devices": 0, "tasks": 0}
    assert Task.objects.get() == left_open
