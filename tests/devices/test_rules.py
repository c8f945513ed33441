"""The twelve rules at their exact boundaries, through the services and sweeps."""

from datetime import timedelta

import pytest

from config.errors import Conflict
from config.models import Decision
from devices import services
from devices.models import PC, Attempt, Device, Event, PCSummary, Task, TaskDevice

MS = timedelta(milliseconds=1)


def fail_for_good(farm, pc):
    for _attempt in range(3):
        [grant] = farm.claim(pc)
        farm.fail(grant)
    return grant


# 1. One active task


def test_the_oldest_waiting_task_starts_when_the_running_one_ends(farm):
    pc = farm.pc()
    first, second, third = (farm.task(name=str(n)) for n in range(3))
    assert [farm.status(task) for task in (first, second, third)] == ["running", "pending", "pending"]
    farm.complete(*farm.claim(pc))
    assert [farm.status(task) for task in (first, second, third)] == ["success", "running", "pending"]
    services.cancel_task(second, farm.now)
    assert farm.status(third) == "running"
    services.cancel_task(third, farm.now)
    assert not Task.objects.filter(status="running").exists()


def test_a_waiting_task_that_is_cancelled_is_passed_over(farm):
    first, second, third = farm.task(), farm.task(), farm.task()
    services.cancel_task(second, farm.now)
    services.cancel_task(first, farm.now)
    assert farm.status(third) == "running"


def test_the_sweep_promotes_when_it_was_missed_and_a_second_run_changes_nothing(farm):
    task = Task.objects.create(name="left behind", device_count=1)
    assert farm.sweep("promote_next_task") == {"promoted": 1}
    assert (farm.status(task), Task.objects.get().started_at) == ("running", farm.now)
    assert Decision.objects.get(rule="promote_next_task").after == {"status": "running"}
    assert farm.sweep("promote_next_task") == {}


# 2. Slots


def test_busy_devices_count_for_the_target_and_broken_ones_do_not(farm):
    pc = farm.pc(devices=5)
    farm.task(5)
    one, two, *_ = farm.claim(pc, 2)
    PC.objects.filter(pk=pc.pk).update(max_slots=4)
    summary = PCSummary.objects.get(pk=pc.pk)
    assert (summary.eligible_device_count, summary.target, summary.running_count, summary.free_slots) == (5, 4, 2, 2)
    farm.fail(one, retryable=False)
    services.quarantine_devices([one.device.pk], farm.agent(one), "", farm.now)
    farm.beat(pc, ["PC-01-01", "PC-01-02"], offline=["PC-01-03", "PC-01-04"])
    summary = PCSummary.objects.get(pk=pc.pk)
    assert (summary.eligible_device_count, summary.target, summary.offline_count) == (2, 2, 2)
    assert (summary.running_count, summary.free_slots) == (1, 1)


def test_lowering_the_slots_below_the_running_leaves_no_negative_room(farm):
    pc = farm.pc(devices=3)
    farm.task(3)
    farm.claim(pc, 3)
    services.set_max_slots(pc, 1)
    assert PCSummary.objects.get(pk=pc.pk).free_slots == 0


def test_an_offline_pc_gets_nothing(farm):
    pc = farm.pc()
    farm.task()
    farm.later(seconds=181)
    farm.sweep("mark_silent_pcs")
    assert farm.claim(pc) == []
    farm.beat(pc, ["PC-01-00"])
    assert len(farm.claim(pc)) == 1


# 3. Supply


def test_device_count_bounds_the_rows_over_all_pcs(farm):
    one, two = farm.pc("PC-01", 3), farm.pc("PC-02", 3)
    farm.task(4)
    assert len(farm.claim(one, 20)) == 3
    assert len(farm.claim(two, 20)) == 1
    assert farm.claim(two, 20) == []


def test_waiting_rows_go_first_the_oldest_before_the_others(farm):
    pc = farm.pc(devices=3)
    farm.task(3)
    [old] = farm.claim(pc)
    farm.later(seconds=1)
    [young] = farm.claim(pc)
    farm.fail(young)
    farm.fail(old)
    assert [grant.id for grant in farm.claim(pc, 3)][:2] == [old.id, young.id]
    assert TaskDevice.objects.count() == 3


