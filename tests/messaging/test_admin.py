"""The admin pages: they open, stay quick, say the right words, and act only by services."""

from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from config.models import SweepRun
from locks.services import LockRequest, acquire_lock
from messaging.admin.overview import backlog_seconds
from messaging.models import (
    Message,
    MessageAttempt,
    MessageHit,
    MessageTemplate,
    ProviderCircuit,
    Subscription,
    Suppression,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookInbox,
)
from messaging.services import add_suppression
from messaging.services.analytics import accepted_by_day, fold_deltas
from messaging.services.templates import Hold, change_template, create_template
from messaging.services.webhooks import create_endpoint
from tests.messaging.factories import ApplicationFactory, message, message_in, subscribe

pytestmark = pytest.mark.django_db


@pytest.fixture
def boss(client):
    client.force_login(User.objects.create_superuser("boss"))
    return client


@pytest.fixture
def viewer(client):
    user = User.objects.create_user("viewer", is_staff=True)
    user.groups.set(Group.objects.filter(name="viewer"))
    client.force_login(user)
    return client


def now():
    return timezone.now()


def list_url(model):
    return reverse(f"admin:messaging_{model._meta.model_name}_changelist")


def page_url(row):
    return reverse(f"admin:messaging_{type(row)._meta.model_name}_change", args=[row.pk])


def act(client, name, *rows, reason="because", confirmed=True):
    data = {"action": name, "_selected_action": [str(row.pk) for row in rows]}
    if confirmed:
        data |= {"confirmed": "yes", "keys": ",".join(str(row.pk) for row in rows), "reason": reason}
    return client.post(list_url(type(rows[0])), data, follow=True)


def everything():
    application = ApplicationFactory()
    row = message_in("successful", subscribe(application), at=now() - timedelta(hours=1))
    MessageAttempt.objects.create(
        message=row, attempt_no=1, started_at=now(), ended_at=now(), outcome="accepted", provider="null", raw="<raw>"
    )
    MessageHit.objects.create(message=row, kind="open", by="machine", reasons=["proxy"], occurred_at=now())
    template = create_template(
        application, {"name": "t", "channel": "push", "title_template": "Hi {{name}}"}, now=now()
    )
    endpoint, _secret = create_endpoint(application, "https://hooks.example/")
    delivery = WebhookDelivery.objects.create(
        endpoint=endpoint, message_id=row.pk, event_type="message.failed", payload={}
    )
    event = WebhookInbox.objects.create(provider="twilio", event_id="e", message=row, event_type="delivered")
    circuit = ProviderCircuit.objects.create(provider="fcm", reason="config", opened_at=now(), probe_at=now())
    suppression, _new = add_suppression(application, "email", "a@b.example", "complaint", {}, now=now())
    return [application, row, row.subscription, template, endpoint, delivery, event, circuit, suppression]


def test_every_list_and_page_opens(boss):
    rows = everything()
    for row in rows:
        assert boss.get(list_url(type(row))).status_code == 200, row
        assert boss.get(page_url(row)).status_code == 200, row
    assert boss.get(reverse("admin:index")).status_code == 200
    assert boss.get(reverse("admin:messaging_messagerollup_changelist")).status_code == 200


def test_a_message_shows_whom_it_is_from_where_it_says_so(boss):
    plain = message(subscribe(type="Email"))
    own = message(plain.subscription, from_address='"Kim" <kim@shop.example>')
    shown, silent = boss.get(page_url(own)), boss.get(page_url(plain))
    assert "kim@shop.example" in shown.content.decode()
    assert "from_address" in shown.context["adminform"].fieldsets[0][1]["fields"]
    assert "from_address" not in silent.context["adminform"].fieldsets[0][1]["fields"]


def test_a_viewer_sees_all_and_touches_nothing(viewer):
    rows = everything()
    for row in rows:
        assert viewer.get(list_url(type(row))).status_code == 200, row
        assert viewer.get(page_url(row)).status_code == 200, row
    assert act(viewer, "cancel", message()).status_code == 200
    assert not Message.objects.filter(status="failed").exists()


