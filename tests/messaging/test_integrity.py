import re
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from config import integrity
from messaging import retention
from messaging.models import Message, MessageAttempt, MessageEvent
from messaging.services.claiming import claim_batch
from tests.messaging.factories import message, message_in, subscribe
from tests.messaging.test_dispatching import dispatch

pytestmark = pytest.mark.django_db


def counts(now=None):
    return {
        reading.name.removeprefix("messaging."): reading.count
        for reading in integrity.report(now)
        if reading.name.startswith("messaging.") and reading.count
    }


def test_a_living_house_is_in_order(carrier):
    now = timezone.now()
    for state in ("pending", "successful", "received", "converted", "failed", "errored"):
        message_in(state, at=now)
    message(now=now)
    dispatch(now)
    assert counts() == {}


def test_counts_what_was_accepted_twice():
    row = message(now=timezone.now())
    at = timezone.now()
    for number in (1, 2):
        MessageAttempt.objects.create(
            message=row, attempt_no=number, started_at=at, ended_at=at, outcome="accepted", provider="null"
        )
    assert counts() == {"double_sends": 1}


@pytest.mark.parametrize(
    ("state", "age"),
    [
        ("pending", timedelta(hours=24)),
        ("errored", timedelta(seconds=30)),
        ("successful", timedelta(hours=72)),
        ("received", timedelta(days=30)),
        ("failed", timedelta(days=90)),
    ],
)
def test_counts_what_no_sweep_has_ended(state, age):
    now = timezone.now()
    message_in(state, at=now)
    assert counts(now + age + timedelta(minutes=9)) == {}
    assert counts(now + age + timedelta(minutes=11)) == {"past_deadline": 1}


def test_counts_attempts_that_nobody_looks_after():
    now = timezone.now()
    message(now=now)
    claim_batch("AndroidPush", "null", 1, now=now)
    assert counts(now) == {}
    assert counts(now + timedelta(minutes=14)) == {"open_attempts": 1}
    Message.objects.update(lease_id=None)
    assert counts(now) == {"open_attempts": 1}


def test_counts_states_without_their_event():
    row = message(now=timezone.now())
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE messages DISABLE TRIGGER USER")
        cursor.execute("UPDATE messages SET status = 'successful', sent_at = now()")
        cursor.execute("ALTER TABLE messages ENABLE TRIGGER USER")
    assert counts() == {"events_disagree": 1, "rollup_drift": 1}
    assert integrity.measure(integrity.find("messaging.events_disagree")).samples == [str(row.pk)]


def test_purging_takes_old_messages_with_their_history_and_leaves_the_rest():
    now = timezone.now()
    old, young, kept = message_in("failed"), message_in("failed"), message_in("converted")
    Message.objects.filter(pk=old.pk).update(archived_at=now - timedelta(days=731))
    Message.objects.filter(pk=young.pk).update(archived_at=now - timedelta(days=729))
    MessageAttempt.objects.create(message=old, attempt_no=1, started_at=now, provider="null")
    assert retention.purge(now, dry_run=True)["messages"] == 1
    assert retention.purge(now, dry_run=False)["messages"] == 1
    assert set(Message.objects.values_list("pk", flat=True)) == {young.pk, kept.pk}
    assert not MessageEvent.objects.filter(message=old.pk).exists() and not MessageAttempt.objects.exists()
    assert retention.purge(now, dry_run=False)["messages"] == 0


def test_metrics_tell_of_breakers_holds_and_latency(carrier, make_client):
    from messaging.models import ProviderCircuit

    now = timezone.now()
    message(now=now - timedelta(seconds=2))
    dispatch(now)
    ProviderCircuit.objects.create(provider="smtp", reason="config", opened_at=now, probe_at=now)
    text = make_client("viewer").get("/metrics").content.decode()
    assert 'signalbox_provider_circuit_open{provider="smtp",reason="config"} 1.0' in text
    assert 'signalbox_send_latency_seconds{channel="push",quantile="0.5"} 2.0' in text
    assert "signalbox_messages_held 0.0" in text


def test_metrics_tell_how_long_the_longest_waits_in_each_state(make_client):
    now = timezone.now()
    message(now=now - timedelta(hours=2))
    message(now=now - timedelta(hours=5), scheduled_at=now + timedelta(hours=1))
    message_in("successful", at=now - timedelta(hours=3))
    message_in("successful", subscribe(type="Email"), at=now - timedelta(days=9))
    message_in("received", at=now - timedelta(hours=4))
    expired = message_in("received", at=now - timedelta(days=40))
    Message.objects.filter(pk=expired.pk).update(expired_at=now)
    message_in("errored", at=now - timedelta(hours=1, seconds=30))
    text = make_client("viewer").get("/metrics").content.decode()
    found = dict(re.findall(r'oldest_age_seconds\{app="messaging",kind="messages.status",state="(\w+)"\} (\S+)', text))
    hours = {state: round(float(seconds) / 3600, 1) for state, seconds in found.items()}
    # An e-mail gives no receipt, so it waits for none; nor does what is expired.
    assert hours == {"pending": 2, "successful": 3, "received": 4, "errored": 1}
