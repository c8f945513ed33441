"""Whole journeys over the doors clients use: REST and sweeps, from the first request to the last state."""

from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib.admin import site
from django.contrib.auth.models import User
from django.test import RequestFactory
from django.utils import timezone

from campaigns.models import Sequence
from config import integrity, sweeping
from config.console.panels import panels
from config.models import Decision
from messaging.models import Application
from messaging.providers import reset_providers

pytestmark = pytest.mark.django_db
API = "/api/v1"
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def providers(settings):
    settings.PROVIDERS = dict.fromkeys(("iOSPush", "AndroidPush", "Email", "SMS", "KakaoTalk"), "null")
    reset_providers()
    yield
    reset_providers()


@pytest.fixture
def shop(db):
    return Application.objects.create(slug="shop", name="Shop")


@pytest.fixture
def member(make_client, shop):
    def make(*groups, username=None):
        client = make_client(*groups, username=username or groups[0])
        client.user.applications.add(shop)
        return Door(client)

    return make


class Door:
    """A client that expects to be served: whatever is not 2xx fails the test, unless it is what was expected."""

    def __init__(self, client):
        self.client, self.user = client, client.user

    def ask(self, method, path, body=None, status=None, **headers):
        answer = getattr(self.client, method)(path if path.startswith("/") else f"{API}/{path}", body, headers=headers)
        assert answer.status_code == status or (status is None and answer.status_code // 100 == 2), answer.content
        return answer.json() if answer.content else None

    def get(self, path, **query):
        return self.ask("get", path, query)

    def post(self, path, body=None, status=None, **headers):
        return self.ask("post", path, {} if body is None else body, status, **headers)

    def patch(self, path, body, status=None, **headers):
        return self.ask("patch", path, body, status, **headers)


def sweep(*names, now=None):
    for name in names:
        ran = sweeping.run(name, now=now or timezone.now(), wait=True)
        assert ran["error"] is None, ran


def tick(now):
    """One round of all that moves a campaign."""
    sweep(
        "campaigns.resume_paused_enrollments", "campaigns.send_due_steps", "messaging.dispatch_due_messages",
        "campaigns.follow_message_results", "campaigns.reconcile_sequences",
        now=now,
    )  # fmt: skip


def test_a_message_from_subscription_to_conversion(member):
    sender, app = member("message-sender"), member("message-client")
    door = {"application": "shop", "type": "InAppMessage", "token": "install-1", "user_id": "minji"}
    subscription = sender.post("subscriptions/", door)
    body = {"user_id": "minji", "channel": "in_app", "title": "Hello", "data": {"layout_type": "banner"}}
    key = {"Idempotency-Key": str(uuid4())}
    message = sender.post("messages/", body, **key)
    assert sender.post("messages/", body, **key)["id"] == message["id"]
    sweep("messaging.dispatch_due_messages")
    waiting = app.get("inbox/", subscription_id=subscription["id"])["results"]
    assert [row["id"] for row in waiting] == [message["id"]]
    app.post(f"messages/{message['id']}/receive/")
    app.post(f"messages/{message['id']}/convert/", {"action": "click"})
    assert sender.get(f"messages/{message['id']}/")["status"] == "converted"
    now = timezone.now()
    span = {"from": (now - DAY).isoformat(), "to": (now + DAY).isoformat(), "group_by": "channel"}
    totals = sender.get("analytics/messages/", **span)["totals"]
    assert [totals[name] for name in ("created", "sent", "received", "converted", "failed")] == [1, 1, 1, 1, 0]


@pytest.fixture
def campaign(member):
    """Two steps, a day apart, to three leads; running."""
    crm = member("campaign-manager")
    sender = crm.post("senders/", {"channel": "email", "address": "anna@shop.example"})
    steps = [
        {"channel": "email", "delay_seconds": 0, "subject": "Hello {{name}}", "body": "<p>Look.</p>"},
        {"channel": "email", "delay_seconds": 86400, "subject": "Once more", "body": "<p>Did you?</p>"},
    ]
    row = crm.post("sequences/", {"name": "Spring", "sender_ids": [sender["id"]], "steps": steps})
    leads = [{"name": name, "email": f"{name.lower()}@example.com"} for name in ("Anna", "Minji", "Luca")]
    made = crm.post("leads/bulk/", {"leads": leads})["results"]
    keys = [lead.get("id") or lead["lead"]["id"] for lead in made]
    crm.post(f"sequences/{row['id']}/activate/")
    crm.post(f"sequences/{row['id']}/enroll/", {"lead_ids": keys})
    return crm, row["id"]


def test_a_campaign_from_its_first_step_to_its_completion(campaign):
    crm, pk = campaign
    start = timezone.now()
    tick(start)
    enrolled = crm.get("enrollments/", sequence_id=pk)["results"]
    assert crm.get(f"sequences/{pk}/")["counters"]["sent"] == 3
    crm.post("replies/", {"enrollment_id": enrolled[0]["id"], "kind": "human", "text": "Call me."})
    tick(start + DAY + timedelta(minutes=1))
    after = crm.get(f"sequences/{pk}/")
    assert (after["counters"]["sent"], after["counters"]["skipped"], after["status"]) == (5, 1, "active")
    assert after["display_state"] == "reply_harvest"
    tick(start + 5 * DAY)
    assert crm.get(f"sequences/{pk}/")["status"] == "completed"
    assert Decision.objects.filter(object_id=pk, rule="forward.completed", won=True).exists()


def test_a_sequence_called_complete_too_early_is_opened_again_and_finishes(campaign):
    """The incident the product exists for."""
    crm, pk = campaign
    now = timezone.now()
    Sequence.objects.filter(pk=pk).update(status="completed", completed_at=now)
    assert broken() == {"campaigns.completed_with_work": 1}
    tick(now + timedelta(minutes=5))
    assert Decision.objects.filter(object_id=pk, rule="reverse.reopened", won=True).exists()
    for minute in (6, 24 * 60 + 10, 8 * 24 * 60):
        tick(now + timedelta(minutes=minute))
    after = crm.get(f"sequences/{pk}/")
    assert (after["status"], after["counters"]["sent"], after["counters"]["waiting"]) == ("completed", 6, 0)
    assert broken() == {}


def broken():
    return {reading.name: reading.count for reading in integrity.report() if reading.count}


def test_who_edits_holds_the_lock_and_a_crashed_holder_is_moved_aside(campaign, make_client):
    crm, pk = campaign
    crm.post(f"sequences/{pk}/pause/")
    holder, boss = (Door(make_client(group, username=group)) for group in ("lock-holder", "lock-admin"))
    asked = {
        "branch_name": "main", "lock_type": "MAINTENANCE", "lock_scope": "RESOURCE", "resource_type": "sequence",
        "resource_id": pk, "reason": "rewriting the texts",
    }  # fmt: skip
    lock = holder.post("branch-locks/acquire/", asked)
    refused = crm.patch(f"sequences/{pk}/", {"name": "Summer"}, status=423)
    assert "rewriting the texts" in str(refused) or lock["lock_id"] in str(refused)
    boss.post("branch-locks/force-unlock/", {"lock_ids": [lock["lock_id"]], "reason": "the holder crashed"})
    assert crm.patch(f"sequences/{pk}/", {"name": "Summer"})["name"] == "Summer"


def test_a_task_goes_over_the_devices_of_a_pc(make_client):
    from devices.services import assign_agent

    operator, agent = (Door(make_client(group, username=group)) for group in ("operator", "device-agent"))
    assign_agent(agent.user, "PC-07")
    devices = [{"serial": f"S{n}", "connection_id": f"usb:{n}"} for n in range(3)]
    agent.post("pcs/PC-07/heartbeat/", {"devices": devices})
    task = operator.post("tasks/", {"name": "update", "device_count": 3})
    sweep("devices.promote_next_task")
    granted = agent.post("pcs/PC-07/claim/", {"max_to_claim": 5}, **{"Idempotency-Key": str(uuid4())})
    for row in granted["task_devices"]:
        agent.post(f"task-devices/{row['id']}/complete/", {"token": row["token"], "result": {"ok": True}})
    done = operator.get(f"tasks/{task['id']}/")
    assert (done["status"], done["devices_done"], done["devices_failed"]) == ("success", 3, 0)


def test_a_reminder_comes_into_the_inbox_and_backs_off(member):
    notes = member("reminder-client", "message-client", "message-sender", username="notes")
    page = {"application": "shop", "user_id": "minji", "page_id": "note-1", "title": "Read it again"}
    made = notes.post("/api/reminder/register-by-page", {**page, "timezone": "Asia/Seoul"})
    inbox = notes.post(
        "subscriptions/", {"application": "shop", "type": "InAppMessage", "token": "i", "user_id": "minji"}
    )
    alarm = notes.get("alarms/", user_id="minji")["results"][0]
    assert alarm["id"] == made["alarm_id"]
    due = datetime.fromisoformat(alarm["next_alarm_time"])
    sweep("reminders.send_due_alarms", "messaging.dispatch_due_messages", now=due)
    told = notes.get("inbox/", subscription_id=inbox["id"])["results"]
    assert [row["title"] for row in told] == ["Read it again"]
    again = notes.get("alarms/", user_id="minji")["results"][0]
    assert (again["sent_count"], datetime.fromisoformat(again["next_alarm_time"]) > due) == (
        alarm["sent_count"] + 1,
        True,
    )


def test_every_number_of_the_dashboard_counts_the_rows_it_leads_to(db):
    from importlib import import_module

    for app in ("locks", "messaging", "campaigns", "reminders", "devices"):
        import_module(f"{app}.demo").seed(1, lambda line: None)
    boss = User.objects.create_superuser("boss")
    told = [
        (str(panel.title), str(label), int(str(value).replace(",", "")), link)
        for panel in panels(asking(boss, "/admin/"))
        for label, value, link in numbers(panel)
        if "?" in link and str(value).replace(",", "").isdigit()
    ]
    wrong = [(*said, shown) for said in told if (shown := rows_behind(boss, said[3])) != said[2]]
    assert wrong == []
    assert len(told) > 20


def asking(user, link):
    request = RequestFactory().get(link)
    request.user = user
    return request


def rows_behind(user, link):
    """What the list shows, without drawing it."""
    app, model = link.split("?")[0].strip("/").split("/")[1:]
    return site._registry[apps.get_model(app, model)].get_changelist_instance(asking(user, link)).queryset.count()


def numbers(panel):
    for figure in [*panel.figures, *(figure for row in panel.rows for figure in row.figures)]:
        yield figure.label, figure.value, figure.link
    for row in panel.rows:
        yield row.title, row.badge, row.link
