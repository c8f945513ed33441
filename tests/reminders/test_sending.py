"""Claiming, sending and recording of due alarms."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from structlog.testing import capture_logs

from config import sweeping
from config.models import Decision
from messaging.models import Application, Message, Subscription, Suppression
from messaging.services import SubscriptionSpec, suppress, upsert_subscriptions
from reminders.models import Alarm, AlarmDelivery, Page, UserInfo
from reminders.services import Registration, register_alarm, release_claims, send_batch
from reminders.services.claiming import claim_alarms
from reminders.services.recording import record_results
from reminders.services.sending import deliver
from tests.reminders.factories import NOON, AlarmFactory, PageFactory

pytestmark = pytest.mark.django_db
SIX_HOURS = timedelta(hours=6)
MICROSECOND = timedelta(microseconds=1)


def counts(**given):
    return {"claimed": 0, "sent": 0, "failed": 0, "deferred": 0, "skipped": 0} | given


def only():
    return Alarm.objects.get()


def test_sends_a_due_alarm_and_moves_it_on():
    alarm = AlarmFactory()
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    message = Message.objects.get()
    assert (message.status, message.kind, message.channel_type) == ("pending", "notice", "in_app")
    assert (message.title, message.body) == ("Water the plants", "All of them")
    assert message.idempotency_key == f"reminder:{alarm.pk}:1"
    assert message.data["layout_type"] == "banner"
    assert message.created_at == NOON
    row = only()
    assert row.next_alarm_time == NOON + timedelta(days=1)
    assert (row.sent_count, row.occurrence, row.processed_at) == (2, 2, None)
    assert row.last_notification_id == message.pk
    assert (row.title, row.body) == ("Water the plants", "All of them")
    delivery = AlarmDelivery.objects.get()
    assert (delivery.alarm_id, delivery.occurrence) == (alarm.pk, 1)
    assert (delivery.state, delivery.message_id) == ("sent", message.pk)
    assert send_batch(NOON) == counts()


def test_the_count_grows_beyond_nine_while_the_distance_does_not():
    AlarmFactory(sent_count=12)
    send_batch(NOON)
    assert (only().sent_count, only().next_alarm_time) == (13, NOON + timedelta(days=256))


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"next_alarm_time": NOON}, True),
        ({"next_alarm_time": NOON + MICROSECOND}, False),
        ({"next_alarm_time": None}, True),
        ({"processed_at": NOON - SIX_HOURS}, False),
        ({"processed_at": NOON - SIX_HOURS - MICROSECOND}, True),
        ({"processed_at": NOON}, False),
        ({"retry_at": NOON + MICROSECOND}, False),
        ({"retry_at": NOON}, True),
    ],
)
def test_takes_what_is_due_and_free(fields, taken):
    AlarmFactory(**fields)
    assert Alarm.objects.takeable(NOON).exists() == taken
    assert send_batch(NOON)["claimed"] == taken


def test_takes_the_longest_due_first_and_those_without_a_time_last():
    timeless = AlarmFactory(next_alarm_time=None)
    late = [AlarmFactory(next_alarm_time=NOON - timedelta(hours=hours)) for hours in (1, 3, 2)]
    taken = []
    while (sent := claim_alarms(NOON, 1)[0]) and len(taken) < 5:
        taken.append(sent[0].alarm_id)
    assert taken == [late[1].pk, late[2].pk, late[0].pk, timeless.pk]


def test_takes_no_more_than_the_limit():
    AlarmFactory.create_batch(5)
    assert send_batch(NOON, 3)["claimed"] == 3
    assert send_batch(NOON, 3)["claimed"] == 2


def test_a_mere_claim_is_no_change():
    before = AlarmFactory()
    before.refresh_from_db()
    claim_alarms(NOON, 1)
    assert only().processed_at == NOON
    assert only().updated_at == before.updated_at


def test_a_send_is_a_change():
    AlarmFactory()
    before = only().updated_at
    send_batch(NOON)
    assert only().updated_at > before


# --- a worker that dies -------------------------------------------------------------------------------------------


def test_killed_between_send_and_record_the_rescue_makes_no_second_message():
    AlarmFactory()
    sending, _deferred = claim_alarms(NOON, 10)
    deliver(sending, NOON)  # and the worker is gone
    assert Message.objects.count() == 1
    assert send_batch(NOON + SIX_HOURS) == counts()
    later = NOON + SIX_HOURS + MICROSECOND
    assert send_batch(later) == counts(claimed=1, sent=1)
    assert Message.objects.count() == AlarmDelivery.objects.count() == 1
    row = only()
    assert (row.sent_count, row.occurrence, row.processed_at) == (2, 2, None)
    assert row.last_notification_id == Message.objects.get().pk == AlarmDelivery.objects.get().message_id
    assert AlarmDelivery.objects.get().state == "sent"
    assert Decision.objects.get().rule == "rescue_claimed_alarm"


def test_killed_before_the_send_the_rescue_sends_with_the_same_key():
    alarm = AlarmFactory()
    claim_alarms(NOON, 10)
    assert send_batch(NOON + SIX_HOURS + MICROSECOND)["sent"] == 1
    assert Message.objects.get().idempotency_key == f"reminder:{alarm.pk}:1"
    assert AlarmDelivery.objects.get().state == "sent"


def test_a_zombie_without_a_delivery_gets_one():
    AlarmFactory(processed_at=NOON - timedelta(hours=7), occurrence=4)
    send_batch(NOON)
    assert AlarmDelivery.objects.get().occurrence == 4


def opt_out(application):
    Subscription.objects.update(status=-2)


def take_the_words(application):
    Page.objects.update(title="", body="")


@pytest.mark.parametrize("meanwhile", [opt_out, take_the_words])
def test_what_a_dead_worker_sent_is_sent_even_if_it_would_be_refused_by_now(application, meanwhile):
    AlarmFactory(title="Water the plants")
    sending, _deferred = claim_alarms(NOON, 10)
    deliver(sending, NOON)
    meanwhile(application)
    assert send_batch(NOON + SIX_HOURS + MICROSECOND) == counts(claimed=1, sent=1)
    row, message = only(), Message.objects.get()
    assert (row.sent_count, row.last_notification_id, row.retry_at) == (2, message.pk, None)
    assert row.title == "Water the plants"
    assert (AlarmDelivery.objects.get().state, AlarmDelivery.objects.get().message_id) == ("sent", message.pk)


def test_a_slow_worker_taken_for_dead_still_ends_its_delivery_sent(application):
    alarm = AlarmFactory(page__id="p")
    sending, _deferred = claim_alarms(NOON, 10)
    release_claims([alarm.pk])
    register_alarm(application, Registration("p", "ann"), NOON + timedelta(seconds=1))
    assert AlarmDelivery.objects.get().reason == "superseded"
    assert record_results(deliver(sending, NOON), NOON, lambda: 0.0, None) == {"skipped": 1}
    delivery = AlarmDelivery.objects.get()
    assert (delivery.state, delivery.message_id, delivery.reason) == ("sent", Message.objects.get().pk, "")


def test_a_worker_that_comes_back_after_its_rescue_changes_nothing():
    AlarmFactory()
    sending, _deferred = claim_alarms(NOON, 10)
    results = deliver(sending, NOON)
    send_batch(NOON + SIX_HOURS + MICROSECOND)
    rescued = Alarm.objects.values().get()
    assert record_results(results, NOON, lambda: 0.0, None) == {"skipped": 1}
    assert Alarm.objects.values().get() == rescued
    assert AlarmDelivery.objects.get().state == "sent"


def test_a_claimed_delivery_whose_alarm_is_gone_is_settled_by_the_sweep():
    lost, sent = AlarmFactory(), AlarmFactory()
    sending, _deferred = claim_alarms(NOON, 10)
    deliver([claim for claim in sending if claim.alarm_id == sent.pk], NOON)
    Alarm.objects.all().delete()
    young = sweeping.run("reminders.send_due_alarms", now=NOON + SIX_HOURS)
    assert "settled" not in young["counts"]
    ripe = sweeping.run("reminders.send_due_alarms", now=NOON + SIX_HOURS + MICROSECOND)
    assert ripe["counts"]["settled"] == 2
    ended = {row.alarm_id: row for row in AlarmDelivery.objects.all()}
    assert (ended[lost.pk].state, ended[lost.pk].reason) == ("failed", "superseded")
    assert (ended[sent.pk].state, ended[sent.pk].message_id) == ("sent", Message.objects.get().pk)
    again = sweeping.run("reminders.send_due_alarms", now=NOON + SIX_HOURS + MICROSECOND)
    assert "settled" not in again["counts"]


@pytest.mark.parametrize("sent", [True, False])
def test_a_delivery_opened_by_hand_is_settled_like_any_other(application, sent):
    alarm = AlarmFactory(page__id="p", processed_at=NOON - timedelta(hours=7))
    if sent:
        claim = claim_alarms(NOON, 1)[0]
        deliver(claim, NOON)
        Alarm.objects.update(processed_at=NOON - timedelta(hours=7))
        AlarmDelivery.objects.all().delete()
    open_by_hand(alarm.pk, 1)
    register_alarm(application, Registration("p", "ann"), NOON)
    delivery = AlarmDelivery.objects.get()
    assert (delivery.state, delivery.reason) == (("sent", "") if sent else ("failed", "superseded"))


def test_a_rescue_keeps_the_key_of_a_delivery_opened_by_hand(application):
    alarm = AlarmFactory(page__id="p", sent_count=5, processed_at=NOON - timedelta(hours=7))
    open_by_hand(alarm.pk, 4)
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    assert Message.objects.get().idempotency_key == f"reminder:{alarm.pk}:4"
    assert AlarmDelivery.objects.get().state == "sent"
    assert only().occurrence == 5


def test_an_alarm_that_comes_back_under_its_old_id_does_not_use_its_keys_again():
    alarm = AlarmFactory()
    send_batch(NOON)
    key, page = alarm.pk, alarm.page
    alarm.delete()
    AlarmFactory(pk=key, page=page)
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    assert {row.idempotency_key for row in Message.objects.all()} == {f"reminder:{key}:1", f"reminder:{key}:2"}
    assert AlarmDelivery.objects.filter(state="sent").count() == 2


@pytest.mark.parametrize("claimed_at", [None, NOON - timedelta(hours=7)])
def test_what_a_person_wrote_down_as_sent_is_followed_by_the_next(claimed_at):
    alarm = AlarmFactory(sent_count=4, processed_at=claimed_at)
    for occurrence in (1, 2, 3):
        open_by_hand(alarm.pk, occurrence)
    AlarmDelivery.objects.update(state="sent", message_id=UUID(int=1))
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    assert Message.objects.get().idempotency_key == f"reminder:{alarm.pk}:4"
    assert AlarmDelivery.objects.get(occurrence=4).message_id == Message.objects.get().pk
    assert (only().occurrence, only().sent_count) == (5, 5)


def test_what_was_sent_under_a_released_claim_is_only_recorded():
    alarm = AlarmFactory()
    sending, _deferred = claim_alarms(NOON, 10)
    results = deliver(sending, NOON)
    release_claims([alarm.pk])
    assert record_results(results, NOON, lambda: 0.0, None) == {"skipped": 1}
    assert AlarmDelivery.objects.get().state == "sent"
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    assert Message.objects.count() == AlarmDelivery.objects.count() == 1
    assert (only().occurrence, only().sent_count, only().last_notification_id) == (2, 2, Message.objects.get().pk)


def test_a_zombie_inserted_after_its_delivery_keeps_its_key():
    page, key = PageFactory(), UUID(int=7)
    open_by_hand(key, 3)
    AlarmFactory(pk=key, page=page, processed_at=NOON - timedelta(hours=7))
    assert send_batch(NOON) == counts(claimed=1, sent=1)
    assert AlarmDelivery.objects.get().state == "sent"


def open_by_hand(alarm_id, occurrence):
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO alarm_delivery (alarm_id, occurrence, idempotency_key, state) VALUES (%s, %s, %s, 'claimed')",
            [alarm_id, occurrence, f"reminder:{alarm_id}:{occurrence}"],
        )


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_refusal_keeps_count_and_time_and_backs_off():
    AlarmFactory(page__title="", page__body="<p></p>")
    before, now = only(), NOON
    for minutes in (1, 2, 4, 8, 16, 32, 60, 60):
        assert send_batch(now) == counts(claimed=1, failed=1)
        row = only()
        assert row.retry_at == now + timedelta(minutes=minutes)
        assert (row.next_alarm_time, row.sent_count, row.processed_at) == (before.next_alarm_time, 1, None)
        assert row.updated_at == before.updated_at
        assert send_batch(row.retry_at - MICROSECOND) == counts()
        now = row.retry_at
    delivery = AlarmDelivery.objects.get()
    assert (delivery.state, delivery.reason, delivery.occurrence) == ("failed", "empty", 1)
    Page.objects.update(title="Words again")
    assert send_batch(now) == counts(claimed=1, sent=1)
    assert (only().retry_at, only().refusals) == (None, 0)
    assert AlarmDelivery.objects.get().state == "sent"


def test_one_bad_alarm_does_not_stop_the_batch(settings):
    AlarmFactory(page__title="", page__body="")
    AlarmFactory(page__user_id="bob", zone="Mars/Base")
    AlarmFactory(page__user_id="eve")
    assert send_batch(NOON) == counts(claimed=3, sent=2, failed=1)


def test_a_draft_the_database_refuses_is_found_and_the_others_are_sent():
    bad = AlarmFactory.create_batch(5)[3]
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'data_exception'; END $$"
        )
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON messages FOR EACH ROW"
            f" WHEN (NEW.data ->> 'alarm_id' = '{bad.pk}') EXECUTE FUNCTION refuse()"
        )
    assert send_batch(NOON) == counts(claimed=5, sent=4, failed=1)
    assert AlarmDelivery.objects.get(alarm_id=bad.pk).reason == "database_error"


def test_an_alarm_that_cannot_be_recorded_is_found_and_the_others_are_recorded():
    bad = AlarmFactory.create_batch(5)[3]
    Alarm.objects.filter(pk=bad.pk).update(sent_count=2**31 - 1)
    assert send_batch(NOON) == counts(claimed=5, sent=4, failed=1)
    assert Alarm.objects.filter(sent_count=2, processed_at=None).count() == 4
    # As after a crash: the claim stays, and its rescue makes no second message.
    assert Alarm.objects.get(pk=bad.pk).processed_at == NOON
    assert Message.objects.count() == 5


def test_a_page_whose_number_python_cannot_read_stops_nobody():
    AlarmFactory(page__body="&#" + "9" * 5000 + ";")
    AlarmFactory(page__user_id="bob")
    assert send_batch(NOON) == counts(claimed=2, sent=2)


def test_an_alarm_that_cannot_be_handed_over_is_found_and_the_others_are_sent(monkeypatch):
    """As the standard library did for a number of 5,000 digits."""

    def strict(text):
        if "boom" in text:
            raise ValueError
        return text

    monkeypatch.setattr("reminders.services.texts.unescape", strict)
    AlarmFactory.create_batch(2)
    bad = AlarmFactory(page__body="boom")
    AlarmFactory.create_batch(2)
    assert send_batch(NOON) == counts(claimed=5, sent=4, failed=1)
    row = Alarm.objects.get(pk=bad.pk)
    assert (row.processed_at, row.sent_count, row.retry_at) == (None, 1, NOON + timedelta(minutes=1))
    assert AlarmDelivery.objects.get(alarm_id=row.pk).reason == "error"
    assert Message.objects.count() == 4


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("alarm", name) for name in ("next_alarm_time", "processed_at", "retry_at", "created_at", "updated_at")),
        *(("pages", name) for name in ("deleted_at", "created_at", "updated_at")),
        *(("alarm_delivery", name) for name in ("claimed_at", "ended_at")),
        ("alarm_deleted", "deleted_at"),
    ],
)
@pytest.mark.parametrize("time", ["-infinity", "infinity", "0044-03-15 BC", "12026-01-01"])
def test_the_database_refuses_a_time_that_nobody_could_read(table, column, time):
    AlarmFactory()
    AlarmFactory().delete()
    send_batch(NOON)
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = %s", [time])


def test_an_application_over_its_quota_is_refused():
    AlarmFactory.create_batch(3)
    Application.objects.update(daily_quota=2)
    assert send_batch(NOON) == counts(claimed=3, sent=2, failed=1)
    assert AlarmDelivery.objects.get(state="failed").reason == "quota_exceeded"


@pytest.mark.parametrize("zone", ["Nowhere/Land", ""])
def test_a_broken_zone_reads_as_seoul_and_is_told(zone):
    alarm = AlarmFactory(next_alarm_time=NOON, sent_count=2)
    UserInfo.objects.create(application=alarm.application, user_id="ann", timezone=zone)
    night = datetime(2026, 3, 4, 14, 0, tzinfo=UTC)  # 23:00 in Seoul
    with capture_logs() as logs:
        assert send_batch(night)["deferred"] == 1
    assert only().next_alarm_time == datetime(2026, 3, 4, 22, 0, tzinfo=UTC)
    assert {"event": "unknown_timezone", "log_level": "warning", "timezone": zone} in logs


@pytest.fixture
def reported(monkeypatch):
    """What Sentry would hear of."""
    told = []
    monkeypatch.setattr("sentry_sdk.capture_message", lambda text, **_rest: told.append(text))
    return told


def test_what_goes_wrong_is_reported(application, reported):
    alarm = AlarmFactory(page__id="p", sent_count=2**31 - 1)
    send_batch(NOON)
    assert reported == ["alarm: batch_update_failed"]
    Alarm.objects.filter(pk=alarm.pk).update(sent_count=1, processed_at=None)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE alarm_delivery RENAME TO away")
    with pytest.raises(DatabaseError), transaction.atomic():
        send_batch(NOON)
    assert reported[1:] == ["alarm: database_error"]


# --- the night ----------------------------------------------------------------------------------------------------

ELEVEN_PM = datetime(2026, 3, 4, 14, 0, tzinfo=UTC)
SEVEN_AM = datetime(2026, 3, 4, 22, 0, tzinfo=UTC)


def test_a_late_alarm_found_at_night_waits_for_the_morning():
    AlarmFactory(sent_count=2)
    assert send_batch(ELEVEN_PM) == counts(claimed=1, deferred=1)
    row = only()
    assert (row.next_alarm_time, row.sent_count, row.processed_at, row.occurrence) == (SEVEN_AM, 2, None, 1)
    assert not Message.objects.exists() and not AlarmDelivery.objects.exists()
    assert Decision.objects.get().rule == "defer_to_morning"
    assert send_batch(SEVEN_AM) == counts(claimed=1, sent=1)


def test_a_first_send_goes_at_night():
    AlarmFactory(sent_count=1)
    assert send_batch(ELEVEN_PM) == counts(claimed=1, sent=1)
    # 23:00 a day on is night again.
    assert only().next_alarm_time == SEVEN_AM + timedelta(days=1)


def test_an_alarm_registered_again_at_night_waits_unless_reset(application):
    AlarmFactory(sent_count=3, page__id="p")
    register_alarm(application, Registration("p", "ann"), ELEVEN_PM)
    assert send_batch(ELEVEN_PM) == counts(claimed=1, deferred=1)
    register_alarm(application, Registration("p", "ann", reset=True), ELEVEN_PM)
    assert send_batch(ELEVEN_PM) == counts(claimed=1, sent=1)


def test_the_morning_is_shared_out_when_taken():
    AlarmFactory.create_batch(3, sent_count=2)
    values = iter([0.0, 0.05, 0.05])
    send_batch(ELEVEN_PM, random=lambda: next(values))
    times = sorted(Alarm.objects.values_list("next_alarm_time", flat=True))
    assert times == [SEVEN_AM, SEVEN_AM + timedelta(hours=1), SEVEN_AM + timedelta(hours=2)]


def test_a_rescued_alarm_deferred_by_the_night_keeps_its_key():
    AlarmFactory(sent_count=2)
    sending, _deferred = claim_alarms(NOON, 10)
    deliver(sending, NOON)
    late = ELEVEN_PM + timedelta(days=1)
    assert send_batch(late)["deferred"] == 1
    assert AlarmDelivery.objects.get().state == "unknown"
    assert send_batch(SEVEN_AM + timedelta(days=1))["sent"] == 1
    assert Message.objects.count() == 1
    assert AlarmDelivery.objects.get().state == "sent"


# --- collisions ---------------------------------------------------------------------------------------------------


def test_a_users_alarms_never_share_a_time():
    AlarmFactory.create_batch(30, page__user_id="ann")
    send_batch(NOON)
    assert Alarm.objects.values("next_alarm_time").distinct().count() == 30
    assert not Alarm.objects.same_time().exists()


def test_two_users_and_two_applications_may_share_a_time():
    AlarmFactory(page__user_id="ann")
    AlarmFactory(page__user_id="bob")
    AlarmFactory(page__user_id="ann", page__application__slug="other")
    send_batch(NOON)
    assert Alarm.objects.values("next_alarm_time").distinct().count() == 1


def test_an_alarm_moves_out_of_the_way_of_one_that_is_there():
    AlarmFactory(next_alarm_time=NOON + timedelta(days=1))
    due = AlarmFactory()
    send_batch(NOON, random=lambda: 0.1)  # 3 hours
    due.refresh_from_db()
    assert due.next_alarm_time == NOON + timedelta(days=1, hours=3)


# --- channels -----------------------------------------------------------------------------------------------------


def subscribe(application, kind, token, user="ann", **fields):
    [row] = upsert_subscriptions(application, [SubscriptionSpec(kind, token, user_id=user)])
    Subscription.objects.filter(pk=row.pk).update(**fields)
    return row


def test_push_comes_before_the_inbox_and_the_inbox_before_mail(application, providers):
    providers(iOSPush="null", AndroidPush="null", Email="null")
    rows = [
        subscribe(application, "Email", "ann@example.org"),
        subscribe(application, "InAppMessage", "ann"),
        subscribe(application, "AndroidPush", "token"),
    ]
    chosen = []
    for row in reversed(rows):
        AlarmFactory()
        send_batch(NOON)
        chosen.append(Message.objects.order_by("-id").first().subscription_id)
        Subscription.objects.filter(pk=row.pk).update(status=-10)
    assert chosen == [row.pk for row in reversed(rows)]


def test_a_channel_without_a_provider_is_passed_over(application, providers):
    subscribe(application, "iOSPush", "token")
    AlarmFactory()
    send_batch(NOON)
    assert Message.objects.get().channel_type == "in_app"
    inbox = Subscription.objects.get(type="InAppMessage")
    assert (inbox.user_id, inbox.token, inbox.status) == ("ann", "ann", 1)


@pytest.mark.parametrize("user", ["홍길동", "two words", "x" * 255])
def test_an_inbox_is_made_for_any_user(user):
    AlarmFactory(page__user_id=user)
    assert send_batch(NOON)["sent"] == 1
    assert Message.objects.get().user_id == user


@pytest.mark.parametrize("first", ["ann", "ann "])
def test_users_whose_names_make_one_inbox_never_read_each_others_pages(first):
    """An address is trimmed, a user's name is not."""
    second = "ann " if first == "ann" else "ann"
    pages = {user: AlarmFactory(page__user_id=user, page__body=f"of {user}.").page_id for user in (first, second)}
    assert send_batch(NOON) == counts(claimed=2, sent=1, failed=1)
    message = Message.objects.get()
    assert message.data["page_id"] == pages[message.user_id]


