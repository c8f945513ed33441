"""Sequences, senders and leads as operators write them in the admin: by the services, behind the gate of locks."""

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse
from django.utils import timezone

from campaigns.admin.forms import DelayField, delay_text
from campaigns.models import Enrollment, Execution, Lead, Sender, Sequence, Step
from campaigns.services import importing
from campaigns.services.enrolling import enroll_leads
from config.errors import Invalid
from locks.services import LockRequest, acquire_lock
from messaging.models import Application, Subscription
from tests.campaigns.factories import (
    NOW,
    ApplicationFactory,
    EnrollmentFactory,
    LeadFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    work,
)

pytestmark = pytest.mark.django_db


def staff_of(client, *groups):
    user = get_user_model().objects.create_user("op", is_staff=True, password="x")
    user.groups.set(Group.objects.filter(name__in=groups))
    client.force_login(user)
    return client


@pytest.fixture
def staff(client):
    return staff_of(client, "operator")


def page(row):
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])


def formset(prefix, forms, initial=0):
    body = {f"{prefix}-TOTAL_FORMS": len(forms), f"{prefix}-INITIAL_FORMS": initial}
    return body | {
        f"{prefix}-{index}-{name}": value for index, form in enumerate(forms) for name, value in form.items()
    }


def step(**fields):
    return {"channel": "email", "delay_seconds": "0", "stale_policy": "skip", "subject": "Hi", "body": "x", **fields}


def sequence_body(pool=(), steps=(), stored=(0, 0), **fields):
    head = {"name": "Spring", "kind": "notice", "harvest_days": 3, "stale_after_multiplier": 3, **fields}
    return head | formset("pool", pool, stored[0]) | formset("steps", steps, stored[1])


def as_stored(sequence):
    """The page's formsets as the browser would send them back, untouched."""
    pool = [
        {"id": row.pk, "position": row.position, "sender": row.sender_id} for row in sequence.pool.order_by("position")
    ]
    steps = [
        step(id=row.pk, position=row.position, delay_seconds=delay_text(row.delay_seconds), subject=row.subject,
             body=row.body)
        for row in Step.objects.standing().filter(sequence=sequence)
    ]  # fmt: skip
    return pool, steps


def edited(sequence, change=lambda pool, steps: None, **fields):
    pool, steps = as_stored(sequence)
    counts = len(pool), len(steps)
    change(pool, steps)
    return sequence_body(pool, steps, counts, name=sequence.name, **fields)


def errors(answer):
    form = answer.context["adminform"].form
    return [*form.non_field_errors(), *(text for found in form.errors.values() for text in found)]


