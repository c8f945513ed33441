"""Integrity checks, metrics, admin, retention: what operators see and do."""

from datetime import timedelta

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from config import integrity, sweeping
from config.models import Decision
from messaging.models import Message
from reminders import retention
from reminders.integrity import metrics
from reminders.models import Alarm, AlarmDelivery, DeletedAlarm, UserInfo
from reminders.services import make_due, part_twins, release_claims, reset_counts, send_batch
from reminders.services.claiming import claim_alarms
from tests.messaging.factories import purge_messages
from tests.reminders.factories import NOON, AlarmFactory

pytestmark = pytest.mark.django_db
CHANGELIST = "admin:reminders_alarm_changelist"


def found(now=NOON):
    return {r.name: r.count for r in integrity.report(now) if r.name.startswith("reminders.") and r.count}


def test_a_healthy_database_has_no_findings():
    AlarmFactory(next_alarm_time=NOON)
    send_batch(NOON)
    assert found() == {}


def test_zombies_are_found_and_released():
    AlarmFactory(processed_at=NOON - timedelta(hours=6), next_alarm_time=NOON)
    AlarmFactory(processed_at=NOON - timedelta(hours=6, microseconds=1), next_alarm_time=NOON + timedelta(days=1))
    assert found() == {"reminders.zombies": 1}
    assert integrity.heal("reminders.zombies", NOON) == {"released": 1}
    assert found() == {}


def test_an_alarm_due_for_five_minutes_and_not_taken_is_found_and_sent():
    AlarmFactory(next_alarm_time=NOON - timedelta(minutes=5))
    AlarmFactory(page__user_id="bob", next_alarm_time=NOON - timedelta(minutes=5, microseconds=1))
    AlarmFactory(next_alarm_time=NOON - timedelta(days=1), retry_at=NOON + timedelta(minutes=1))
    AlarmFactory(next_alarm_time=NOON - timedelta(days=2), processed_at=NOON)
    assert found() == {"reminders.due_not_taken": 1}
    assert integrity.heal("reminders.due_not_taken", NOON)["sent"] == 2
    assert found() == {}


def test_a_delivery_without_its_message_is_found():
    AlarmFactory()
    AlarmFactory(page__user_id="bob")
    send_batch(NOON)
    AlarmDelivery.objects.filter(pk=AlarmDelivery.objects.first().pk).update(message_id=None)
    assert found() == {"reminders.delivery_without_message": 1}
    purge_messages()
    assert found() == {"reminders.delivery_without_message": 2}


def test_two_alarms_of_a_user_at_one_time_are_found_and_parted():
    at = NOON + timedelta(days=3)
    AlarmFactory.create_batch(3, next_alarm_time=at)
    AlarmFactory(next_alarm_time=at, page__user_id="bob")
    assert found() == {"reminders.same_time": 3}
    keys = list(Alarm.objects.values_list("pk", flat=True))
    assert part_twins(keys, NOON, random=lambda: 0.0) == 2
    times = sorted(Alarm.objects.filter(user_id="ann").values_list("next_alarm_time", flat=True))
    assert times == [at, at + timedelta(hours=1), at + timedelta(hours=2)]
    assert part_twins(keys, NOON) == 0


def test_twins_are_parted_however_many_there_are(monkeypatch):
    """The first of each pair alone would leave nothing to move."""
    monkeypatch.setattr("reminders.integrity.HEALED_AT_ONCE", 2)
    for user in ("ann", "bob", "eve"):
        AlarmFactory(page__user_id=user, next_alarm_time=NOON + timedelta(days=3))
    for user in ("eve", "bob", "ann"):
        AlarmFactory(page__user_id=user, next_alarm_time=NOON + timedelta(days=3))
    assert [integrity.heal("reminders.same_time", NOON) for _again in range(3)] == [{"parted": 1}] * 3
    assert found() == {}


def test_a_count_below_one_is_found_and_reset_where_the_check_is_gone():
    AlarmFactory(next_alarm_time=NOON)
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE alarm DROP CONSTRAINT alarm_sent_count")
    Alarm.objects.update(sent_count=0)
    assert found() == {"reminders.count_below_one": 1}
    assert integrity.heal("reminders.count_below_one", NOON) == {"reset": 1}
    assert found() == {}