def test_a_batch_reads_its_recipients_once(application):
    subscribe(application, "InAppMessage", "ann")
    AlarmFactory.create_batch(3)
    with CaptureQueriesContext(connection) as caught:
        assert send_batch(NOON)["sent"] == 3
    assert sum("token_encrypted" in query["sql"] for query in caught) == 1


def test_who_opted_out_of_everything_is_refused(application):
    subscribe(application, "InAppMessage", "ann", status=-2)
    AlarmFactory()
    assert send_batch(NOON) == counts(claimed=1, failed=1)
    assert AlarmDelivery.objects.get().reason == "unsubscribed"
    assert Subscription.objects.count() == 1


def test_a_suppressed_address_is_passed_over_and_refused_when_alone(application, providers):
    providers(Email="null")
    subscribe(application, "Email", "ann@example.org")
    suppress(application, [("email", "ann@example.org", "complaint", {})], now=NOON)
    AlarmFactory()
    assert send_batch(NOON) == counts(claimed=1, failed=1)
    assert AlarmDelivery.objects.get().reason == "suppressed"
    subscribe(application, "InAppMessage", "ann")
    assert send_batch(NOON + timedelta(minutes=1))["sent"] == 1
    assert Suppression.objects.count() == 1


# --- register, delete and zone during a send ----------------------------------------------------------------------


