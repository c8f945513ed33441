"""The figures on a data set computed by hand, and that no way of writing messages leaves the roll-ups behind."""

import random
from datetime import UTC, datetime, timedelta
from io import StringIO

import pgtrigger
import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from config.integrity import find as invariant
from config.integrity import heal, measure
from config.sweeping import run
from messaging.models import Message, MessageRollup, MessageRollupDelta, MessageSegment, Subscription
from messaging.services.analytics import Span, fold_deltas, latency, message_figures, recompute_rollups
from messaging.triggers import MOST_SEGMENTS
from tests.messaging.factories import ApplicationFactory, message, subscribe

pytestmark = pytest.mark.django_db

DAY = datetime(2026, 3, 10, tzinfo=UTC)
WHOLE = (DAY - timedelta(days=7), DAY + timedelta(days=7))


def at(hours, seconds=0):
    return DAY + timedelta(hours=hours, seconds=seconds)


def move(row, *steps):
    for status, columns in steps:
        Message.objects.filter(pk=row.pk).update(status=status, **columns)


def sent(when):
    return "successful", {"sent_at": when}


def received(when, implied=False):
    return "received", {"received_at": when, "receipt_implied": implied}


def converted(when):
    return "converted", {"converted_at": when}


def failed(when, reason):
    return "failed", {"failed_at": when, "error_reason": reason}


def errored(when, kind="network"):
    return "errored", {
        "error_details": {"errored_at": when.isoformat()},
        "next_attempt_at": when + timedelta(minutes=5),
        "failure_type": kind,
    }


def retried(column, n):
    return "pending", {column: n, "next_attempt_at": None, "failure_type": None, "error_details": {}}


@pytest.fixture
def data_set():
    """Twelve messages, each with a different fate."""
    application = ApplicationFactory()
    push = subscribe(application, "AndroidPush", tags={"tier": "gold"})
    mail = subscribe(application, "Email", tags={"tier": "free"})
    plain = subscribe(application, "SMS")
    t = at(9)
    move(message(push, now=t, kind="notice"), sent(at(9, 10)), received(at(9, 20)), converted(at(9, 50)))
    move(message(push, now=t, campaign="spring"), sent(at(9, 20)), received(at(9, 50)))
    move(message(push, now=t, campaign="spring"), sent(at(9, 30)), received(at(9, 60), True), converted(at(9, 60)))
    move(message(push, now=t), sent(at(9, 40)), failed(at(81, 40), "receipt_timeout"))
    move(message(mail, now=at(10), kind="transactional"), failed(at(10, 1), "rejected"))
    move(message(mail, now=at(10)), failed(at(10, 2), "cancelled"))
    move(message(mail, now=at(10)), errored(at(10, 3)), failed(at(11), "cancelled"))
    move(message(mail, now=at(33)), errored(at(33, 1)))
    move(message(mail, now=at(33)), errored(at(33, 1)), retried("network_retries", 1), sent(at(33, 100)))
    move(message(plain, now=at(33)), errored(at(33, 1)), retried("network_retries", 1), failed(at(34), "rejected"))
    move(
        message(plain, now=at(33)),
        errored(at(33, 1)),
        retried("network_retries", 1),
        errored(at(33, 40), "rate_limited"),
        retried("rate_limited_retries", 1),
        sent(at(33, 200)),
    )
    message(plain, now=at(33))
    return application


def figures(application, group_by="day", span=WHOLE, tag=""):
    return message_figures([application.pk], *span, group_by, tag)


def test_counts_and_rates_are_those_computed_by_hand(data_set):
    totals = figures(data_set)["totals"]
    assert {name: totals[name] for name in list(totals)[:9]} == {
        "created": 12,
        "sent": 6,
        "received": 3,
        "converted": 2,
        "failed": 2,
        "errored": 1,
        "pending": 1,
        "cancelled": 2,
        "failed_after_send": 1,
    }
    assert totals["send_rate"] == pytest.approx(6 / 9, abs=1e-6)
    assert totals["reach_rate"] == pytest.approx(3 / 6)
    assert totals["conversion_rate"] == pytest.approx(2 / 3, abs=1e-6)
    assert totals["overall_conversion_rate"] == pytest.approx(2 / 9, abs=1e-6)


