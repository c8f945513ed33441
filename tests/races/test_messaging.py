"""What only breaks when several do it at once, or when one dies in the middle."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from messaging import providers
from messaging.models import (
    Application,
    Message,
    MessageAttempt,
    MessageEvent,
    QuotaUsage,
    Subscription,
    Suppression,
)
from messaging.providers.answers import accepted
from messaging.services import (
    MessageRequest,
    Sender,
    SubscriptionSpec,
    cancel_messages,
    create_messages,
    enqueue_messages,
    record_conversion,
    record_receipt,
    suppress,
    upsert_subscriptions,
)
from messaging.services.dispatching import dispatch
from tests.messaging.carriers import Carrier
from tests.messaging.factories import ApplicationFactory, draft, message_in, subscribe


@pytest.fixture(autouse=True)
def carrier(settings):
    settings.PROVIDERS = {"AndroidPush": "null", "Email": "null", "SMS": "null"}
    providers.reset_providers()
    providers._built[("null", "")] = found = Carrier()
    yield found
    providers.reset_providers()


def send_due():
    """A dispatcher that lets nothing pass in silence."""

    def raised(_lane, error):
        raise error

    return dispatch(timezone.now, lambda: True, raised)


def create(subscription, count):
    now = timezone.now()
    outcomes = enqueue_messages([draft(subscription) for _ in range(count)], now=now)
    return [outcome.message_id for outcome in outcomes]


def test_eight_dispatchers_send_each_message_once(at_once, carrier):
    """Two thousand of them; `MESSAGES=10000` makes as many."""
    subscription, wanted = subscribe(), int(os.environ.get("MESSAGES", "2000"))
    for _ in range(wanted // 500):
        create(subscription, 500)
    counts = at_once(*[send_due] * 8)
    assert sum(counts, Counter()) == {"successful": wanted}
    assert max(Counter(sent.message_id for sent in carrier.sent).values()) == 1
    assert MessageAttempt.objects.filter(outcome="accepted", attempt_no=1).count() == wanted
    assert Counter(MessageEvent.objects.values_list("event_type", flat=True)) == {"created": wanted, "sent": wanted}
    assert not Message.objects.exclude(status="successful", lease_id=None).exists()


def test_an_answer_outlives_a_connection_to_the_database_that_breaks_meanwhile(transactional_db, carrier):
    [pk] = create(subscribe(), 1)
    first = connection.connection.info.backend_pid

    def cut(message):
        with psycopg.connect(**connection.get_connection_params(), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [first])
        return accepted(str(message.message_id))

    carrier.answer = cut
    # Another lane's claim may be what breaks: told, and the answers are recorded all the same.
    assert dispatch(timezone.now, lambda: True, lambda *_trouble: None) == {"successful": 1}
    assert Message.objects.get(pk=pk).status == "successful"
    assert MessageAttempt.objects.get().outcome == "accepted"


def test_the_same_key_at_the_same_instant_makes_one_message(at_once):
    subscription = subscribe()
    asked = MessageRequest(subscription_id=subscription.pk, title="x", idempotency_key="k", fingerprint="f")
    results = at_once(*[lambda: create_messages([asked], Sender(None), now=timezone.now())[0]] * 8)
    assert len({outcome.message_id for outcome in results}) == Message.objects.count() == 1
    assert sum(outcome.created for outcome in results) == 1


def test_batches_of_the_same_keys_in_any_order_do_not_deadlock(at_once):
    subscription = subscribe()
    drafts = [draft(subscription, idempotency_key=f"k{n}") for n in range(100)]
    batches = [drafts, drafts[::-1], drafts[50:] + drafts[:50], drafts[::-1]]
    results = at_once(*[partial(enqueue_messages, batch, now=timezone.now()) for batch in batches])
    assert sum(outcome.created for outcomes in results for outcome in outcomes) == Message.objects.count() == 100


def test_the_quota_holds_under_pressure(at_once):
    subscription = subscribe()
    Application.objects.update(daily_quota=50)
    results = at_once(*[lambda: enqueue_messages([draft(subscription)] * 10, now=timezone.now())] * 8)
    codes = Counter(outcome.code for outcomes in results for outcome in outcomes)
    assert codes == {None: 50, "quota_exceeded": 30}
    assert (Message.objects.count(), QuotaUsage.objects.get().used) == (50, 50)


def test_registering_one_token_at_once_makes_one_subscription(at_once):
    application = ApplicationFactory()
    specs = [SubscriptionSpec("Email", f"u{n}@example.com") for n in range(20)]
    results = at_once(*[partial(upsert_subscriptions, application, order) for order in (specs, specs[::-1]) * 4])
    assert Subscription.objects.count() == 20
    assert {len({row.pk for row in rows}) for rows in results} == {20}


def test_suppressing_one_address_at_once_suppresses_it_once(at_once):
    application = ApplicationFactory()
    entry = ("email", "a@example.com", "manual", {})
    results = at_once(*[lambda: suppress(application, [entry], now=timezone.now())] * 6)
    assert sum(results) == Suppression.objects.count() == 1


def test_a_message_is_either_cancelled_or_sent(at_once, carrier):
    ids = create(subscribe(), 200)
    results = at_once(
        *[send_due] * 2,
        *[lambda part=part: cancel_messages(ids[part::2], now=timezone.now()) for part in (0, 1)],
    )
    cancelled = results[2] | results[3]
    sent = {message.message_id for message in carrier.sent}
    assert cancelled & sent == set()
    assert cancelled | sent == set(ids)
    assert set(Message.objects.filter(error_reason="cancelled").values_list("pk", flat=True)) == cancelled


def test_reports_at_the_same_instant_count_once(at_once):
    row = message_in("successful", at=timezone.now())
    calls = [lambda: record_receipt(row.pk, now=timezone.now()), lambda: record_conversion(row.pk, now=timezone.now())]
    results = at_once(*calls * 4)
    assert not [result for result in results if isinstance(result, Exception)]
    subscription = Subscription.objects.get()
    assert (subscription.total_messages_received, subscription.total_messages_converted) == (1, 1)
    kinds = Counter(MessageEvent.objects.values_list("event_type", flat=True))
    assert kinds == {"created": 1, "sent": 1, "received": 1, "converted": 1}


# --- kill -9 -----------------------------------------------------------------------------------------------------

# Dispatchers in processes of their own that kill themselves, each at the n-th time it comes to one step. What they hand
# to the carrier is a line in a file, as a real provider would know it however the sender ends.
NURSERY = """
import json, os, signal, sys
from datetime import timedelta
import django
django.setup()
from django.db import connection
from django.utils.dateparse import parse_datetime
connection.settings_dict["NAME"] = sys.argv[1]
ledger, start, rounds = sys.argv[2], parse_datetime(sys.argv[3]), json.loads(sys.argv[4])
from config import sweeping
from messaging import providers
from messaging.providers.answers import accepted
from messaging.services import claiming, dispatching, recording