def test_a_send_overtaken_by_register_changes_nothing_but_its_delivery(application):
    alarm = AlarmFactory(page__id="p", sent_count=3)
    sending, _deferred = claim_alarms(NOON, 10)
    results = deliver(sending, NOON)
    later = NOON + timedelta(seconds=5)
    register_alarm(application, Registration("p", "ann"), later)
    assert record_results(results, NOON, lambda: 0.0, None) == {"skipped": 1}
    row = only()
    assert (row.next_alarm_time, row.processed_at, row.sent_count, row.occurrence) == (later, None, 3, 2)
    assert row.last_notification_id is None
    assert AlarmDelivery.objects.get(occurrence=1).state == "sent"
    assert send_batch(later)["sent"] == 1
    assert set(Message.objects.values_list("idempotency_key", flat=True)) == {
        f"reminder:{alarm.pk}:1",
        f"reminder:{alarm.pk}:2",
    }


def test_register_gives_up_what_a_dead_worker_left(application):
    AlarmFactory(page__id="p")
    claim_alarms(NOON, 10)
    register_alarm(application, Registration("p", "ann"), NOON + SIX_HOURS + MICROSECOND)
    delivery = AlarmDelivery.objects.get()
    assert (delivery.state, delivery.reason) == ("failed", "superseded")