def test_latencies_leave_implied_receipts_out_of_receive_and_convert_only(data_set):
    found = figures(data_set)["totals"]["latencies"]
    # send: 10 20 30 40 100 200; receive: 10 30; convert: 30; total: 50 60
    assert found["send"] == {"count": 6, "p50": 35, "p95": 175, "mean": pytest.approx(400 / 6, abs=1e-5)}
    assert found["receive"] == {"count": 2, "p50": 20, "p95": 29, "mean": 20}
    assert found["convert"] == {"count": 1, "p50": 30, "p95": 30, "mean": 30}
    assert found["total"] == {"count": 2, "p50": 55, "p95": 59.5, "mean": 55}


def test_retries_are_judged_by_failure_type(data_set):
    assert figures(data_set)["totals"]["retry_effectiveness"] == {
        "network": {"retried": 3, "sent": 2, "rate": pytest.approx(2 / 3, abs=1e-6)},
        "outage": {"retried": 0, "sent": 0, "rate": None},
        "rate_limited": {"retried": 1, "sent": 1, "rate": 1},
    }


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("day", {"2026-03-10": 7, "2026-03-11": 5}),
        ("hour", {"09": 9, "10": 3}),
        ("channel", {"push": 4, "email": 5, "sms": 3}),
        ("kind", {"notice": 11, "transactional": 1}),
        ("campaign", {"spring": 2, None: 10}),
        ("retry", {"0": 9, "1": 2, "2": 1}),
        ("tag", {"gold": 4, "free": 5, None: 3}),
    ],
)
def test_each_grouping_splits_the_same_messages(data_set, group_by, expected):
    found = figures(data_set, group_by, tag="tier")
    assert {row["key"]: row["created"] for row in found["results"]} == expected
    assert found["totals"] == figures(data_set)["totals"]
    keys = [row["key"] for row in found["results"]]
    assert keys == sorted(keys, key=lambda key: (key is None, key))


def test_folding_changes_no_figure(data_set):
    groups = ("day", "hour", "channel", "kind", "campaign", "retry", "tag")

    def told():
        return [figures(data_set, group, tag="tier" if group == "tag" else "") for group in groups]

    before = told()
    assert fold_deltas(5) == 5
    assert told() == before
    assert run("messaging.fold_rollups")["counts"]["folded"] > 0
    assert not MessageRollupDelta.objects.exists()
    assert told() == before
    assert run("messaging.fold_rollups")["counts"] == {"folded": 0}


def by_tier(application, span=WHOLE):
    return {row["key"]: row["created"] for row in figures(application, "tag", span, "tier")["results"]}


@pytest.mark.parametrize("folded", [False, True])
def test_a_message_is_counted_under_the_tags_its_recipient_had(data_set, folded):
    while folded and fold_deltas():
        pass
    for row in Subscription.objects.filter(tags__tier="gold"):
        row.tags = {"tier": "silver"}
        row.save()
    assert by_tier(data_set) == {"gold": 4, "free": 5, None: 3}
    assert by_tier(data_set, (at(9), at(9, 1))) == {"gold": 4}
    message(Subscription.objects.get(tags__tier="silver"), now=at(33))
    assert by_tier(data_set) == {"gold": 4, "free": 5, "silver": 1, None: 3}


def test_equal_tags_are_one_segment_and_the_last_is_never_overwritten():
    first, second = (subscribe(tags={"a": 1, "b": 2}) for _n in range(2))
    assert first.application_id != second.application_id
    twin = subscribe(first.application, tags={"b": 2, "a": 1})
    rows = {row.pk: row for row in Subscription.objects.all()}
    assert rows[first.pk].segment == rows[twin.pk].segment != rows[second.pk].segment
    held = rows[twin.pk]
    Subscription.objects.filter(pk=twin.pk).update(tags={"a": 3})
    held.locale = "ko"
    held.save(update_fields=["locale", "segment"])
    moved = Subscription.objects.get(pk=twin.pk)
    assert MessageSegment.objects.get(pk=moved.segment).tags == {"a": 3}


@pytest.mark.parametrize("folded", [False, True])
def test_what_is_in_no_segment_is_read_from_the_rows(data_set, folded):
    """More kinds of tags than are kept, or messages from before there were segments."""
    MessageSegment.objects.bulk_create(
        MessageSegment(application_id=data_set.pk, mark=str(n), tags={"n": n}) for n in range(MOST_SEGMENTS)
    )
    late = subscribe(data_set, tags={"tier": "late"})
    assert Subscription.objects.get(pk=late.pk).segment is None
    message(late, now=at(33))
    while folded and fold_deltas():
        pass
    assert by_tier(data_set) == {"gold": 4, "free": 5, "late": 1, None: 3}
    assert drift() == 0
    assert figures(data_set, "tag", tag="tier")["totals"] == figures(data_set)["totals"]