def live(step, left, now):
    def die(where):
        nonlocal left
        left -= where == step
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(where, function, after=False):
        def call(*args, **kwargs):
            if not after:
                die(where)
            result = function(*args, **kwargs)
            if after and (result.attempts if isinstance(result, claiming.Batch) else result):
                die(where)
            return result
        return call

    class Ledger:
        name, concurrency, idempotent, receipts = "null", 100, True, True
        def send(self, batch):
            for number, message in enumerate(batch):
                if number == len(batch) // 2:
                    die("during_call")
                with open(ledger, "a") as file:
                    file.write(f"{message.message_id}\\n")
            die("after_call")
            return [accepted(str(message.message_id)) for message in batch]
        def query(self, message_id, *_more):
            known = set(open(ledger).read().split()) if os.path.exists(ledger) else set()
            if str(message_id) in known:
                return accepted(f"asked-{message_id}")
            return providers.Answer("transient", code="not_found")

    providers._built[("null", "")] = Ledger()
    claiming._due = dying("before_claim", claiming._due)
    claiming._outgoing = dying("before_lease_commit", claiming._outgoing)
    dispatching.Lane.claim = dying("after_claim", dispatching.Lane.claim, after=True)
    dispatching.record_batch = dying("before_record", dispatching.record_batch)
    recording._write_accepted = dying("before_record_commit", recording._write_accepted, after=True)
    lanes = dispatching.lanes
    if step != "none":
        dispatching.LARGEST_BATCH = 8
    dispatching.lanes = lambda: [dispatching.Lane(lane.subscription_type, lane.provider, size=8) for lane in lanes()]
    for name in ("resolve_unknown_attempts", "dispatch_due_messages"):
        assert sweeping.run(f"messaging.{name}", now=now, wait=True)["error"] is None

