"""Reminders with real threads and commits: nothing is sent twice, lost, or put at one time."""

import multiprocessing
import os
import signal
from datetime import timedelta
from threading import Event
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.utils import timezone

from config.errors import Missing
from messaging.models import Application, Message
from messaging.providers import reset_providers
from reminders.models import Alarm, AlarmDelivery, DeletedAlarm, Page, UserInfo
from reminders.services import (
    PageChanges,
    PageText,
    Registration,
    pull_changes,
    register_alarm,
    send_batch,
    sync_pages,
)
from reminders.services.claiming import claim_alarms
from reminders.services.recording import record_results
from reminders.services.sending import deliver
from tests.reminders.factories import NOON, AlarmFactory, ApplicationFactory

pytestmark = pytest.mark.django_db(transaction=True)
USERS = 50


@pytest.fixture(autouse=True)
def inbox_only(settings):
    settings.PROVIDERS = {}
    reset_providers()
    yield
    reset_providers()


def make_alarms(count, users=USERS):
    application = ApplicationFactory()
    pages = Page.objects.bulk_create(
        Page(id=f"p{n}", application=application, user_id=f"user-{n % users}", title=f"Page {n}") for n in range(count)
    )
    Alarm.objects.bulk_create(
        Alarm(page=page, application=application, user_id=page.user_id, next_alarm_time=NOON - timedelta(hours=1))
        for page in pages
    )
    return application


def drain():
    total = 0
    while done := send_batch(NOON, 40)["claimed"]:
        total += done
    return total


def test_four_workers_send_each_of_a_thousand_alarms_once(at_once):
    make_alarms(1000)
    assert sum(at_once(drain, drain, drain, drain)) == 1000
    assert Message.objects.count() == Message.objects.values("idempotency_key").distinct().count() == 1000
    assert AlarmDelivery.objects.filter(state="sent").count() == AlarmDelivery.objects.count() == 1000
    assert Alarm.objects.filter(sent_count=2, occurrence=2, processed_at=None).count() == 1000
    assert not Alarm.objects.same_time().exists()


def test_two_workers_never_choose_one_time_for_a_user(at_once):
    make_alarms(60, users=1)
    claims = [claim_alarms(NOON, 30)[0], claim_alarms(NOON, 30)[0]]
    results = [deliver(part, NOON) for part in claims]
    done = at_once(*[lambda part=part: record_results(part, NOON, lambda: 0.3, None) for part in results])
    assert done == [{"sent": 30}, {"sent": 30}]
    assert Alarm.objects.values("next_alarm_time").distinct().count() == 60


def test_a_choice_waits_for_the_other_workers_commit(at_once):
    """One worker stops with its time chosen and not committed; the other must not choose the same."""
    make_alarms(2, users=1)
    first, second = (deliver(claim_alarms(NOON, 1)[0], NOON) for _worker in range(2))
    chosen = Event()

    def slow():
        with transaction.atomic():
            record_results(first, NOON, lambda: 0.0, None)
            chosen.set()

    def quick():
        assert chosen.wait(30)
        return record_results(second, NOON, lambda: 0.0, None)

    at_once(slow, quick)
    assert sorted(Alarm.objects.values_list("next_alarm_time", flat=True)) == [
        NOON + timedelta(days=1),
        NOON + timedelta(days=1, hours=1),
    ]


def test_registers_during_sends_lose_and_double_nothing(at_once):
    application = make_alarms(40)
    later = NOON + timedelta(seconds=1)

    def reregister():
        for n in range(40):
            register_alarm(application, Registration(f"p{n}", f"user-{n % USERS}"), later)

    results = at_once(drain, drain, reregister)
    assert not any(isinstance(result, Exception) for result in results)
    while send_batch(later)["claimed"]:
        pass
    # Each occurrence that was claimed is one message; the last of each alarm was sent after its register.
    assert Alarm.objects.filter(processed_at=None, next_alarm_time__gt=later).count() == 40
    assert (
        AlarmDelivery.objects.filter(state="sent").count() == AlarmDelivery.objects.count() == Message.objects.count()
    )
    assert AlarmDelivery.objects.filter(occurrence=2).count() + AlarmDelivery.objects.filter(occurrence=3).count() >= 40
    assert not AlarmDelivery.objects.filter(message_id=None).exists()


def test_pages_deleted_during_sends_stay_deleted(at_once):
    application = make_alarms(100, users=1)

    def delete():
        for start in range(0, 100, 10):
            ids = [f"p{n}" for n in range(start, start + 10)]
            sync_pages(application, PageChanges("user-0", deleted=ids))

    results = at_once(drain, drain, delete)
    assert not any(isinstance(result, Exception) for result in results)
    assert not Alarm.objects.exists()
    assert DeletedAlarm.objects.count() == 100
    assert not AlarmDelivery.objects.exclude(state="sent").exclude(state="failed").exists()
    assert Message.objects.count() == AlarmDelivery.objects.filter(state="sent").count()


def test_zones_changed_during_sends_disturb_nothing(at_once):
    application = make_alarms(100)

    def move():
        for n in range(100):
            zone = ("Europe/Paris", "America/New_York")[n % 2]
            register_alarm(application, Registration(f"new-{n}", f"user-{n % USERS}", title="t", timezone=zone), NOON)

    results = at_once(drain, drain, move)
    assert not any(isinstance(result, Exception) for result in results)
    drain()
    assert Alarm.objects.filter(sent_count=2, processed_at=None).count() == 200
    assert UserInfo.objects.filter(timezone="Asia/Seoul").count() == 0
    assert not Alarm.objects.same_time().exists()


def somebody_waits():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # within a transaction the view would not change
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return cursor.fetchone()[0]