def test_a_page_of_deltas_is_a_page_under_any_plan(data_set):
    """A nested loop, as chosen for a table that looks empty, must not look for the page again with each row."""
    with connection.cursor() as cursor:
        for way in ("hashjoin", "mergejoin", "hashagg", "material", "sort"):
            cursor.execute(f"SET LOCAL enable_{way} = off")
    assert fold_deltas(5) == 5


@pytest.mark.parametrize("group_by", ["day", "hour", "channel", "kind", "campaign", "retry", "tag"])
@pytest.mark.parametrize("folded", [False, True])
def test_any_range_counts_exactly_the_messages_created_in_it(group_by, folded):
    application = ApplicationFactory()
    rows = [subscribe(application, kind) for kind in ("AndroidPush", "Email", "SMS")]
    dice = random.Random(7)
    times = [DAY + timedelta(minutes=dice.randrange(0, 5 * 24 * 60)) for _n in range(60)]
    for n, when in enumerate(times):
        move(message(rows[n % 3], now=when, campaign=f"c{n % 2}"), sent(when + timedelta(seconds=n)))
    if folded:
        while fold_deltas():
            pass
    for _try in range(15):
        start, end = sorted(DAY + timedelta(minutes=dice.randrange(0, 5 * 24 * 60)) for _n in range(2))
        inside = sum(start <= when < end for when in times)
        totals = message_figures([application.pk], start, end, group_by, "x")["totals"]
        assert (totals["created"], totals["sent"], totals["latencies"]["send"]["count"]) == (inside,) * 3


def test_the_first_moment_belongs_to_the_range_and_the_last_does_not():
    row = message(now=at(9))
    for span, count in [((at(9), at(10)), 1), ((at(8), at(9)), 0), ((at(9), at(9)), 0), ((at(9, 1), at(10)), 0)]:
        assert figures(row.application, span=span)["totals"]["created"] == count


def test_nothing_sent_has_no_rates(data_set):
    empty = figures(ApplicationFactory())
    assert empty["results"] == []
    assert empty["totals"]["send_rate"] is None and empty["totals"]["latencies"]["send"]["p50"] is None
    assert figures(data_set)["results"][0]["reach_rate"] is not None


def test_other_applications_are_not_counted(data_set):
    assert figures(message(now=at(9)).application)["totals"]["created"] == 1


def test_percentiles_stay_within_five_percent():
    dice = random.Random(1)
    values = sorted(dice.lognormvariate(3, 1.5) for _n in range(3000))
    application = ApplicationFactory()
    subscription = subscribe(application)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO messages (id, application_id, subscription_id, subscription_type, channel_type, created_at)"
            " SELECT gen_random_uuid(), %s, %s, 'AndroidPush', 'push', %s FROM generate_series(1, 3000)",
            [application.pk, subscription.pk, DAY],
        )
        cursor.execute(
            "UPDATE messages m SET status = 'successful', sent_at = m.created_at + make_interval(secs => v.s)"
            " FROM unnest(%s::uuid[], %s::float8[]) AS v (id, s) WHERE v.id = m.id",
            [list(Message.objects.values_list("pk", flat=True)), values],
        )
    found = figures(application)["totals"]["latencies"]["send"]
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        rank = share * (len(values) - 1)
        exact = values[int(rank)] + (values[int(rank) + 1] - values[int(rank)]) * (rank % 1)
        assert found[name] == pytest.approx(exact, rel=0.05)
    assert found["mean"] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_a_histogram_of_equal_values_is_exact():
    assert latency({3: (4, 4 * 1_500_000)}) == {"count": 4, "p50": 1.5, "p95": 1.5, "mean": 1.5}


def test_bare_sql_is_counted_too(data_set):
    push = Subscription.objects.get(type="AndroidPush")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO messages (id, application_id, subscription_id, subscription_type, channel_type, created_at)"
            " SELECT gen_random_uuid(), %s, %s, 'AndroidPush', 'push', %s FROM generate_series(1, 5)",
            [data_set.pk, push.pk, at(9)],
        )
        assert figures(data_set)["totals"]["created"] == 17
        cursor.execute("UPDATE messages SET created_at = %s, kind = 'marketing' WHERE status = 'pending'", [at(60)])
        moved = figures(data_set)
        assert {row["key"]: row["created"] for row in moved["results"]} == {
            "2026-03-10": 7,
            "2026-03-11": 4,
            "2026-03-12": 6,
        }
        assert {row["key"]: row["pending"] for row in figures(data_set, "kind")["results"]}["marketing"] == 6
        cursor.execute("SELECT set_config('signalbox.purging', 'on', true)")
        cursor.execute("DELETE FROM messages WHERE status = 'pending'")
        assert figures(data_set)["totals"]["created"] == 11
        assert figures(data_set)["totals"]["pending"] == 0