def test_register_clears_the_wait_after_a_refusal(application):
    AlarmFactory(page__id="p", page__title="", page__body="")
    send_batch(NOON)
    register_alarm(application, Registration("p", "ann", title="Words"), NOON)
    assert (only().retry_at, only().refusals, only().occurrence) == (None, 0, 2)
    assert send_batch(NOON)["sent"] == 1
    assert AlarmDelivery.objects.get(occurrence=1).reason == "superseded"


def test_an_alarm_deleted_during_a_send_is_skipped_and_its_delivery_ends_sent():
    AlarmFactory()
    sending, _deferred = claim_alarms(NOON, 10)
    results = deliver(sending, NOON)
    Page.objects.all().delete()
    assert record_results(results, NOON, lambda: 0.0, None) == {"skipped": 1}
    assert not Alarm.objects.exists()
    assert AlarmDelivery.objects.get().state == "sent"


def test_the_zone_that_counts_is_the_one_when_the_time_is_chosen():
    AlarmFactory(zone="Asia/Seoul")
    sending, _deferred = claim_alarms(NOON, 10)
    results = deliver(sending, NOON)
    UserInfo.objects.update(timezone="America/New_York")
    record_results(results, NOON, lambda: 0.0, None)
    # 03:00 UTC is 22:00 in New York: 07:00 there is 12:00 UTC.
    assert only().next_alarm_time == datetime(2026, 3, 5, 12, 0, tzinfo=UTC)