class TestMessageList:
    def test_it_is_walked_by_the_key_without_counting(self, boss):
        subscription = subscribe()
        rows = [message(subscription, title=f"No. {n:03}", now=now()) for n in range(120)]
        with CaptureQueriesContext(
            connection,
        ) as queries:
            first = boss.get(list_url(Message))
        assert not [query for query in queries if "COUNT(" in query["sql"] and '"messages"' in query["sql"]]
        assert len(queries) < 15
        assert [row.pk for row in first.context["cl"].result_list] == [row.pk for row in rows[:69:-1]]
        second = boss.get(list_url(Message) + first.context["cl"].older)
        third = boss.get(list_url(Message) + second.context["cl"].older)
        assert [row.pk for row in third.context["cl"].result_list] == [row.pk for row in rows[19::-1]]
        assert third.context["cl"].older == "" and first.context["cl"].newer == ""
        back = boss.get(list_url(Message) + third.context["cl"].newer)
        assert back.context["cl"].result_list == second.context["cl"].result_list

    def test_nonsense_in_the_address_is_no_error(self, boss):
        for query in (
            "after=x",
            "before=%00",
            "within=7",
            "state=odd",
            "q=%00",
            "campaign__exact=x",
            "foo=bar",
            "campaign=%00",
        ):
            assert boss.get(f"{list_url(Message)}?{query}", follow=True).status_code == 200

    def test_held_and_cancelled_have_their_own_words(self, boss):
        held = message()
        Message.objects.filter(pk=held.pk).update(hold_reason="outcome_unknown")
        cancelled = message_in("failed")
        Message.objects.filter(pk=cancelled.pk).update(error_reason="cancelled")
        message_in("successful")
        message_in("received")
        page = boss.get(list_url(Message)).content.decode()
        for word in ("unknown", "cancelled", "accepted by provider", "delivered"):
            assert f">{word}</span>" in page
        assert ">sent<" not in page
        for state, row in (("unknown", held), ("cancelled", cancelled)):
            found = boss.get(f"{list_url(Message)}?state={state}").context["cl"].result_list
            assert [item.pk for item in found] == [row.pk]

    @pytest.mark.parametrize("by", ["id", "provider", "user", "address", "subscription"])
    def test_it_is_found_by_exact_ids_and_address(self, boss, by):
        row = message(subscribe(type="Email", token="Jane@Example.com", user_id="u-7"))
        Message.objects.filter(pk=row.pk).update(provider_message_id="p-1")
        message(subscribe())
        text = {
            "id": row.pk,
            "provider": "p-1",
            "user": "u-7",
            "address": "jane@example.com",
            "subscription": row.subscription_id,
        }
        found = boss.get(list_url(Message), {"q": str(text[by])}).context["cl"].result_list
        assert [item.pk for item in found] == [row.pk]


class TestMessagePage:
    def test_the_timeline_tells_it_all_in_one_column(self, boss):
        row = everything()[1]
        act(boss, "retry", row, reason="customer asked")
        page = boss.get(page_url(row)).content.decode()
        words = [
            "Created", "Accepted by provider", "Attempt 1 by null: accepted", "&lt;raw&gt;", "open by a machine",
            "twilio reports: delivered", "Webhook message.failed", "customer asked",
        ]  # fmt: skip
        for word in words:
            assert word in page, word

    def test_buttons_fit_the_state(self, boss):
        row = message()
        assert 'value="cancel"' in boss.get(page_url(row)).content.decode()
        Message.objects.filter(pk=row.pk).update(hold_reason="outcome_unknown")
        assert 'value="resolve_accepted"' in boss.get(page_url(row)).content.decode()
        done = boss.get(page_url(message_in("converted"))).content.decode()
        assert 'name="_selected_action"' not in done


class TestActions:
    def test_cancel_asks_first_and_takes_what_it_may(self, boss):
        waiting, over = message(), message_in("converted")
        asked = act(boss, "cancel", waiting, over, confirmed=False)
        assert "will be touched" in asked.content.decode()
        assert Message.objects.get(pk=waiting.pk).status == "pending"
        act(boss, "cancel", waiting, over)
        assert Message.objects.get(pk=waiting.pk).error_reason == "cancelled"
        assert Message.objects.get(pk=over.pk).status == "converted"

    def test_failed_ones_are_sent_anew_once(self, boss):
        row = message_in("failed")
        act(boss, "retry", row, message_in("converted"))
        act(boss, "retry", row)
        assert Message.objects.get(retry_of=row).status == "pending"

    @pytest.mark.parametrize(("name", "status"), [("resolve_accepted", "successful"), ("resolve_rejected", "failed")])
    def test_unknown_is_resolved(self, boss, name, status):
        row, other = message(), message()
        Message.objects.filter(pk=row.pk).update(hold_reason="outcome_unknown", attempt_count=1)
        act(boss, name, row, other)
        assert Message.objects.get(pk=row.pk).status == status
        assert Message.objects.get(pk=other.pk).status == "pending"

    def test_subscriptions_are_switched_but_an_opt_out_stays(self, boss):
        row, gone = subscribe(), subscribe(status=-2)
        act(boss, "disable", row)
        assert Subscription.objects.get(pk=row.pk).status == -31
        act(boss, "enable", row, gone)
        assert Subscription.objects.get(pk=row.pk).status == 1
        assert Subscription.objects.get(pk=gone.pk).status == -2

    def test_a_suppression_is_lifted_with_a_note(self, boss):
        row, _new = add_suppression(ApplicationFactory(), "email", "a@b.example", "complaint", {}, now=now())
        act(boss, "lift", row, reason="they wrote to us")
        row = Suppression.objects.get(pk=row.pk)
        assert (row.lifted_by, row.lift_note) == ("boss", "they wrote to us")

    def test_webhooks_are_sent_again_and_endpoints_switched(self, boss):
        endpoint, _secret = create_endpoint(ApplicationFactory(), "https://hooks.example/")
        row = WebhookDelivery.objects.create(
            endpoint=endpoint, message_id=uuid4(), event_type="message.failed", payload={}, given_up_at=now()
        )
        act(boss, "resend", row)
        assert WebhookDelivery.objects.get(pk=row.pk).given_up_at is None
        act(boss, "switch_off", endpoint)
        assert WebhookEndpoint.objects.get(pk=endpoint.pk).active is False