class TestSequences:
    def test_one_is_made_with_its_senders_and_steps_and_runs(self, staff):
        application, first, second = ApplicationFactory(), SenderFactory(), SenderFactory()
        pool = [{"position": 2, "sender": second.pk}, {"position": 1, "sender": first.pk}]
        steps = [step(delay_seconds="3 d 4h", position=2, subject="Later"), step(subject="Hello {{name}}")]
        body = sequence_body(pool, steps, application=application.pk)
        assert staff.post(reverse("admin:campaigns_sequence_add"), body).status_code == 302
        row = Sequence.objects.get()
        assert (row.status, row.name, row.application) == ("draft", "Spring", application)
        assert [member.sender for member in row.pool.order_by("position")] == [first, second]
        found = [(one.position, one.subject, one.delay_seconds) for one in Step.objects.standing()]
        assert found == [(1, "Later", 3 * 86400 + 4 * 3600), (2, "Hello {{name}}", 0)]
        assert LogEntry.objects.get().object_id == str(row.pk)
        url = reverse("admin:campaigns_sequence_changelist")
        confirmed = {"action": "activate", "_selected_action": row.pk, "keys": row.pk, "confirmed": "yes"}
        assert staff.post(url, {**confirmed, "back": page(row)})["Location"] == page(row)
        row = Sequence.objects.get()
        assert row.status == "active"
        assert "Pause" in staff.get(page(row)).content.decode()

    def test_what_the_service_refuses_stands_in_the_form_with_what_was_typed(self, staff):
        application, foreign = ApplicationFactory(), SenderFactory(application__slug="other")
        body = sequence_body(
            [{"position": 1, "sender": foreign.pk}], [step(body="typed with care")], application=application.pk
        )
        answer = staff.post(reverse("admin:campaigns_sequence_add"), body)
        assert answer.status_code == 200 and "no such sender" in errors(answer)[0]
        assert "typed with care" in answer.content.decode()
        assert not Sequence.objects.exists() and not LogEntry.objects.exists()

    def test_steps_are_added_changed_moved_and_removed(self, staff):
        sequence = SequenceFactory(status="draft", activated_at=None)
        one, two, three = (StepFactory(sequence=sequence, position=n, subject=f"{n}") for n in (1, 2, 3))

        def change(pool, steps):
            steps[0]["position"] = 2
            steps[1]["subject"] = "Two"
            steps[2]["DELETE"] = "on"
            steps.append(step(subject="new"))

        assert staff.post(page(sequence), edited(sequence, change)).status_code == 302
        found = [(row.position, row.pk, row.subject) for row in Step.objects.standing()]
        new = Step.objects.get(subject="new")
        assert found == [(1, two.pk, "Two"), (2, one.pk, "1"), (3, new.pk, "new")]
        assert not Step.objects.filter(pk=three.pk).exists()

    def test_a_step_somebody_waits_for_stays(self, staff):
        waiting = work(sender=SenderFactory())
        sequence = waiting.enrollment.sequence
        answer = staff.post(page(sequence), edited(sequence, lambda pool, steps: steps[0].update(DELETE="on")))
        assert answer.status_code == 200 and "waiting" in errors(answer)[0]
        assert Step.objects.filter(sequence=sequence).exists()
        assert Execution.objects.get().status == "pending"

    def test_a_lock_keeps_the_admin_out_and_names_its_holder(self, staff):
        sequence = SequenceFactory(status="active")
        scope = {"resource_type": "sequence", "resource_id": str(sequence.pk)}
        acquire_lock(LockRequest("main", "MANUAL", "RESOURCE", "nightly-import", "import", **scope))
        answer = staff.post(page(sequence), edited(sequence, harvest_days=9))
        assert answer.status_code == 200 and "nightly-import" in errors(answer)[0]
        assert Sequence.objects.get().harvest_days == 3

    def test_bounds_are_those_of_the_api(self, staff):
        sequence = SequenceFactory(status="draft", activated_at=None)
        for fields in ({"harvest_days": 0}, {"harvest_days": 91}, {"stale_after_multiplier": 101}):
            assert staff.post(page(sequence), edited(sequence, **fields)).status_code == 200
        assert (Sequence.objects.get().harvest_days, Sequence.objects.get().stale_after_multiplier) == (3, 3)

    def test_only_what_has_no_history_is_deleted(self, staff):
        empty, used = SequenceFactory(status="draft", activated_at=None), EnrollmentFactory().sequence
        Sequence.objects.filter(pk=used.pk).update(status="completed", completed_at=NOW)
        for row in (empty, used):
            staff.post(reverse("admin:campaigns_sequence_delete", args=[row.pk]), {"post": "yes"})
        assert list(Sequence.objects.values_list("pk", flat=True)) == [used.pk]

    def test_an_archived_one_and_a_viewer_change_nothing(self, client):
        sequence = SequenceFactory(status="draft", activated_at=None)
        viewer = staff_of(client, "viewer")
        assert viewer.get(page(sequence)).status_code == 200
        assert viewer.post(page(sequence), edited(sequence, harvest_days=9)).status_code == 403
        get_user_model().objects.get().groups.set(Group.objects.filter(name="operator"))
        Sequence.objects.update(status="archived")
        assert viewer.post(page(sequence), edited(sequence, harvest_days=9)).status_code == 403
        assert Sequence.objects.get().harvest_days == 3


@pytest.mark.parametrize(
    ("text", "seconds"), [("3 d 4h", 273600), ("30 min", 1800), ("30m", 1800), ("90s", 90), ("0", 0), ("0 min", 0)]
)
def test_a_delay_is_read_as_people_write_it(text, seconds):
    assert DelayField().clean(text) == seconds
    assert DelayField().clean(delay_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["soon", "3 weeks", "3", "-1 d", "999999999 d", "3 dd"])