# --- the sweep ----------------------------------------------------------------------------------------------------


def test_the_sweep_repeats_batches_until_nothing_is_due():
    AlarmFactory.create_batch(230)
    AlarmFactory(next_alarm_time=NOON + MICROSECOND)
    ran = sweeping.run("reminders.send_due_alarms", now=NOON)
    assert ran["error"] is None
    assert ran["counts"]["sent"] == 230
    assert ran["counts"]["batches"] == 3
    assert Message.objects.count() == 230
    again = sweeping.run("reminders.send_due_alarms", now=NOON)
    assert not any(again["counts"].values())


def test_a_dry_run_tells_and_changes_nothing():
    AlarmFactory.create_batch(130)
    before = list(Alarm.objects.order_by("pk").values())
    ran = sweeping.run("reminders.send_due_alarms", now=NOON, dry_run=True)
    assert ran["counts"]["sent"] == 130
    assert list(Alarm.objects.order_by("pk").values()) == before
    assert not Message.objects.exists() and not AlarmDelivery.objects.exists()


def queries_of_a_batch(size):
    AlarmFactory.create_batch(size, page__user_id=f"user-{size}")
    with CaptureQueriesContext(
        connection,
    ) as caught:
        assert send_batch(NOON, 1000)["sent"] == size
    return len(caught)


def test_a_batch_costs_the_same_number_of_queries_whatever_its_size():
    queries_of_a_batch(1)  # the first builds caches
    assert queries_of_a_batch(2) == queries_of_a_batch(150)


def test_a_long_page_is_read_whole_only_when_its_beginning_does_not_tell():
    AlarmFactory(page__body="<style>" + "x" * 30_000 + "</style>word")
    AlarmFactory(page__user_id="bob", page__body="<b>y</b>" * 20_000)
    send_batch(NOON)
    assert sorted(Message.objects.values_list("body", flat=True)) == ["word", "y" * 2000]


def test_a_message_id_is_a_messages_id():
    AlarmFactory()
    send_batch(NOON)
    assert isinstance(only().last_notification_id, UUID)