def test_a_device_at_work_for_a_cancelled_task_gets_no_second_run(farm):
    pc = farm.pc(devices=2)
    first = farm.task(2)
    [held] = farm.claim(pc)
    services.cancel_task(first, farm.now)
    farm.task(2)
    [grant] = farm.claim(pc, 2)
    assert grant.device.pk != held.device.pk
    farm.complete(held)
    assert [grant.device.pk for grant in farm.claim(pc, 2)] == [held.device.pk]


def test_only_devices_with_every_label_are_supplied_but_all_count_as_slots(farm):
    farm.pc("PC-01", 2, kind="phone", os="15")
    farm.pc("PC-02", 2, kind="tablet", os="15")
    one, two = PC.objects.order_by("pc_number")
    task = farm.task(4, selector={"kind": "phone", "os": "15"})
    assert farm.claim(two, 4) == []
    assert PCSummary.objects.get(pk=two.pk).free_slots == 2
    for grant in farm.claim(one, 4):
        farm.complete(grant)
    assert farm.status(task) == "success"


# 4. and 5. Attempts and timeouts


def test_each_attempt_has_its_own_start_deadline_and_token(farm):
    pc = farm.pc()
    farm.task()
    [first] = farm.claim(pc)
    farm.later(minutes=19)
    farm.fail(first)
    row = farm.row(first)
    assert (row.status, row.attempt, row.started_at, row.deadline_at, row.completed_at) == (
        "pending",
        1,
        None,
        None,
        None,
    )
    [second] = farm.claim(pc)
    assert (second.attempt, second.deadline_at) == (2, farm.now + timedelta(minutes=20))
    assert farm.token(second) != farm.token(first)
    assert list(Attempt.objects.order_by("id").values_list("attempt_no", "outcome")) == [(1, "error"), (2, None)]


def test_at_twenty_minutes_it_still_runs_and_a_millisecond_later_it_has_timed_out(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=20)
    assert farm.sweep("time_out_attempts") == {}
    assert farm.row(grant).status == "running"
    farm.now += MS
    assert farm.sweep("time_out_attempts") == {"timeout": 1}
    row = farm.row(grant)
    assert (row.status, row.timed_out, row.failure_kind, row.attempt, row.final) == (
        "pending",
        True,
        "timeout",
        1,
        False,
    )
    assert "timeout" in row.error
    assert farm.events(grant) == ["CREATED", "SENT", "TIMEOUT", "RETRY_SCHEDULED"]
    assert set(Event.objects.filter(event="TIMEOUT").values_list("created_at", flat=True)) == {farm.now}
    assert farm.device("PC-01-00").status == "online"
    assert farm.sweep("time_out_attempts") == {}
    decision = Decision.objects.get(rule="time_out_attempts")
    assert (decision.object_id, decision.after) == (str(grant.id), {"status": "pending"})


def test_the_third_timeout_is_final_and_the_device_is_in_error(farm):
    pc, task = farm.pc(devices=2), farm.task()
    for _attempt in range(3):
        [grant] = farm.claim(pc)
        farm.later(minutes=20, seconds=1)
        farm.sweep("time_out_attempts")
        farm.beat(pc, ["PC-01-00", "PC-01-01"])
    row, device = farm.row(grant), farm.row(grant).device
    assert (row.status, row.attempt, row.final, row.timed_out, row.completed_at) == (
        "failed",
        3,
        True,
        True,
        row.completed_at,
    )
    assert farm.events(grant)[-2:] == ["TIMEOUT", "FAILED_FINAL"]
    assert (device.status, device.total_errors, device.errored_at) == ("error", 1, row.completed_at)
    assert "timeout" in device.error_reason
    assert farm.status(task) == "failed"


def test_a_result_before_the_sweep_stands_even_after_the_deadline(farm):
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=30)
    with pytest.raises(Conflict):
        farm.renew(grant)
    assert farm.complete(grant).status == "success"
    assert farm.sweep("time_out_attempts") == {}
    assert farm.status(task) == "success"


# 6. Lease


def test_a_lease_lapses_strictly_later_than_its_end(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=5)
    assert farm.sweep("expire_leases") == {}
    farm.now += MS
    assert farm.sweep("expire_leases") == {"lease_expired": 1}
    row = farm.row(grant)
    assert (row.status, row.failure_kind, row.timed_out, row.attempt) == ("pending", "lease_expired", False, 1)
    assert farm.events(grant) == ["CREATED", "SENT", "FAILED", "RETRY_SCHEDULED"]
    assert farm.sweep("expire_leases") == {}