def test_the_metrics_tell_of_the_last_run_and_of_what_waits():
    AlarmFactory.create_batch(3)
    sweeping.run("reminders.send_due_alarms", now=NOON)
    AlarmFactory(next_alarm_time=timezone.now() - timedelta(hours=1))
    samples = {(s.name, *s.labels.values()): s.value for family in metrics() for s in family.samples}
    assert samples["signalbox_reminders_alarms", "sent"] == 3
    assert samples[("signalbox_reminders_batch_size",)] == 3
    assert samples[("signalbox_reminders_oldest_due_age_seconds",)] >= 3600
    assert ("signalbox_reminders_processing_seconds",) in samples


def test_an_alarm_without_a_time_is_as_late_as_it_is_old():
    AlarmFactory(next_alarm_time=None, created_at=timezone.now() - timedelta(hours=2))
    AlarmFactory(next_alarm_time=timezone.now() - timedelta(hours=1))
    samples = {s.name: s.value for family in metrics() for s in family.samples}
    assert 7200 <= samples["signalbox_reminders_oldest_due_age_seconds"] < 10_000


def test_old_tombstones_and_deliveries_are_purged():
    AlarmFactory()
    send_batch(NOON)
    Alarm.objects.all().delete()
    later = timezone.now() + timedelta(days=731)
    assert retention.purge(later, True) == {"alarm_deleted": 1, "alarm_delivery": 1}
    assert retention.purge(later, False) == {"alarm_deleted": 1, "alarm_delivery": 1}
    assert not DeletedAlarm.objects.exists() and not AlarmDelivery.objects.exists()


# --- what people do -----------------------------------------------------------------------------------------------


def test_send_now_makes_an_alarm_due_under_a_new_key():
    alarm = AlarmFactory(next_alarm_time=NOON + timedelta(days=9), sent_count=4)
    claim_alarms(NOON + timedelta(days=10), 1)
    assert make_due([alarm.pk], NOON + timedelta(days=10)) == 1
    row = Alarm.objects.get()
    assert (row.next_alarm_time, row.processed_at, row.occurrence) == (NOON + timedelta(days=10), None, 2)


def test_send_now_costs_the_same_number_of_queries_for_one_and_for_many(django_assert_num_queries):
    alarms = AlarmFactory.create_batch(30, page__title="", page__body="")
    send_batch(NOON)
    with CaptureQueriesContext(connection) as one:
        make_due([alarms[0].pk], NOON)
    with django_assert_num_queries(len(one)):
        assert make_due([alarm.pk for alarm in alarms[1:]], NOON) == 29
    assert set(AlarmDelivery.objects.values_list("state", "reason")) == {("failed", "superseded")}


def test_a_released_claim_is_sent_with_the_same_key():
    alarm = AlarmFactory()
    claim_alarms(NOON, 1)
    assert release_claims([alarm.pk]) == 1
    assert release_claims([alarm.pk]) == 0
    send_batch(NOON)
    assert Message.objects.get().idempotency_key.endswith(":1")


def test_reset_begins_the_distances_again():
    alarm = AlarmFactory(sent_count=7)
    assert reset_counts([alarm.pk]) == 1
    assert Alarm.objects.values_list("sent_count", "next_alarm_time").get() == (1, alarm.next_alarm_time)


@pytest.fixture
def console(client_plain):
    user = User.objects.create_superuser("boss", password="x")
    client_plain.force_login(user, django_settings.AUTHENTICATION_BACKENDS[-1])
    return client_plain


@pytest.fixture
def client_plain():
    from django.test import Client

    return Client()