class TestTemplates:
    def make(self, **fields):
        wanted = {
            "name": "welcome",
            "channel": "email",
            "title_template": "Hi {{name}}",
            "body_template": "<b>{{x}}</b>",
        }
        return create_template(ApplicationFactory(), {**wanted, **fields}, now=now())

    def form(self, row, **changes):
        names = ("name", "title_template", "body_template", "provider_code", "approval")
        form = {name: getattr(row, name) for name in names} | {"active": "on", "data_template": "{}"}
        return {**form, **changes}

    def test_an_edit_is_a_new_version_shown_as_a_difference(self, boss):
        row = self.make()
        boss.post(page_url(row), self.form(row, title_template="Hello {{name}}"), follow=True)
        row.refresh_from_db()
        assert (row.version, row.title_template) == (2, "Hello {{name}}")
        page = boss.get(page_url(row)).content.decode()
        assert "-title_template: Hi {{name}}" in page and "+title_template: Hello {{name}}" in page

    def test_a_bad_place_is_an_error_at_its_field(self, boss):
        row = self.make()
        answer = boss.post(page_url(row), self.form(row, body_template="{{ 1 }}"))
        assert answer.status_code == 200 and "body_template" in answer.context["adminform"].form.errors
        row.refresh_from_db()
        assert row.version == 1

    def test_of_several_none_is_deleted_while_one_is_locked(self, boss):
        rows = [self.make(), self.make()]
        acquire_lock(LockRequest("main", "MAINTENANCE", "RESOURCE", "ann", "editing", "template", str(rows[1].pk)))
        chosen = {"action": "delete_selected", "_selected_action": [row.pk for row in rows], "post": "yes"}
        page = boss.post(list_url(MessageTemplate), chosen, follow=True).content.decode()
        assert "locked by ann" in page and MessageTemplate.objects.existing().count() == 2

    @pytest.mark.parametrize(("typed", "version"), [("", 2), ("null", 2), ("[]", 1), ("5", 1)])
    def test_data_is_an_object(self, boss, typed, version):
        row = self.make(data_template={"a": "b"})
        # What the page hides in the form to see whether the field was changed.
        boss.post(page_url(row), self.form(row, data_template=typed) | {"initial-data_template": '{"a": "b"}'})
        row.refresh_from_db()
        assert (row.version, row.data_template) == (version, {} if version == 2 else {"a": "b"})

    def test_one_is_made_and_deleted_by_the_service(self, boss):
        application = ApplicationFactory()
        fields = {"application": application.pk, "name": "new", "channel": "push", "title_template": "x",
                  "body_template": "", "data_template": "{}", "approval": "requested", "active": "on"}  # fmt: skip
        boss.post(reverse("admin:messaging_messagetemplate_add"), fields)
        row = MessageTemplate.objects.get(name="new")
        assert row.versions.count() == 1
        boss.post(reverse("admin:messaging_messagetemplate_delete", args=[row.pk]), {"post": "yes"})
        assert MessageTemplate.objects.get(pk=row.pk).deleted_at is not None

    def test_deleting_many_names_the_holder_of_the_one_that_is_locked(self, boss):
        rows = [self.make(name=name) for name in ("a", "b")]
        acquire_lock(LockRequest("main", "MAINTENANCE", "RESOURCE", "ann", "editing", "template", str(rows[1].pk)))
        chosen = {"action": "delete_selected", "_selected_action": [row.pk for row in rows], "post": "yes"}
        answer = boss.post(list_url(MessageTemplate), chosen, follow=True)
        assert "is locked by ann" in answer.content.decode()
        assert MessageTemplate.objects.existing().count() == 2

    def test_the_preview_fills_in_and_names_what_is_missing(self, boss):
        row = self.make()
        url = reverse("admin:messaging_messagetemplate_preview", args=[row.pk])
        assert "Hi name" in boss.get(url).content.decode()
        page = boss.post(url, {"variables": '{"name": "Jane", "x": "<i>"}'}).content.decode()
        assert "Hi Jane" in page and "&amp;lt;i&amp;gt;" in page
        assert "Missing: name, x" in boss.post(url, {"variables": "{}"}).content.decode()
        for wrong in ("[1]", "{", r'{"name": "\u0000"}', r'{"name": "\ud800"}', '{"name": NaN}', "[" * 3000):
            answer = boss.post(url, {"variables": wrong})
            assert answer.status_code == 200 and answer.context["form"].errors.keys() == {"variables"}, wrong

    def test_a_test_is_sent_to_a_subscription_of_the_application(self, boss):
        row = self.make()
        url = reverse("admin:messaging_messagetemplate_preview", args=[row.pk])
        form = {"variables": '{"name": "Jane", "x": "1"}', "send": "1"}
        assert boss.post(url, {**form, "recipient": "nobody@example.com"}).status_code == 200
        assert not Message.objects.exists()
        subscribe(row.application, "Email", token="me@example.com")
        answer = boss.post(url, {**form, "recipient": "me@example.com"})
        made = Message.objects.get()
        assert answer.status_code == 302 and answer["Location"] == page_url(made)
        assert (made.title, made.template_id) == ("Hi Jane", row.pk)

    def test_versions_that_change_no_text_say_so(self, boss):
        row = self.make()
        change_template(row.pk, {"active": False}, hold=Hold())
        assert "no change of the text" in boss.get(page_url(row)).content.decode()