def test_a_renewed_lease_is_left_alone_and_never_reaches_beyond_the_deadline(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=4)
    assert farm.renew(grant).lease_expires_at == farm.now + timedelta(minutes=5)
    farm.later(minutes=2)
    assert farm.sweep("expire_leases") == {}
    for _minute in range(6, 20):
        row = farm.renew(grant)
        farm.later(minutes=1)
    assert row.lease_expires_at == grant.deadline_at
    assert farm.now == grant.deadline_at
    assert farm.renew(grant).lease_expires_at == grant.deadline_at
    farm.now += MS
    with pytest.raises(Conflict):
        farm.renew(grant)


def test_a_lapsed_lease_may_be_renewed_until_a_sweep_ends_it(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=6)
    assert farm.renew(grant).lease_expires_at == farm.now + timedelta(minutes=5)
    assert farm.sweep("expire_leases") == {}


def test_past_the_deadline_it_is_a_timeout_whichever_sweep_comes_first(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(minutes=21)
    assert farm.sweep("expire_leases") == {}
    assert farm.sweep("time_out_attempts") == {"timeout": 1}
    assert farm.row(grant).timed_out


# 7. and 8. Retry and final failure


def test_three_runs_in_total_then_the_device_is_in_error(farm):
    pc = farm.pc(devices=2)
    farm.task()
    grant = fail_for_good(farm, pc)
    row = farm.row(grant)
    assert (row.status, row.final, row.attempt, row.failure_kind, row.error) == ("failed", True, 3, "error", "broken")
    assert farm.events(grant) == [
        "CREATED", "SENT", "FAILED", "RETRY_SCHEDULED", "SENT", "FAILED", "RETRY_SCHEDULED", "SENT", "FAILED",
        "FAILED_FINAL",
    ]  # fmt: skip
    device = Device.objects.get(pk=grant.device.pk)
    assert (device.status, device.error_reason, device.errored_at, device.total_errors) == (
        "error",
        "broken",
        farm.now,
        1,
    )
    assert PCSummary.objects.get(pk=pc.pk).eligible_device_count == 1
    farm.beat(pc, ["PC-01-00", "PC-01-01"])
    assert Device.objects.get(pk=grant.device.pk).status == "error"


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_failure_that_is_not_retryable_is_final_and_blames_no_device(farm, attempts):
    pc, task = farm.pc(), farm.task()
    for _attempt in range(attempts - 1):
        farm.fail(*farm.claim(pc))
    [grant] = farm.claim(pc)
    row = farm.fail(grant, retryable=False)
    assert (row.status, row.final, row.attempt) == ("failed", True, attempts)
    assert farm.events(grant)[-2:] == ["FAILED", "FAILED_FINAL"]
    assert (farm.device("PC-01-00").status, farm.device("PC-01-00").total_errors) == ("online", 0)
    assert (farm.status(task), Task.objects.get().devices_failed) == ("failed", 1)


def test_success_after_a_failure_forgets_the_failure(farm):
    pc = farm.pc()
    farm.task()
    farm.fail(*farm.claim(pc))
    row = farm.complete(*farm.claim(pc), {"fine": 1})
    assert (row.status, row.error, row.failure_kind, row.timed_out) == ("success", None, None, False)
    assert list(Attempt.objects.order_by("id").values_list("outcome", "error")) == [
        ("error", "broken"),
        ("success", None),
    ]


def test_recovering_asks_the_pc_where_the_device_is(farm, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc = farm.pc(devices=3)
    farm.task(3)
    for grant in farm.claim(pc, 3):
        farm.fail(grant)
        for _again in range(2):
            [again] = farm.claim(pc, 1)
            farm.fail(again)
    assert set(Device.objects.values_list("status", flat=True)) == {"error"}
    farm.beat(pc, ["PC-01-00"], offline=["PC-01-01"])
    ids = list(Device.objects.values_list("pk", flat=True))
    assert len(services.recover_devices(ids, boss, "looked at", farm.now)) == 3
    assert [farm.device(f"PC-01-0{n}").status for n in range(3)] == ["online", "offline", "offline"]
    assert set(Device.objects.values_list("total_errors", "error_reason", "errored_at")) == {(1, None, None)}
    assert services.recover_devices(ids, boss, "", farm.now) == []
    farm.later(seconds=181)
    farm.sweep("mark_silent_pcs")
    services.quarantine_devices(ids[:1], boss, "", farm.now)
    services.recover_devices(ids[:1], boss, "", farm.now)
    assert Device.objects.get(pk=ids[0]).status == "offline"


def test_quarantine_cancels_the_waiting_row_at_once_and_lets_a_running_one_finish(farm, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc, task = farm.pc(devices=2), farm.task(2)
    waiting, running = farm.claim(pc, 2)
    farm.fail(waiting)
    services.quarantine_devices([waiting.device.pk, running.device.pk], boss, "", farm.now)
    assert (farm.row(waiting).status, farm.row(running).status) == ("cancelled", "running")
    assert farm.events(waiting)[-1] == "CANCELLED"
    assert farm.complete(running).status == "success"
    assert Device.objects.get(pk=running.device.pk).status == "quarantined"
    assert farm.status(task) == "success"


def test_a_retry_for_a_device_in_quarantine_is_cancelled(farm, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    services.quarantine_devices([grant.device.pk], boss, "", farm.now)
    assert farm.fail(grant).status == "cancelled"
    assert farm.events(grant) == ["CREATED", "SENT", "FAILED", "RETRY_SCHEDULED", "CANCELLED"]
    assert farm.status(task) == "failed"


# 10. Silence


def test_a_pc_is_stale_after_90_seconds_and_offline_after_180(farm):
    pc = farm.pc(devices=2)
    heard = farm.now
    pc = PC.objects.get()
    assert [pc.is_stale(heard + timedelta(seconds=s)) for s in (90, 91)] == [False, True]
    assert [PC.objects.stale(heard + timedelta(seconds=s)).exists() for s in (90, 91)] == [False, True]
    farm.later(seconds=180)
    assert farm.sweep("mark_silent_pcs") == {}
    farm.later(seconds=1)
    assert farm.sweep("mark_silent_pcs") == {"offline": 1}
    assert PC.objects.get().status == "offline"
    assert set(Device.objects.values_list("status", flat=True)) == {"offline"}
    assert farm.sweep("mark_silent_pcs") == {}
    farm.beat(pc, ["PC-01-00", "PC-01-01"])
    assert set(Device.objects.values_list("status", flat=True)) == {"online"}


def test_a_silent_pcs_runs_go_on_until_their_lease_lapses(farm):
    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    farm.later(seconds=181)
    farm.sweep("mark_silent_pcs")
    assert (farm.row(grant).status, farm.device("PC-01-00").status) == ("running", "offline")
    farm.beat(pc, ["PC-01-00"])
    assert farm.device("PC-01-00").status == "busy"
    assert farm.complete(grant).status == "success"
    assert farm.device("PC-01-00").status == "online"


def test_a_silent_pcs_waiting_rows_are_given_up_after_20_minutes(farm):
    away, here = farm.pc("PC-01"), farm.pc("PC-02")
    task = farm.task()
    [grant] = farm.claim(away)
    farm.fail(grant)
    assert farm.claim(here) == []
    heard = farm.now
    farm.now = heard + timedelta(minutes=19)
    farm.beat(here, ["PC-02-00"])
    farm.now = heard + timedelta(minutes=20)
    assert "pc_offline" not in farm.sweep("mark_silent_pcs")
    assert farm.row(grant).status == "pending"
    farm.now += MS
    assert farm.sweep("mark_silent_pcs") == {"pc_offline": 1}
    row = farm.row(grant)
    assert (row.status, row.failure_kind, row.error) == ("cancelled", "pc_offline", "broken")
    assert farm.status(task) == "running"
    [other] = farm.claim(here)
    farm.complete(other)
    assert farm.status(task) == "success"
    assert farm.sweep("mark_silent_pcs") == {}


def test_rows_of_a_device_offline_for_20_minutes_are_given_up(farm):
    pc = farm.pc(devices=2)
    farm.task(1)
    [grant] = farm.claim(pc)
    gone = grant.device.serial
    stays = ({"PC-01-00", "PC-01-01"} - {gone}).pop()
    farm.beat(pc, [stays], offline=[gone])
    assert (farm.row(grant).status, farm.row(grant).failure_kind) == ("pending", "device_offline")
    offline = farm.now
    farm.now = offline + timedelta(minutes=20)
    farm.beat(pc, [stays], offline=[gone])
    assert farm.sweep("mark_silent_pcs") == {}
    farm.now += MS
    assert farm.sweep("mark_silent_pcs") == {"device_offline": 1}
    assert (farm.row(grant).status, farm.row(grant).failure_kind) == ("cancelled", "device_offline")


def test_a_device_is_offline_after_missing_two_complete_lists_in_a_row(farm):
    pc = farm.pc(devices=2)
    farm.task(2)
    grants = farm.claim(pc, 2)
    farm.beat(pc, ["PC-01-01"])
    assert farm.device("PC-01-00").status == "busy"
    farm.beat_blind(pc)
    farm.beat(pc, ["PC-01-00", "PC-01-01"])
    farm.beat(pc, ["PC-01-01"])
    farm.beat_blind(pc)
    assert farm.device("PC-01-00").status == "busy"
    farm.beat(pc, ["PC-01-01"])
    assert farm.device("PC-01-00").status == "offline"
    [row] = TaskDevice.objects.filter(device__serial="PC-01-00")
    assert (row.status, row.failure_kind) == ("pending", "device_offline")
    assert farm.events(next(g for g in grants if g.id == row.pk))[-2:] == ["FAILED", "RETRY_SCHEDULED"]
    farm.beat(pc, [])
    assert farm.device("PC-01-01").status == "busy"
    farm.beat(pc, [])
    assert farm.device("PC-01-01").status == "offline"


def test_the_last_attempt_of_a_device_taken_offline_puts_it_in_error(farm):
    pc = farm.pc()
    farm.task()
    for _attempt in range(2):
        farm.fail(*farm.claim(pc))
    farm.claim(pc)
    farm.beat(pc, offline=["PC-01-00"])
    assert TaskDevice.objects.get().final
    assert farm.device("PC-01-00").status == "error"


def test_error_and_quarantine_survive_every_report_while_telemetry_is_kept(farm, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc = farm.pc(devices=2)
    farm.task()
    broken = fail_for_good(farm, pc).device
    other = Device.objects.exclude(pk=broken.pk).get()
    services.quarantine_devices([other.pk], boss, "", farm.now)
    services.record_heartbeat(
        pc, farm.now, devices=[services.DeviceReport(d.serial, False, {"battery": 7}) for d in (broken, other)]
    )
    assert set(Device.objects.values_list("status", "battery")) == {("error", 7), ("quarantined", 7)}
    for _list in range(3):
        farm.beat(pc, [])
    assert set(Device.objects.values_list("status", flat=True)) == {"error", "quarantined"}


def test_a_serial_moves_with_its_waiting_row_but_not_while_it_runs(farm):
    one, two = farm.pc("PC-01"), farm.pc("PC-02", 0)
    farm.task()
    [grant] = farm.claim(one)
    farm.beat(two, ["PC-01-00"])
    assert farm.device("PC-01-00").pc == one
    farm.fail(grant)
    farm.beat(two, ["PC-01-00"])
    assert (farm.device("PC-01-00").pc, farm.device("PC-01-00").status) == (two, "online")
    assert farm.claim(one) == []
    [again] = farm.claim(two)
    assert (again.id, again.attempt) == (grant.id, 2)
    assert farm.complete(again).status == "success"


# 11. and 12. Ends


def test_a_task_waits_for_its_first_eligible_device(farm):
    pc, task = farm.pc(devices=0), farm.task(5)
    farm.sweep("promote_next_task")
    assert farm.status(task) == "running"
    farm.beat(pc, ["S1"])
    farm.complete(*farm.claim(pc))
    assert farm.status(task) == "success"


def test_a_task_ends_when_no_eligible_device_is_left_without_a_row(farm):
    pc, task = farm.pc(devices=2), farm.task(5)
    one, two = farm.claim(pc, 5)
    farm.complete(one)
    assert farm.status(task) == "running"
    farm.fail(two, retryable=False)
    assert farm.status(task) == "success"


def test_the_sweep_ends_a_task_whose_last_device_went_away(farm):
    pc, task = farm.pc(devices=2), farm.task(2)
    farm.complete(*farm.claim(pc))
    farm.beat(pc, ["PC-01-00"], offline=["PC-01-01"])
    assert farm.status(task) == "running"
    assert farm.sweep("promote_next_task") == {"ended": 1}
    assert farm.status(task) == "success"


def test_a_task_without_a_row_for_24_hours_fails(farm):
    task, following = farm.task(), farm.task()
    farm.later(hours=24)
    assert farm.sweep("promote_next_task") == {}
    farm.now += MS
    assert farm.sweep("promote_next_task") == {"ended": 1}
    task = Task.objects.get(pk=task.pk)
    assert (task.status, task.error, task.completed_at) == ("failed", "no_device", farm.now)
    assert farm.status(following) == "running"


def test_a_task_whose_rows_are_all_cancelled_fails_when_nobody_is_left(farm):
    pc, task = farm.pc(), farm.task(3)
    [grant] = farm.claim(pc)
    farm.fail(grant)
    farm.later(minutes=20, seconds=1)
    assert farm.sweep("mark_silent_pcs") == {"offline": 1, "pc_offline": 1}
    assert (farm.status(task), Task.objects.get().devices_failed) == ("failed", 0)
    farm.beat(pc, ["PC-01-00"])
    assert farm.claim(pc) == []


def test_a_device_with_a_cancelled_row_gets_no_second_one_but_others_fill_up(farm, django_user_model):
    boss = django_user_model.objects.create(username="boss")
    pc, task = farm.pc(devices=2), farm.task(1)
    [grant] = farm.claim(pc)
    farm.fail(grant)
    services.quarantine_devices([grant.device.pk], boss, "", farm.now)
    services.recover_devices([grant.device.pk], boss, "", farm.now)
    assert farm.status(task) == "running"
    [other] = farm.claim(pc, 2)
    assert other.device.pk != grant.device.pk
    farm.complete(other)
    assert farm.status(task) == "success"


def test_a_row_nobody_claims_for_a_day_is_given_up(farm):
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    farm.fail(grant)
    farm.later(hours=24)
    farm.beat(pc, ["PC-01-00"])
    assert farm.sweep("promote_next_task") == {}
    farm.now += MS
    assert farm.sweep("promote_next_task") == {"cancelled": 1}
    assert farm.status(task) == "failed"


def test_a_waiting_row_whose_device_no_longer_suits_is_not_granted_but_given_up(farm):
    pc = farm.pc(devices=1, os="a")
    task = farm.task(selector={"os": "a"})
    [grant] = farm.claim(pc)
    farm.fail(grant)
    farm.beat(pc, ["PC-01-00"], os="b")
    assert farm.claim(pc) == []
    assert farm.sweep("promote_next_task") == {"cancelled": 1}
    assert (farm.status(task), farm.row(grant).failure_kind) == ("failed", "cancelled")


def test_a_waiting_row_without_attempts_left_is_given_up(farm):
    pc, task = farm.pc(), farm.task()
    [grant] = farm.claim(pc)
    farm.fail(grant)
    assert farm.sweep("promote_next_task") == {}
    TaskDevice.objects.update(max_attempts=1)
    assert farm.claim(pc) == []
    assert farm.sweep("promote_next_task") == {"cancelled": 1}
    assert farm.status(task) == "failed"


def test_a_lapsed_run_of_a_cancelled_task_is_cancelled(farm):
    pc = farm.pc(devices=2)
    task = farm.task(2)
    lapsed, timed_out = farm.claim(pc, 2)
    services.cancel_task(task, farm.now)
    TaskDevice.objects.filter(pk=timed_out.id).update(lease_expires_at=timed_out.deadline_at)
    farm.later(minutes=6)
    assert farm.sweep("expire_leases") == {"lease_expired": 1}
    farm.later(minutes=15)
    farm.sweep("time_out_attempts")
    for grant in (lapsed, timed_out):
        row = farm.row(grant)
        assert (row.status, row.failure_kind, row.final, farm.events(grant)[-1]) == (
            "cancelled", "cancelled", False, "CANCELLED",
        )  # fmt: skip
    assert Task.objects.get().devices_failed == 0
    assert not Device.objects.filter(total_errors__gt=0).exists()


def test_a_dry_run_changes_nothing(farm):
    from config import sweeping

    pc = farm.pc()
    farm.task()
    [grant] = farm.claim(pc)
    later = farm.now + timedelta(minutes=21)
    assert sweeping.run("devices.time_out_attempts", now=later, dry_run=True)["counts"] == {"timeout": 1}
    assert farm.row(grant).status == "running"
    assert farm.events(grant) == ["CREATED", "SENT"]
