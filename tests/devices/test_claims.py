from datetime import timedelta

from devices.models import PCSummary, Task, TaskDevice


def test_a_job_runs_from_claim_to_success(farm):
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    assert (grant.attempt, grant.deadline_at, grant.lease_expires_at) == (
        1,
        farm.now + timedelta(minutes=20),
        farm.now + timedelta(minutes=5),
    )
    assert farm.device("PC-01-00").status == "busy"
    farm.ack(grant)
    row = farm.complete(grant, {"ok": True})
    assert (row.status, row.result, row.attempt, row.lease_expires_at) == ("success", {"ok": True}, 1, None)
    assert farm.device("PC-01-00").status == "online"
    assert farm.events(grant) == ["CREATED", "SENT", "ACKED", "SUCCEEDED"]
    assert farm.status(task) == "success"
    task = Task.objects.get()
    assert (task.devices_done, task.devices_failed, task.completed_at) == (1, 0, farm.now)


def test_creating_a_task_creates_no_rows_and_claims_supply_one_by_one(farm):
    pc, _task = farm.pc(devices=3), farm.task(3)
    assert not TaskDevice.objects.exists()
    for n in range(1, 4):
        assert len(farm.claim(pc)) == 1
        assert TaskDevice.objects.count() == n
    assert farm.claim(pc) == []


def test_a_claim_above_the_free_slots_gets_the_free_slots(farm):
    pc = farm.pc(devices=25)
    farm.task(100)
    grants = farm.claim(pc, 1000)
    assert len({grant.device.pk for grant in grants}) == 20
    summary = PCSummary.objects.get(pk=pc.pk)
    assert (summary.device_count, summary.eligible_device_count, summary.running_count) == (25, 25, 20)
    assert (summary.target, summary.free_slots) == (20, 0)
    farm.complete(grants[0])
    assert len(farm.claim(pc, 1000)) == 1