@pytest.mark.parametrize(("typed", "stored"), [("", {}), ("null", {}), ("[]", None), ("5", None)])
def test_an_applications_settings_are_an_object(boss, typed, stored):
    row = ApplicationFactory(settings={"tracking": False})
    assert boss.post(page_url(row), {"name": "Shop", "active": "on", "settings": typed}).status_code in (200, 302)
    row.refresh_from_db()
    assert row.settings == ({"tracking": False} if stored is None else stored)


def test_the_analytics_page_draws_without_foreign_hosts(boss):
    subscription = subscribe()
    for days in range(5):
        message_in("converted", subscription, at=now() - timedelta(days=days), title=f"{days}")
    for query in (
        "",
        "?days=7&group=kind",
        "?days=odd&group=odd&application=%00",
        f"?application={subscription.application.slug}",
    ):
        page = boss.get(reverse("admin:messaging_messagerollup_changelist") + query)
        text = page.content.decode()
        assert page.status_code == 200 and text.count("<svg") >= 3 and "<polyline" in text
        assert "cdn" not in text.lower()


def test_the_dashboard_tells_of_today_and_of_what_waits(boss):
    message(now=now())
    held = message(now=now())
    Message.objects.filter(pk=held.pk).update(hold_reason="outcome_unknown")
    ProviderCircuit.objects.create(provider="fcm", reason="config", opened_at=now(), probe_at=now())
    WebhookInbox.objects.create(provider="twilio", event_id="e")
    page = boss.get(reverse("admin:panels")).content.decode()
    for word in ("Messages today", "due now", "outcome unknown", "breaker open", "provider events parked"):
        assert word in page, word


def test_the_backlog_s_end_is_told_from_the_last_hour_s_pace():
    now = timezone.now()
    assert backlog_seconds(100, now) is None
    fields = {"name": "messaging.dispatch_due_messages", "now": now}
    for counts, minutes, seconds in (({"successful": 40, "failed": 10}, 5, 10), ({}, 4, 9), ({"successful": 9}, 90, 1)):
        started = now - timedelta(minutes=minutes)
        ended = started + timedelta(seconds=seconds)
        SweepRun.objects.create(**fields, counts=counts, started_at=started, ended_at=ended)
    assert backlog_seconds(100, now) == 20


def test_the_days_before_are_counted_by_channel():
    start = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
    for day in (0, 2, 2):
        message_in("received", subscribe(type="Email"), at=start + timedelta(days=day, hours=5))
    message_in("failed", subscribe(type="SMS"), at=start)
    fold_deltas()
    assert accepted_by_day(start, start + timedelta(days=3)) == {"email": [1, 0, 2]}
