"""The operator's screens: every page opens, actions call the services, a lead's silence is explained."""

from datetime import timedelta
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.urls import reverse
from django.utils import timezone

from campaigns import demo
from campaigns.models import Enrollment, Execution, Lead, Reply, Sender, Sequence
from campaigns.services.statistics import reply_hours
from config import integrity
from config.decisions import decide, record
from tests.campaigns.factories import (
    DAY,
    HOUR,
    NOW,
    EnrollmentFactory,
    ExecutionFactory,
    ReplyFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    work,
)
from tests.campaigns.test_reconciling import fresh
from tests.campaigns.test_signal import assert_right

pytestmark = pytest.mark.django_db
MODELS = ["sequence", "enrollment", "execution", "reply", "sender", "lead"]


@pytest.fixture
def staff(client):
    user = get_user_model().objects.create_user("op", is_staff=True, password="x")
    user.groups.set(Group.objects.filter(name="operator"))
    client.force_login(user)
    return client


@pytest.fixture
def world(db):
    demo.seed(1, lambda line: None)


def act(client, model, name, *rows, reason="because"):
    url = reverse(f"admin:campaigns_{model}_changelist")
    keys = [str(row.pk) for row in rows]
    asked = client.post(url, {"action": name, "_selected_action": keys})
    assert asked.status_code == 200, asked
    body = {"action": name, "_selected_action": keys[:1], "keys": ",".join(keys), "confirmed": "yes", "reason": reason}
    return asked, client.post(url, body, follow=True)


@pytest.mark.parametrize("model", MODELS)
def test_every_list_and_page_opens(staff, world, model):
    assert staff.get(reverse(f"admin:campaigns_{model}_changelist")).status_code == 200
    row = {m.__name__.lower(): m for m in (Sequence, Enrollment, Execution, Reply, Sender, Lead)}[model].objects.first()
    assert staff.get(reverse(f"admin:campaigns_{model}_change", args=[row.pk])).status_code == 200


def test_the_demo_is_sound_and_runs_once(world):
    assert_right()
    assert set(Sequence.objects.values_list("status", flat=True)) >= {"draft", "active", "paused", "completed"}
    before = Execution.objects.count()
    demo.seed(1, lambda line: None)
    assert Execution.objects.count() == before
    broken = {r.name: r.count for r in integrity.report() if r.name.startswith("campaigns.") and r.severity == "error"}
    # The fair of seven weeks ago is there to be healed.
    assert {name: count for name, count in broken.items() if count} == {"campaigns.completed_with_work": 1}


def test_tabs_go_by_status_and_badges_say_why(staff):
    work(status="sent", enrollment="completed")
    page = staff.get(reverse("admin:campaigns_sequence_changelist") + "?status__exact=active").content.decode()
    assert "finalizing" in page
    assert "completed by the next tick" in page
    assert "Running" in page


def test_skip_stale_shows_the_count_first(staff):
    row = work(sender=SenderFactory(), due=NOW - 4000 * DAY)
    asked, _done = act(staff, "sequence", "skip_stale", row.enrollment.sequence)
    assert "1 stale" in asked.content.decode()
    assert fresh(row).skip_reason == "stale"


@pytest.mark.parametrize(
    ("name", "status", "after"),
    [
        ("pause", "active", "paused"),
        ("force_complete", "active", "completed"),
        ("reactivate", "completed", "active"),
        ("reconcile_now", "active", "completed"),
    ],
)
def test_actions_of_sequences(staff, name, status, after):
    sequence = SequenceFactory(status=status)
    act(staff, "sequence", name, sequence)
    assert fresh(sequence).status == after


def test_clone_and_an_illegal_action_say_what_happened(staff):
    sequence = SequenceFactory(status="archived")
    act(staff, "sequence", "clone", sequence)
    assert Sequence.objects.filter(status="draft").count() == 1
    _asked, done = act(staff, "sequence", "pause", sequence)
    assert "Its state does not allow it." in done.content.decode()
    _asked, done = act(staff, "sequence", "pause", sequence, SequenceFactory())
    assert "illegal_transition 1, paused 1" in done.content.decode()