def test_nonsense_is_no_delay(text):
    with pytest.raises(Exception, match="Write it|too long"):
        DelayField().clean(text)


class TestSenders:
    def body(self, **fields):
        return {
            "channel": "email", "address": "a@shop.example", "display_name": "A", "min_gap_seconds": 0,
            "gap_jitter_seconds": 0, "window_days": [1, 2], "window_zone": "lead", "time_zone": "Asia/Seoul", **fields,
        }  # fmt: skip

    def test_one_is_made_and_changed(self, staff):
        application = ApplicationFactory()
        url = reverse("admin:campaigns_sender_add")
        assert staff.post(url, self.body(application=application.pk, daily_limit=50)).status_code == 302
        row = Sender.objects.get()
        assert (row.window_days, row.daily_limit, row.status) == ([1, 2], 50, "active")
        assert (
            staff.post(page(row), self.body(daily_limit="", window_from="09:00", window_to="18:00")).status_code == 302
        )
        row = Sender.objects.get()
        assert (row.daily_limit, f"{row.window_from:%H:%M}") == (None, "09:00")

    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"address": "nobody"}, "address"),
            ({"time_zone": "Mars/Base"}, "time_zone"),
            ({"window_from": "09:00"}, "window_to"),
            ({"window_from": "18:00", "window_to": "18:00"}, "window_to"),
            ({"window_days": []}, "window_days"),
            ({"daily_limit": -1}, "daily_limit"),
        ],
    )
    def test_a_wrong_value_is_told_at_its_field(self, staff, fields, name):
        body = self.body(application=ApplicationFactory().pk, **fields)
        answer = staff.post(reverse("admin:campaigns_sender_add"), body)
        assert answer.status_code == 200 and name in answer.context["adminform"].form.errors
        assert not Sender.objects.exists()

    def test_retiring_tells_who_is_affected_and_hands_them_over(self, staff):
        waiting = work(sender=SenderFactory())
        old = waiting.enrollment.sender
        heir = SenderFactory(application=old.application)
        url = reverse("admin:campaigns_sender_retire", args=[old.pk])
        asked = staff.get(url).content.decode()
        assert waiting.enrollment.sequence.name in asked and heir.address in asked
        staff.post(url, {"how": "delete", "successor": heir.pk, "reason": "mailbox closed"})
        assert Sender.objects.get(pk=old.pk).deleted_at is not None
        assert Enrollment.objects.get().sender == heir
        assert "mailbox closed" in staff.get(page(old)).content.decode()

    def test_what_cannot_be_is_told_and_leaves_no_trace(self, staff):
        row = SenderFactory(status="inactive")
        answer = staff.post(reverse("admin:campaigns_sender_retire", args=[row.pk]), {"how": "suspend", "reason": "x"})
        assert answer.status_code == 200 and answer.context["form"].non_field_errors()
        assert not LogEntry.objects.exists()

    def test_a_viewer_cannot_retire(self, client):
        url = reverse("admin:campaigns_sender_retire", args=[SenderFactory().pk])
        assert staff_of(client, "viewer").get(url).status_code == 403


class TestLeads:
    def test_one_is_made_with_its_subscriptions_and_enriched(self, staff):
        application = ApplicationFactory()
        body = {"application": application.pk, "name": "Jiwoo", "phone": "+821012345678", "time_zone": "Asia/Seoul",
                "attributes": "{}"}  # fmt: skip
        assert staff.post(reverse("admin:campaigns_lead_add"), body).status_code == 302
        lead = Lead.objects.get()
        assert lead.sms_subscription is not None and lead.email is None
        sequence = SequenceFactory(application=application)
        StepFactory(sequence=sequence, position=1, channel="email")
        enroll_leads(sequence.pk, [lead.pk], NOW)
        assert Execution.objects.get().status == "awaiting_enrichment"
        assert staff.post(page(lead), {**body, "email": "jiwoo@example.com"}).status_code == 302
        assert Execution.objects.get().status == "pending"

    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({}, "email"),
            ({"email": "a@b@c"}, "email"),
            ({"phone": "010-1234"}, "phone"),
            ({"email": "a@example.com", "time_zone": "x"}, "time_zone"),
            ({"email": "a@example.com", "attributes": "[1]"}, "attributes"),
            ({"email": "TAKEN@example.com"}, "email"),
        ],
    )
    def test_a_wrong_value_is_told_at_its_field(self, staff, fields, name):
        taken = LeadFactory(email="taken@example.com")
        body = {"application": taken.application_id, "name": "x", "time_zone": "UTC", "attributes": "{}", **fields}
        answer = staff.post(reverse("admin:campaigns_lead_add"), body)
        assert answer.status_code == 200
        found = answer.context["adminform"].form.errors
        assert name in found or (name == "email" and "__all__" in found), found
        assert Lead.objects.count() == 1