for number, lives in enumerate(rounds):
    children = []
    for step, left in lives:
        children.append(os.fork())
        if not children[-1]:
            live(step, left, start + number * timedelta(minutes=4))
            os._exit(0)
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
"""
STEPS = [
    "before_claim",
    "before_lease_commit",
    "after_claim",
    "during_call",
    "after_call",
    "before_record",
    "before_record_commit",
]


def run_dispatchers(rounds, ledger, start):
    """The exit codes: −9 of one that killed itself. Rounds are 4 minutes apart, longer than a lease."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "config.settings",
        "PROVIDERS": "AndroidPush=null,SMS=null,Email=null",
    }
    name = connection.settings_dict["NAME"]
    command = [sys.executable, "-c", NURSERY, name, str(ledger), start.isoformat(), json.dumps(rounds)]
    done = subprocess.run(command, env=environment, timeout=1800, capture_output=True, check=True, text=True)
    return [int(code) for code in done.stdout.split()]


@pytest.mark.parametrize("at_random", [False, True])
def test_kill_9_loses_nothing_and_lists_what_is_ambiguous(transactional_db, tmp_path, at_random):
    """At each step, and at random under load; `KILLS=200` kills as many, without it a dozen."""
    ledger, start = tmp_path / "ledger", timezone.now() + timedelta(seconds=1)
    kills = int(os.environ.get("KILLS", "12")) // 4 * 4 if at_random else len(STEPS)
    chance = random.Random(kills)
    random_lives = [(chance.choice(STEPS), chance.randint(1, 3)) for _n in range(kills)]
    lives, together = (random_lives, 4) if at_random else ([(step, 1) for step in STEPS], 1)
    # More than the killed can get through: each has three lanes, and on each at most so many batches of eight.
    for kind in ("AndroidPush", "SMS", "Email"):
        subscription = subscribe(type=kind)
        for _step, batches in lives:
            create(subscription, 8 * batches + 1)
    rounds = [lives[n : n + together] for n in range(0, kills, together)]
    codes = run_dispatchers([*rounds, *[[("none", 1)]] * 3], ledger, start)
    assert codes == [-signal.SIGKILL] * kills + [0] * 3
    handed = Counter(ledger.read_text().split())
    for row in Message.objects.all():
        times = handed[str(row.pk)]
        # None is lost, none is sent and forgotten, and what is ambiguous is listed as such.
        assert row.status == "successful" or row.hold_reason == "outcome_unknown"
        assert times >= 1 or row.hold_reason
        # Only a push is ever repeated, with the id by which the device shows it once.
        assert times <= (2 if row.channel_type == "push" else 1)
        assert row.channel_type != "sms" or row.hold_reason is None
    assert not MessageAttempt.objects.filter(ended_at=None).exists()
    accepted = Counter(MessageAttempt.objects.filter(outcome="accepted").values_list("message_id", flat=True))
    assert set(accepted.values()) == {1}
    assert Message.objects.filter(hold_reason="outcome_unknown").exists()