def test_a_locked_sequence_names_who_holds_it(staff, make_client):
    sequence = SequenceFactory(status="completed")
    wanted = {"branch_name": "main", "lock_type": "MAINTENANCE", "lock_scope": "RESOURCE", "reason": "new texts"}
    resource = {"resource_type": "sequence", "resource_id": str(sequence.pk)}
    holder = make_client("lock-holder", username="holder")
    assert holder.post("/api/v1/branch-locks/acquire/", {**wanted, **resource}).status_code == 201
    _asked, done = act(staff, "sequence", "reactivate", sequence)
    assert "locked by holder: new texts" in done.content.decode()
    assert fresh(sequence).status == "completed"


def test_actions_of_enrollments_and_senders(staff):
    row = work(sender=SenderFactory(), due=NOW + DAY)
    act(staff, "enrollment", "pause", row.enrollment)
    assert fresh(row.enrollment).status == "paused"
    asked, _done = act(staff, "sender", "suspend", row.enrollment.sender)
    assert "1 live enrollments in 1 sequences" in asked.content.decode()
    assert fresh(row.enrollment.sender).status == "suspended"


def test_why_a_lead_was_not_written_to_stands_on_its_page(staff):
    row = work(SequenceFactory(status="paused"), sender=SenderFactory())
    page = staff.get(reverse("admin:campaigns_enrollment_change", args=[row.enrollment_id])).content.decode()
    assert "Why it has not been sent" in page
    assert "What decides: sequence." in page


def test_the_dashboard_has_the_panel(staff, world):
    assert "old@shop.example.com" in staff.get(reverse("admin:index")).content.decode()


def test_the_integrity_report_says_since_when_of_each_finding(staff):
    long_ago = timezone.now() - timedelta(days=2)
    work(due=long_ago, status="processing")
    work(due=long_ago, enrollment="stopped")
    Enrollment.objects.filter(status="stopped").update(ended_at=long_ago)
    work(SequenceFactory(status="completed", completed_at=long_ago), due=long_ago)
    Sequence.objects.filter(pk=SequenceFactory().pk).update(pending_work_changed_at=long_ago)
    Sequence.objects.filter(pk=SequenceFactory().pk).update(has_pending_work=True, pending_work_changed_at=long_ago)
    work(due=long_ago, sender=SenderFactory())
    page = staff.get("/admin/integrity/").content.decode()
    shown = f"since {timezone.localtime(long_ago):%Y-%m-%d %H:%M}"
    for name in ("stuck_completion", "signal_drift", "orphans", "completed_with_work", "overdue", "stuck_processing"):
        finding = page.partition(f'id="campaigns.{name}"')[2].partition("</section>")[0]
        assert shown in finding, name
    assert "1 waiting, ∞ a day" in page


def test_a_reply_answers_the_last_step_before_it():
    sequence = SequenceFactory()
    first, second = StepFactory(sequence=sequence), StepFactory(sequence=sequence)
    row = EnrollmentFactory(sequence=sequence, status="replied")
    ExecutionFactory(enrollment=row, step=first, status="sent", scheduled_at=NOW - 2 * HOUR)
    ExecutionFactory(enrollment=row, step=second, status="sent", scheduled_at=NOW - HOUR)
    work(sequence, status="sent", enrollment="completed", due=NOW - HOUR)
    ReplyFactory(enrollment=row, received_at=NOW)
    assert reply_hours(sequence, NOW, ZoneInfo("UTC")) == {8: (1, 0), 9: (2, 1)}
    assert reply_hours(sequence, NOW + 31 * DAY, ZoneInfo("UTC")) == {}


def test_the_sequence_page_draws_its_charts_only_when_there_is_something(staff):
    now = timezone.now()
    row = work(status="sent", enrollment="replied", due=now)
    url = reverse("admin:campaigns_sequence_change", args=[row.enrollment.sequence_id])
    assert 'id="reply-rate"' not in staff.get(url).content.decode()
    ReplyFactory(enrollment=row.enrollment, received_at=now)
    page = staff.get(url).content.decode()
    assert 'id="reply-rate"' in page and "1 of 1 answered, 100%" in page
    assert 'id="upcoming"' not in page


def test_a_sender_in_error_says_why(staff):
    sender = SenderFactory(status="error", last_error="sender_rejected 21606")
    record([decide("sender.rejected", sender, before={"status": "active"}, after={"status": "error"})])
    page = staff.get(reverse("admin:campaigns_sender_change", args=[sender.pk])).content.decode()
    assert "sender_rejected 21606" in page
    assert "The provider does not take the sender&#x27;s address" in page
    assert "sender_rejected 21606" in staff.get(reverse("admin:index")).content.decode()