def test_a_lease_writes_no_delta(data_set):
    before = MessageRollupDelta.objects.count()
    Message.objects.update(leased_until=DAY, priority=3, title="new")
    Message.objects.filter(status="pending").update(status="pending")
    assert MessageRollupDelta.objects.count() == before


def test_a_batch_writes_one_delta_per_distinct_signature():
    subscription = subscribe()
    for n in range(20):
        message(subscription, now=at(9), title=f"{n}")
    before = MessageRollupDelta.objects.count()
    Message.objects.update(status="successful", sent_at=at(9, 10))
    assert MessageRollupDelta.objects.count() == before + 2


def drift():
    return measure(invariant("messaging.rollup_drift")).count


def behind_our_back(statement):
    names = ("rollup_created", "rollup_moved", "rollup_deleted", "messages_kept")
    with pgtrigger.ignore(*(f"messaging.Message:{name}" for name in names)), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.parametrize("folded", [False, True])
def test_drift_is_seen_and_healed(data_set, folded):
    truth = [figures(data_set, group) for group in ("day", "campaign")]
    while folded and fold_deltas():
        pass
    assert drift() == 0
    behind_our_back("UPDATE messages SET kind = 'marketing' WHERE status = 'pending'")
    assert drift() == 1
    assert heal("messaging.rollup_drift")["corrected"] > 0
    assert drift() == 0
    assert {row["key"]: row["created"] for row in figures(data_set, "kind")["results"]}["marketing"] == 1
    assert [figures(data_set, group) for group in ("day", "campaign")] == truth
    assert heal("messaging.rollup_drift")["corrected"] == 0


def test_a_tampered_or_missing_figure_is_drift(data_set):
    while fold_deltas():
        pass
    MessageRollup.objects.filter(measure="sent", dimension="channel").update(n=99)
    assert drift() == 1
    assert sum(wrong for _day, wrong in recompute_rollups()) > 0
    assert drift() == 0
    before = figures(data_set)
    MessageRollup.objects.all().delete()
    assert drift() == 1
    heal("messaging.rollup_drift")
    assert drift() == 0
    assert figures(data_set) == before


def test_rows_gone_behind_our_back_are_drift(data_set):
    behind_our_back("DELETE FROM messages")
    assert drift() == 1
    heal("messaging.rollup_drift")
    assert drift() == 0
    assert figures(data_set)["totals"]["created"] == 0


def test_the_command_recomputes_the_days_named(data_set):
    while fold_deltas():
        pass
    MessageRollup.objects.filter(measure="created").update(n=1000)
    call_command("recompute_rollups", "--from", "2026-03-11", "--to", "2026-03-12", stdout=StringIO())
    days = {row["key"]: row["created"] for row in figures(data_set)["results"]}
    assert days["2026-03-11"] == 5 and days["2026-03-10"] == 1000
    out = StringIO()
    call_command("recompute_rollups", stdout=out)
    assert {row["key"]: row["created"] for row in figures(data_set)["results"]} == {"2026-03-10": 7, "2026-03-11": 5}
    assert "2026-03-10" in out.getvalue()


@pytest.mark.parametrize(
    "arguments", [["--from", "yesterday"], ["--to", "2026-13-01"], ["--from", "2026-03-11", "--to", "2026-03-10"]]
)
def test_the_command_refuses_what_is_no_time_or_no_range(arguments):
    with pytest.raises(CommandError):
        call_command("recompute_rollups", *arguments)


def test_a_span_is_cut_into_days_hours_and_rows():
    pieces = Span(at(22, 1800), at(72 + 3, 60)).pieces()
    assert pieces["day"] == [(at(24), at(72))]
    assert pieces["hour"] == [(at(23), at(24)), (at(72), at(75))]
    assert pieces["rows"] == [(at(22, 1800), at(23)), (at(75), at(75, 60))]


def test_the_trigger_leaves_the_planner_as_it_was(data_set):
    with connection.cursor() as cursor:
        cursor.execute("SHOW enable_nestloop")
        assert cursor.fetchone()[0] == "on"
