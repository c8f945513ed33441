from datetime import timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.urls import reverse

from devices import services
from devices.models import PC, Attempt, Device, Task, TaskDevice


@pytest.fixture
def staff(client, db):
    user = User.objects.create_user("boss", password="x", is_staff=True)
    user.groups.add(Group.objects.get(name="operator"))
    client.force_login(user, settings.AUTHENTICATION_BACKENDS[-1])
    return client


@pytest.fixture
def busy_farm(farm):
    pc = farm.pc(devices=3)
    farm.task(3, name="the job")
    farm.task(name="the next job")
    one, two, three = farm.claim(pc, 3)
    farm.complete(one)
    for _again in range(2):
        farm.fail(two)
        [two] = farm.claim(pc)
    farm.fail(two, "it <b>broke</b>")
    return farm


def page(client, name, *args, **params):
    answer = client.get(reverse(f"admin:{name}", args=args), params)
    assert answer.status_code == 200
    return answer.content.decode()


def act(client, name, action, keys):
    url = reverse(f"admin:{name}_changelist")
    asked = client.post(url, {"action": action, "_selected_action": [str(key) for key in keys]})
    assert asked.status_code == 200, asked
    body = {"action": action, "_selected_action": [str(keys[0])], "confirmed": "yes", "reason": "because"}
    answer = client.post(url, {**body, "keys": ",".join(map(str, keys))}, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


def test_every_list_and_page_opens(staff, busy_farm):
    assert "1</b> / 2" in page(staff, "devices_pc_changelist")
    assert "stale" not in page(staff, "devices_pc_changelist").split("<tbody")[1].split("</tbody")[0]
    assert "it &lt;b&gt;broke" in page(staff, "devices_device_changelist")
    task = Task.objects.get(name="the job")
    text = page(staff, "devices_task_change", task.pk)
    assert "PC-01-00" in text
    assert "dv-progress" in text
    assert text.count("play_circle") >= 1
    row = TaskDevice.objects.get(status="failed")
    text = page(staff, "devices_taskdevice_change", row.pk)
    assert "failed for good · attempt 3" in text
    assert services.claim_token(row.pk, 3) not in text
    for model in ("pc", "device", "task", "taskdevice"):
        page(staff, f"devices_{model}_changelist")
    page(staff, "devices_device_change", row.device_id)
    page(staff, "devices_pc_change", row.device.pc_id)


def test_the_queue_shows_the_running_task_and_what_waits(staff, busy_farm):
    text = page(staff, "devices_task_queue")
    assert "the job" in text
    assert "the next job" in text
    part = page(staff, "devices_task_queue", part="")
    assert "<html" not in part
    assert "the next job" in part
    assert "the job" in page(staff, "index")


def test_devices_are_recovered_and_quarantined_with_a_reason(staff, busy_farm):
    broken = Device.objects.get(status="error")
    act(staff, "devices_device", "recover", [broken.pk])
    assert Device.objects.get(pk=broken.pk).status == "online"
    assert broken.history.get().reason == "because"
    act(staff, "devices_device", "quarantine", [broken.pk])
    assert Device.objects.get(pk=broken.pk).status == "quarantined"
    text = page(staff, "devices_device_change", broken.pk)
    assert "boss: quarantined" in text
    assert "because" in text


def test_tasks_are_cancelled_and_retried(staff, busy_farm):
    first, second = Task.objects.oldest_first()
    names = {action.__name__ for action in __import__("devices.admin", fromlist=["x"]).TaskAdmin.actions}
    cancel, retry = sorted(names, key=lambda name: "retry" in name)
    act(staff, "devices_task", cancel, [first.pk, second.pk])
    assert set(Task.objects.values_list("status", flat=True)) == {"cancelled"}
    act(staff, "devices_task", retry, [first.pk, second.pk])
    assert Task.objects.get(retry_of=first).status == "running"
    assert not Task.objects.filter(retry_of=second).exists()


def test_an_operator_hands_a_pc_to_another_agent(staff, busy_farm):
    agent = User.objects.create(username="new agent")
    agent.groups.add(Group.objects.get(name="device-agent"))
    pc = PC.objects.get()
    text = page(staff, "devices_pc_change", pc.pk)
    assert "new agent" in text and "agent of PC-01" in text
    assert ">boss</option>" not in text
    body = {"pc_number": "PC-01", "agent": agent.pk, "max_slots": 7}
    answer = staff.post(reverse("admin:devices_pc_change", args=[pc.pk]), body)
    assert answer.status_code == 302
    pc.refresh_from_db(fields=["agent", "max_slots"])
    assert (pc.agent, pc.max_slots) == (agent, 7)


def test_a_viewer_sees_no_actions(client, busy_farm):
    user = User.objects.create_user("viewer", password="x", is_staff=True)
    user.groups.add(Group.objects.get(name="viewer"))
    client.force_login(user, settings.AUTHENTICATION_BACKENDS[-1])
    text = page(client, "devices_device_changelist")
    assert "quarantine" not in text.lower().split("<tbody")[0].split("actions")[-1]
    broken = Device.objects.get(status="error")
    url = reverse("admin:devices_device_changelist")
    client.post(url, {"action": "recover", "_selected_action": [str(broken.pk)]})
    assert Device.objects.get(pk=broken.pk).status == "error"


@pytest.mark.parametrize(
    "name", ["devices_device_changelist", "devices_taskdevice_changelist", "devices_pc_changelist"]
)
def test_a_list_takes_the_same_number_of_queries_however_long(staff, farm, name, django_assert_max_num_queries):
    for number in range(1, 6):
        pc = farm.pc(f"PC-0{number}", 10)
    farm.task(50)
    farm.claim(pc, 10)
    with django_assert_max_num_queries(16):
        page(staff, name)


def test_slots_over_time_are_the_seconds_run_over_the_length(farm):
    pc, half = farm.pc(devices=2), timedelta(minutes=30)
    farm.task(2)
    one, two = farm.claim(pc, 2)
    farm.later(minutes=15)
    farm.complete(one)
    farm.later(minutes=15)
    shown = [round(busy, 3) for _at, busy in Attempt.objects.busy_slots(farm.now, 3, half)]
    assert shown == [0, 0, 1.5]  # one for a quarter of an hour, one, still running, for the whole
    farm.later(minutes=30)
    assert [round(busy, 3) for _at, busy in Attempt.objects.busy_slots(farm.now, 3, half)] == [0, 1.5, 1]


def test_an_operator_queues_a_task(staff):
    url = reverse("admin:devices_task_add")
    body = {"name": "update", "device_count": 3, "payload": '{"v": 2}', "selector": '{"rack": "A"}'}
    for wrong in ({"device_count": 0}, {"selector": '{"rack": 1}'}, {"payload": "{"}, {"payload": f'"{"x" * 65536}"'}):
        answer = staff.post(url, {**body, **wrong})
        assert answer.status_code == 200 and next(iter(wrong)) in answer.context["adminform"].form.errors
    assert not Task.objects.exists()
    assert staff.post(url, body).status_code == 302
    task = Task.objects.get()
    assert (task.status, task.device_count, task.payload, task.selector) == ("running", 3, {"v": 2}, {"rack": "A"})
    page = reverse("admin:devices_task_change", args=[task.pk])
    assert "Cancel" in staff.get(page).content.decode()
    assert staff.post(page, body).status_code == 403


@pytest.mark.parametrize("field", ["payload", "selector"])
@pytest.mark.parametrize(
    "text",
    [r'{"a": "\u0000"}', r'{"a": "\ud800"}', '{"a": NaN}', '{"a": 1e999}', "[" * 3000],
    ids=["NUL", "surrogate", "NaN", "infinite", "deep"],
)
def test_json_that_cannot_be_stored_is_told_in_the_form_and_shown_as_typed(staff, field, text):
    body = {"name": "update", "device_count": 3, "payload": "{}", "selector": "{}", field: text}
    answer = staff.post(reverse("admin:devices_task_add"), body)
    assert answer.status_code == 200
    assert answer.context["adminform"].form.errors.keys() == {field}
    assert answer.context["adminform"].form[field].value() == text
    assert not Task.objects.exists()