TABLE = (
    "이름,email,전화번호,plan\n지우,jiwoo@example.com,,gold\nAnna,ANNA@example.com,+82 10-1234-5678,\nBad,nobody,,\n"
)


class TestImporting:
    def url(self, sequence=None):
        return reverse("admin:campaigns_lead_import_leads") + (f"?sequence={sequence.pk}" if sequence else "")

    def test_a_table_becomes_leads_in_a_sequence_once(self, staff):
        sequence = SequenceFactory()
        StepFactory(sequence=sequence, position=1)
        LeadFactory(application=sequence.application, email="anna@example.com")
        body = {"application": sequence.application_id, "sequence": sequence.pk, "text": TABLE}
        answer = staff.post(self.url(sequence), body)
        assert answer.context["done"].counts == {"created": 1, "exists": 1, "invalid": 1, "enrolled": 2}
        assert [line for line, _wrong in answer.context["problems"]] == [4]
        jiwoo = Lead.objects.get(email="jiwoo@example.com")
        assert (jiwoo.name, jiwoo.attributes) == ("지우", {"plan": "gold"})
        assert Subscription.objects.filter(user_id=str(jiwoo.pk)).count() == 1
        again = staff.post(self.url(sequence), body).context["done"].counts
        assert again == {"created": 0, "exists": 2, "invalid": 1, "already_enrolled": 2}
        assert Enrollment.objects.count() == 2

    def test_a_korean_spreadsheets_file_is_read(self, staff):
        application = ApplicationFactory()
        file = SimpleUploadedFile("leads.csv", "이름;이메일\r\n민지;minji@example.com\r\n".encode("cp949"))
        staff.post(self.url(), {"application": application.pk, "file": file})
        assert Lead.objects.get().name == "민지"

    def test_a_number_alone_is_the_same_person_again(self):
        application = ApplicationFactory()
        for _round in range(2):
            done = importing.import_leads(application, "phone\n+82 10 1234 5678\n", NOW)
        assert done.counts["exists"] == 1 and Lead.objects.get().phone == "+821012345678"

    @pytest.mark.parametrize("text", ["", "name\nJiwoo\n", "email\n\0@example.com", "email\n" + "a@b.kr\n" * 10_001])
    def test_a_table_that_is_none_is_refused_whole(self, staff, text):
        answer = staff.post(self.url(), {"application": ApplicationFactory().pk, "text": text})
        assert answer.status_code == 200 and answer.context["form"].errors
        assert not Lead.objects.exists()

    def test_bytes_that_are_no_text_are_refused(self):
        with pytest.raises(Invalid, match="UTF-8"):
            importing.decoded(b"\xff\xfe\xff\x81")

    def test_a_sequence_of_another_application_is_refused(self, staff):
        sequence = SequenceFactory()
        body = {"application": ApplicationFactory(slug="other").pk, "sequence": sequence.pk, "text": TABLE}
        assert "sequence" in staff.post(self.url(), body).context["form"].errors
        assert not Lead.objects.exists()

    def test_cost_does_not_grow_with_the_rows(self, django_assert_max_num_queries):
        application = ApplicationFactory()
        text = "email\n" + "".join(f"p{n}@example.com\n" for n in range(900))
        with django_assert_max_num_queries(30):
            importing.import_leads(application, text, timezone.now())
        assert Application.objects.get().leads.count() == 900

    def test_a_viewer_imports_nobody(self, client):
        assert staff_of(client, "viewer").get(self.url()).status_code == 403
