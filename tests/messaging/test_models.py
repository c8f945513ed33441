"""What the database itself refuses: states, timestamps, history."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import ProtectedError
from django_fsm import TransitionNotAllowed

from messaging.models import Message, MessageEvent, MessageTemplate, Subscription
from messaging.services import suppress
from tests.messaging.factories import NOW, message, message_in, path_to, purge_messages, subscribe

pytestmark = pytest.mark.django_db
STATES = ["pending", "successful", "received", "converted", "failed", "errored"]
LEGAL = {
    ("pending", "successful"),
    ("pending", "failed"),
    ("successful", "failed"),
    ("errored", "failed"),
    ("pending", "errored"),
    ("errored", "pending"),
    ("successful", "received"),
    ("received", "converted"),
}
COLUMNS = {
    "pending": {"sent_at": None, "received_at": None, "failed_at": None, "error_details": {}, "next_attempt_at": None},
    "successful": {"sent_at": NOW, "received_at": None, "failed_at": None},
    "received": {"sent_at": NOW, "received_at": NOW, "failed_at": None},
    "converted": {"sent_at": NOW, "received_at": NOW, "converted_at": NOW, "failed_at": None},
    "failed": {"failed_at": NOW, "error_reason": "x"},
    "errored": {
        "error_details": {"errored_at": NOW.isoformat()},
        "next_attempt_at": NOW,
        "failure_type": "network",
        "failed_at": None,
    },
}


def refused(write):
    try:
        with transaction.atomic():
            write()
    except IntegrityError:
        return True
    return False


@pytest.mark.parametrize("old", STATES)
@pytest.mark.parametrize("new", STATES)
def test_every_pair_of_states(old, new):
    row = message_in(old)
    columns = {**COLUMNS[new], **({} if new == "converted" else {"converted_at": None})} if old != new else {}
    rows = Message.objects.filter(pk=row.pk)
    events = MessageEvent.objects.count()
    legal = (old, new) in LEGAL or old == new
    assert refused(lambda: rows.update(status=new, **columns)) != legal
    assert Message.objects.get(pk=row.pk).status == (new if legal else old)
    assert MessageEvent.objects.count() - events == ((old, new) in LEGAL)


@pytest.mark.parametrize("state", STATES[1:])
def test_rows_are_born_pending(state):
    row = message()
    sql = (
        "INSERT INTO messages SELECT (jsonb_populate_record(m, jsonb_build_object('id', gen_random_uuid(),"
        " 'status', %s::text))).* FROM messages m WHERE id = %s"
    )

    def born():
        with connection.cursor() as cursor:
            cursor.execute(sql, [state, row.pk])

    assert refused(born)


BROKEN = [
    ("pending", {"sent_at": NOW}),
    ("pending", {"received_at": NOW}),
    ("pending", {"converted_at": NOW}),
    ("pending", {"failed_at": NOW}),
    ("successful", {"sent_at": None}),
    ("successful", {"converted_at": NOW}),
    ("successful", {"failed_at": NOW}),
    ("received", {"sent_at": None}),
    ("received", {"received_at": None}),
    ("converted", {"received_at": None}),
    ("converted", {"converted_at": None}),
    ("converted", {"expired_at": NOW}),
    ("failed", {"failed_at": None}),
    ("failed", {"error_reason": None}),
    ("failed", {"error_reason": ""}),
    ("errored", {"next_attempt_at": None}),
    ("errored", {"failure_type": None}),
    ("errored", {"error_details": {}}),
    ("errored", {"sent_at": NOW}),
    ("errored", {"received_at": NOW}),
    ("pending", {"expired_at": NOW}),
    ("successful", {"expired_at": NOW}),
    ("pending", {"archived_at": NOW}),
    ("converted", {"archived_at": NOW}),
    ("pending", {"priority": 10}),
]


@pytest.mark.parametrize(("state", "columns"), BROKEN)
def test_timestamps_belong_to_their_state(state, columns):
    row = message_in(state)
    assert refused(lambda: Message.objects.filter(pk=row.pk).update(**columns))


def test_times_may_be_moved_by_hand_within_the_constraints():
    row = message_in("received")
    long_ago = NOW - timedelta(days=400)
    Message.objects.filter(pk=row.pk).update(created_at=long_ago, sent_at=long_ago, received_at=long_ago)
    assert MessageEvent.objects.filter(message=row).count() == 3


def test_python_refuses_to_convert_what_has_expired():
    row = message_in("received")
    row.expired_at = NOW
    with pytest.raises(TransitionNotAllowed):
        row.convert(NOW)


def test_each_change_appends_its_event_and_its_version():
    row = message_in("errored")
    Message.objects.filter(pk=row.pk).update(
        status="pending", retried_at=NOW + timedelta(seconds=30), next_attempt_at=None, error_details={}
    )
    for status, columns in path_to("converted", NOW + timedelta(minutes=1)):
        Message.objects.filter(pk=row.pk).update(status=status, **columns)
    events = list(MessageEvent.objects.order_by("id").values_list("event_type", "occurred_at"))
    assert [name for name, _at in events] == ["created", "errored", "retried", "sent", "received", "converted"]
    assert events[2][1] == NOW + timedelta(seconds=30)
    history = Message.objects.get().version_history
    assert [history[str(n)]["transition"] for n in range(1, 6)] == ["error", "retry", "send", "receive", "convert"]
    assert MessageEvent.objects.get(event_type="retried").metadata == {"failure_type": "network"}


@pytest.mark.parametrize(
    "sql",
    ["UPDATE message_events SET event_type = 'x'", "DELETE FROM message_events", "TRUNCATE message_events"],
)
def test_events_cannot_be_changed(sql):
    message()

    def write():
        with connection.cursor() as cursor:
            cursor.execute(sql)

    assert refused(write)
    assert MessageEvent.objects.count() == 1


def sql(statement, *params):
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.rowcount


def test_messages_go_by_the_purge_alone():
    row = message()
    assert refused(lambda: sql("DELETE FROM messages WHERE id = %s", row.pk))
    assert refused(row.delete)
    sql("SET CONSTRAINTS ALL IMMEDIATE")
    assert refused(lambda: sql("TRUNCATE messages CASCADE"))
    with pytest.raises(ProtectedError):
        row.subscription.delete()
    with pytest.raises(ProtectedError):
        row.application.delete()
    purge_messages()
    assert not Message.objects.exists() and MessageEvent.objects.exists()


def test_a_row_written_by_hand_takes_its_channel_from_the_subscription():
    to = subscribe(type="SMS")
    assert sql(
        "INSERT INTO messages (application_id, subscription_id, body) VALUES (%s, %s, 'Hi')", to.application_id, to.pk
    )
    row = Message.objects.get()
    assert (row.subscription_type, row.channel_type, row.status, row.kind, row.priority) == (
        "SMS", "sms", "pending", "notice", 5,
    )  # fmt: skip
    assert sql("INSERT INTO applications (slug) VALUES ('by-hand')")
    assert sql(
        "INSERT INTO message_templates (application_id, name, channel) VALUES (%s, 'by hand', 'sms')", to.application_id
    )


def test_an_attempt_and_an_event_written_by_hand_need_no_time():
    row = message()
    sql("INSERT INTO message_attempts (message_id, attempt_no) VALUES (%s, 1)", row.pk)
    sql("INSERT INTO message_events (message_id, event_type) VALUES (%s, 'sent')", row.pk)
    assert row.attempts.get().started_at and row.events.last().occurred_at


def test_the_orm_writes_and_reads_anew():
    to = subscribe()
    row = Message.objects.create(application=to.application, subscription=to, title="Hi")
    assert (row.status, Message.objects.get(pk=row.pk).channel_type) == ("pending", "push")
    row.body = "there"
    row.save()
    Message.objects.filter(pk=row.pk).update(status="successful", sent_at=NOW)
    row.refresh_from_db(fields=["body"])
    assert row.status == "pending"
    row.refresh_from_db()
    assert (row.status, row.body) == ("successful", "there")
    with pytest.raises(AttributeError):
        row.status = "received"
    with pytest.raises(IntegrityError), transaction.atomic():
        Message.objects.create(application=to.application, subscription=to, status="successful", sent_at=NOW)


@pytest.mark.parametrize(
    "change",
    [
        "kind = 'fax'",
        "channel_type = 'fax'",
        "failure_type = 'fax'",
        "priority = 10",
        "hold_reason = 'lunch'",
        "status = 'errored', failure_type = 'config', next_attempt_at = now(), error_details = '{}'",
        """status = 'errored', failure_type = 'config', next_attempt_at = now(), error_details = '{"errored_at": null}'
        """,
    ],
)
def test_the_database_knows_the_words(change):
    message()
    assert refused(lambda: sql(f"UPDATE messages SET {change}"))


@pytest.mark.parametrize("value", ["[]", "5", "null"])
def test_settings_and_data_are_objects(value):
    application = subscribe().application
    MessageTemplate.objects.create(application=application, name="x", channel="sms", body_template="x")
    assert refused(lambda: sql("UPDATE applications SET settings = %s", value))
    assert refused(lambda: sql("UPDATE message_templates SET data_template = %s", value))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE applications SET daily_quota = -1",
        "UPDATE applications SET monthly_quota = -1",
        "UPDATE subscriptions SET type = 'Fax'",
        "UPDATE message_templates SET channel = 'fax'",
        "UPDATE message_templates SET approval = 'perhaps'",
        "UPDATE suppressions SET channel_type = 'fax'",
        "INSERT INTO message_events (message_id, event_type) SELECT id, 'opened' FROM messages",
    ],
)
def test_the_database_knows_the_words_of_the_other_tables(change):
    application = message().application
    MessageTemplate.objects.create(application=application, name="x", channel="sms", body_template="x")
    suppress(application, [("sms", "+821012345678", "manual", {})], now=NOW)
    assert refused(lambda: sql(change))


@pytest.mark.parametrize("failure", ["network", "outage", "rate_limited", "config"])
def test_a_retry_by_hand_clears_what_belongs_to_errored_and_is_counted(failure):
    row = message_in("errored")
    sql("UPDATE messages SET failure_type = %s, error_reason = 'x'", failure)
    sql("UPDATE messages SET status = 'pending'")
    row = Message.objects.get(pk=row.pk)
    assert (row.failure_type, row.error_reason, row.error_details, row.next_attempt_at) == (None, None, {}, None)
    assert row.retry_counts == {name: int(name == failure) for name in ("network", "outage", "rate_limited")}
    assert row.events.last().metadata == {"failure_type": failure}


def test_who_counts_a_retry_by_hand_is_believed():
    message_in("errored")
    sql("UPDATE messages SET status = 'pending', network_retries = 4, next_attempt_at = %s", NOW)
    row = Message.objects.get()
    assert (row.network_retries, row.next_attempt_at) == (4, NOW)


def test_an_edit_by_hand_is_a_version_too():
    row = MessageTemplate.objects.create(
        application=subscribe().application, name="x", channel="sms", body_template="1"
    )
    sql("UPDATE message_templates SET body_template = '2'")
    sql("UPDATE message_templates SET active = false, body_template = '2'")
    kept = row.versions.order_by("version").values_list("version", "body_template")
    assert list(kept) == [(1, "1"), (2, "2")]


def test_the_database_knows_the_outcomes():
    add = "INSERT INTO message_attempts (message_id, attempt_no, started_at, ended_at, provider, outcome)"
    assert refused(lambda: sql(f"{add} VALUES (%s, 1, now(), now(), 'null', 'fine')", message().pk))


def test_tokens_are_encrypted_and_found_by_a_keyed_hash(settings):
    row = subscribe(type="Email", token="Ann@Example.com")
    stored = Subscription.objects.filter(pk=row.pk).values().get()
    assert not [value for value in stored.values() if isinstance(value, str) and "ann@" in value.lower()]
    assert Subscription.objects.get(pk=row.pk).token == "Ann@Example.com"
    assert Subscription.objects.holding(row.application, "email", "ann@example.COM").get() == row


def test_a_rotated_secret_reads_old_tokens_and_finds_them_after_reencryption(settings):
    from messaging.services.addresses import reencrypt_addresses

    row = subscribe(type="Email", token="ann@example.com")
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another secret of sufficient length, more or less"
    assert Subscription.objects.get(pk=row.pk).token == "ann@example.com"
    assert not Subscription.objects.holding(row.application, "email", "ann@example.com").exists()
    assert reencrypt_addresses(lambda _text: None)["subscriptions"] == 1
    settings.SECRET_KEY_FALLBACKS = []
    assert Subscription.objects.holding(row.application, "email", "ann@example.com").get().token == "ann@example.com"