def test_the_list_shows_the_users_clock_and_who_keeps_an_alarm(console):
    now = timezone.now()
    AlarmFactory(next_alarm_time=NOON, zone="America/New_York", processed_at=now - timedelta(hours=7))
    AlarmFactory(next_alarm_time=None, page__user_id="bob")
    AlarmFactory(next_alarm_time=NOON, page__user_id="eve", retry_at=now + timedelta(hours=1))
    AlarmFactory(next_alarm_time=now + timedelta(days=1), page__user_id="kim", processed_at=now)
    page = console.get(reverse(CHANGELIST)).content.decode()
    for text in ("2026-03-03 22:00 America/New_York", "zombie", "at once", "refused", "processing"):
        assert text in page
    for standing, count in {"zombie": 1, "processing": 1, "refused": 1, "due": 2}.items():
        shown = console.get(reverse(CHANGELIST), {"standing": standing})
        assert shown.context["cl"].result_count == count, standing


@pytest.mark.parametrize(("zone", "sleeps"), [(-3, True), (8, False)])
def test_a_sleeper_has_a_badge(console, zone, sleeps):
    """A zone in which it is now 03:00 or so, or about noon."""
    hour = timezone.now().hour
    offset = ((3 if sleeps else 12) - hour + 12) % 24 - 12
    AlarmFactory(sent_count=2, zone=f"Etc/GMT{-offset:+d}" if offset else "UTC")
    assert ("sleeping" in console.get(reverse(CHANGELIST)).content.decode()) == sleeps


def test_every_admin_page_of_reminders_opens(console):
    AlarmFactory(zone="Europe/Paris")
    send_batch(NOON)
    gone = AlarmFactory(page__user_id="bob")
    Alarm.objects.filter(pk=gone.pk).delete()
    for model in (Alarm, AlarmDelivery, UserInfo, DeletedAlarm, Alarm._meta.get_field("page").related_model):
        name = f"admin:reminders_{model._meta.model_name}"
        assert console.get(reverse(f"{name}_changelist")).status_code == 200
        assert console.get(reverse(f"{name}_change", args=[model.objects.first().pk])).status_code == 200
    assert console.get(reverse("admin:index")).status_code == 200


def act(console, name, alarm, **extra):
    body = {"action": name, "_selected_action": [str(alarm.pk)], "confirmed": "yes", "keys": str(alarm.pk), **extra}
    return console.post(reverse(CHANGELIST), body, follow=True)


def test_the_actions_call_their_services(console):
    alarm = AlarmFactory(sent_count=5, processed_at=NOON, next_alarm_time=NOON)
    act(console, "release_claim", alarm, reason="its worker is gone")
    assert Alarm.objects.get().processed_at is None
    act(console, "reset_count", alarm, reason="asked for")
    assert Alarm.objects.get().sent_count == 1
    act(console, "send_now", alarm)
    assert Alarm.objects.get().next_alarm_time > NOON


def test_a_viewer_sees_no_actions(client_plain):
    user = User.objects.create_user("looker", is_staff=True)
    user.groups.set([Group.objects.get(name="viewer")])
    client_plain.force_login(user, django_settings.AUTHENTICATION_BACKENDS[-1])
    alarm = AlarmFactory(sent_count=5)
    assert "send_now" not in client_plain.get(reverse(CHANGELIST)).content.decode()
    act(client_plain, "reset_count", alarm, reason="x")
    assert Alarm.objects.get().sent_count == 5


def test_a_time_zone_is_checked_in_the_admin_too(console):
    AlarmFactory(zone="Europe/Paris")
    info = UserInfo.objects.get()
    url = reverse("admin:reminders_userinfo_change", args=[info.pk])
    console.post(url, {"timezone": "Mars/Base"})
    assert UserInfo.objects.get().timezone == "Europe/Paris"
    console.post(url, {"timezone": "Asia/Tokyo"})
    assert UserInfo.objects.get().timezone == "Asia/Tokyo"


def test_decisions_stand_in_the_alarms_timeline(console):
    alarm = AlarmFactory(processed_at=NOON - timedelta(hours=7))
    send_batch(NOON)
    assert Decision.objects.exists()
    page = console.get(reverse("admin:reminders_alarm_change", args=[alarm.pk])).content.decode()
    assert "rescue_claimed_alarm" in page and "Occurrence 1" in page