def test_a_user_made_while_the_time_is_chosen_counts_with_its_zone(at_once):
    application = make_alarms(1, users=1)
    results = deliver(claim_alarms(NOON, 1)[0], NOON)
    made = Event()

    def register_elsewhere():
        with transaction.atomic():
            UserInfo.objects.create(application=application, user_id="user-0", timezone="America/New_York")
            made.set()
            while not somebody_waits():
                pass

    def record():
        assert made.wait(30)
        return record_results(results, NOON, lambda: 0.0, None)

    assert at_once(register_elsewhere, record)[1] == {"sent": 1}
    # 03:00 UTC is 22:00 in New York: 07:00 there is 12:00 UTC.
    assert Alarm.objects.get().next_alarm_time == NOON + timedelta(days=1, hours=9)


def test_one_page_registered_by_eight_at_once_has_one_alarm(at_once):
    application = ApplicationFactory()
    results = at_once(*[lambda: register_alarm(application, Registration("p", "ann", title="t"), NOON)] * 8)
    assert {alarm.pk for alarm in results} == {Alarm.objects.get().pk}
    assert Alarm.objects.get().occurrence == 8


def test_two_users_after_the_same_new_page_one_gets_404(at_once):
    application = ApplicationFactory()
    results = at_once(
        *[
            lambda user=user: register_alarm(application, Registration("p", user, title=user), NOON)
            for user in ("ann", "bob")
        ]
    )
    assert sorted(type(result) is Alarm for result in results) == [False, True]
    assert isinstance(next(result for result in results if not isinstance(result, Alarm)), Missing)
    assert Page.objects.get().user_id == Alarm.objects.get().user_id == Page.objects.get().title


def test_two_clients_syncing_the_same_pages_do_not_deadlock(at_once):
    application = ApplicationFactory()
    items = [PageText(f"p{n}", "t", "b") for n in range(100)]
    results = at_once(
        lambda: sync_pages(application, PageChanges("ann", created=items)),
        lambda: sync_pages(application, PageChanges("ann", created=items[::-1])),
    )
    assert sorted(result["created"] for result in results) == [0, 100]


def test_deleting_pages_waits_for_their_alarms_in_the_order_of_a_batch(at_once):
    """By page, and where they lie in the table, the alarm that a batch locks last comes first."""
    last = AlarmFactory(pk=UUID(int=2), page__id="a")
    first = AlarmFactory(pk=UUID(int=1), page__id="b")
    locked = Event()

    def batch():
        with transaction.atomic():
            Alarm.objects.select_for_update().get(pk=first.pk)
            locked.set()
            while not somebody_waits():
                pass
            Alarm.objects.select_for_update().get(pk=last.pk)

    def delete():
        assert locked.wait(30)
        return sync_pages(first.application, PageChanges("ann", deleted=["a", "b"]))

    assert at_once(batch, delete) == [None, {"created": 0, "updated": 0, "deleted": 2}]


# --- kill -9 ------------------------------------------------------------------------------------------------------


def work_until(step):
    """A worker's steps, ended by the kernel after `step`."""
    claims, _deferred = claim_alarms(NOON, 100)
    if step != "claim":
        results = deliver(claims, NOON)
    if step == "record":
        with transaction.atomic():
            record_results(results, NOON, lambda: 0.0, None)
            os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", ["claim", "send", "record"])
def test_a_worker_killed_after_any_step_loses_and_doubles_nothing(step):
    make_alarms(20)
    connection.close()
    worker = multiprocessing.get_context("fork").Process(target=work_until, args=(step,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert Message.objects.count() == (0 if step == "claim" else 20)
    assert Alarm.objects.filter(processed_at=NOON, sent_count=1).count() == 20
    assert send_batch(NOON + timedelta(hours=6))["claimed"] == 0
    rescue = NOON + timedelta(hours=6, microseconds=1)
    assert send_batch(rescue)["sent"] == 20
    assert Message.objects.values("idempotency_key").distinct().count() == Message.objects.count() == 20
    assert Alarm.objects.filter(processed_at=None, sent_count=2, occurrence=2).count() == 20
    assert AlarmDelivery.objects.filter(state="sent").count() == AlarmDelivery.objects.count() == 20


# --- until --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["update", "delete", "insert"])
def test_until_never_passes_a_change_that_is_not_committed(run_in_thread, how):
    changing, other = AlarmFactory(), AlarmFactory()
    application = Application.objects.get()
    with transaction.atomic():
        if how == "update":
            Alarm.objects.filter(pk=changing.pk).update(sent_count=5)
        elif how == "delete":
            Alarm.objects.filter(pk=changing.pk).delete()
        else:
            changing = AlarmFactory()
        # Meanwhile somebody else changes, commits and pulls.
        run_in_thread(lambda: Alarm.objects.filter(pk=other.pk).update(sent_count=9))
        first = run_in_thread(lambda: pull_changes([application], None, None))
        assert changing.pk not in [alarm.pk for alarm in first.changed if alarm.sent_count == 5]
    second = pull_changes([application], None, first.until)
    if how == "delete":
        assert changing.pk in second.deleted
    else:
        assert changing.pk in [alarm.pk for alarm in second.changed]
    third = pull_changes([application], None, second.until)
    assert (third.changed, third.deleted) == ([], [])
    assert third.until > first.until


def test_a_claim_held_open_does_not_hold_until_back(run_in_thread):
    AlarmFactory()
    with transaction.atomic():
        claim_alarms(NOON, 1)
        before = timezone.now()
        assert run_in_thread(lambda: pull_changes(None, None, None)).until >= before
    assert connection.in_atomic_block is False
