import json
from collections import Counter
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone
from django_q.models import OrmQ, Schedule

from config import sweeping
from config.models import Canary, Decision, Nudge, SweepRun
from devices.models import PC
from tests.factories import PCFactory

NAME = "devices.mark_silent_pcs"


def sweep_command(*args):
    out = StringIO()
    call_command("sweep", *args, stdout=out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.django_db
def test_marks_ripe_leaves_young_records_the_run_and_changes_nothing_the_second_time():
    now = timezone.now()
    ripe = PCFactory(online_since=now - timedelta(seconds=181))
    young = PCFactory(online_since=now - timedelta(seconds=179))
    [first] = sweep_command(NAME)
    assert first["counts"] == {"offline": 1}
    assert first["error"] is None
    assert set(first) == {"sweep", "now", "dry_run", "started_at", "ended_at", "counts", "error"}
    assert PC.objects.get(pk=ripe.pk).status == "offline"
    assert PC.objects.get(pk=young.pk).status == "online"
    decision = Decision.objects.get()
    assert (decision.rule, decision.object_type, decision.object_id) == ("mark_silent_pcs", "pcs", str(ripe.pk))
    assert decision.after == {"status": "offline"}
    assert decision.run_id == SweepRun.objects.get().id
    assert sweep_command(NAME)[0]["counts"] == {}


@pytest.mark.django_db
def test_is_not_ripe_at_the_boundary_and_ripe_a_microsecond_later():
    heard = timezone.now()
    PCFactory(online_since=heard)
    at = heard + timedelta(seconds=180)
    assert not PC.objects.silent(at).exists()
    assert PC.objects.silent(at + timedelta(microseconds=1)).exists()


@pytest.mark.django_db
def test_dry_run_counts_and_changes_nothing():
    pc = PCFactory(online_since=timezone.now())
    later = (timezone.now() + timedelta(hours=1)).isoformat()
    [summary] = sweep_command(NAME, "--dry-run", "--now", later)
    assert summary["counts"] == {"offline": 1}
    assert summary["dry_run"] is True
    assert PC.objects.get(pk=pc.pk).status == "online"
    assert not SweepRun.objects.exists()
    assert not Decision.objects.exists()


@pytest.mark.django_db
def test_refuses_another_time_outside_debug_without_dry_run():
    with pytest.raises(CommandError, match="--dry-run"):
        call_command("sweep", NAME, "--now", "2030-01-01T00:00:00Z")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope.nothing"], "no such sweep"),
        ([], "--all"),
        (["--all", NAME], "not both"),
        ([NAME, "--dry-run", "--now", "soon"], "ISO 8601"),
        ([NAME, "--dry-run", "--now", "0001-01-01T00:00:00Z"], "ISO 8601"),
    ],
)
def test_says_what_is_wrong_with_the_arguments(args, message):
    with pytest.raises(CommandError, match=message):
        call_command("sweep", *args)


@pytest.mark.django_db
def test_all_of_them_at_a_time_to_come_spare_what_is_at_work_now(settings):
    settings.DEBUG = True
    now = timezone.now()
    Canary.objects.create(host="here", asked_at=now)
    other = SweepRun.objects.create(name=NAME, now=now, started_at=now)
    ended = SweepRun.objects.create(name=NAME, now=now, started_at=now, ended_at=now, slot=1)
    told = sweep_command("--all", "--now", (now + timedelta(days=30)).isoformat())
    assert [(one["sweep"], one["error"]) for one in told] == [(name, None) for name in settings.SWEEPS]
    assert SweepRun.objects.filter(name="config.purge_expired", error="").exclude(ended_at=None).exists()
    assert Canary.objects.filter(host="here").exists()
    assert SweepRun.objects.filter(pk=other.pk).exists()
    assert not SweepRun.objects.filter(pk=ended.pk).exists()


def a_sweep(**kwargs):
    return sweeping.Sweep("test", timezone.now(), **kwargs)


@pytest.mark.django_db
def test_a_poison_row_is_told_and_stops_nobody():
    rows = PCFactory.create_batch(20)
    poison = rows[7].pk
    seen = []

    def handle(keys):
        if poison in keys:
            raise ValueError("this one")
        seen.extend(keys)
        return {"done": len(keys)}

    sweep = a_sweep()
    sweep.pages(PC.objects.all(), handle, size=8)
    assert sweep.counts == Counter(done=19, error=1)
    assert sorted(seen) == sorted(row.pk for row in rows if row.pk != poison)
    assert sweep.errors == [f"{poison}: ValueError: this one"]


@pytest.mark.django_db
def test_what_a_poison_row_wrote_is_rolled_back():
    PCFactory.create_batch(2, max_slots=5)

    def handle(keys):
        PC.objects.filter(pk__in=keys).update(max_slots=6)
        raise ValueError

    a_sweep().pages(PC.objects.all(), handle)
    assert set(PC.objects.values_list("max_slots", flat=True)) == {5}


@pytest.mark.django_db
@pytest.mark.parametrize("by", [None, "created_at"])
def test_a_run_that_ran_out_of_time_is_continued_behind_its_last_page(by):
    keys = [row.pk for row in PCFactory.create_batch(9)]
    seen = []

    def take_one_page(page):
        seen.extend(page)
        first.ends = 0
        return {"done": len(page)}

    first = a_sweep()
    first.pages(PC.objects.all(), take_one_page, size=4, by=by)
    assert seen == keys[:4]
    assert first.counts["out_of_time"] == 1

    second = a_sweep(cursor=json.loads(json.dumps(first.cursor)))
    seen.clear()
    second.pages(PC.objects.all(), lambda page: seen.extend(page) or {}, size=4, by=by)
    assert seen == keys[4:] + keys[:4]
    assert second.cursor == {}


@pytest.mark.django_db
def test_the_cursor_is_kept_between_recorded_runs(settings, monkeypatch):
    SweepRun.objects.create(
        name=NAME, now=timezone.now(), started_at=timezone.now(), ended_at=timezone.now(), cursor={"": ["x"]}
    )
    got = {}
    monkeypatch.setattr("devices.sweeps.mark_silent_pcs", lambda sweep: got.update(sweep.cursor))
    sweeping.run(NAME)
    assert got == {"": ["x"]}


@pytest.mark.django_db
def test_a_run_that_died_is_seen_by_the_next_one():
    dead = SweepRun.objects.create(name=NAME, now=timezone.now(), started_at=timezone.now())
    sweeping.run(NAME)
    dead.refresh_from_db()
    assert dead.error == "died"
    assert dead.ended_at


@pytest.mark.django_db
def test_a_failing_sweep_is_recorded_with_its_error(monkeypatch):
    def broken(sweep):
        raise RuntimeError("no way")

    monkeypatch.setattr("devices.sweeps.mark_silent_pcs", broken)
    summary = sweeping.run(NAME)
    assert summary["error"] == "RuntimeError: no way"
    assert SweepRun.objects.get().error == "RuntimeError: no way"


@pytest.mark.django_db(transaction=True)
def test_a_second_run_of_a_held_slot_leaves_the_work_to_the_first(run_in_thread):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(hashtext(%s), 0)", [NAME])
        try:
            assert run_in_thread(lambda: sweeping.run(NAME)) is None
        finally:
            cursor.execute("SELECT pg_advisory_unlock(hashtext(%s), 0)", [NAME])
    assert run_in_thread(lambda: sweeping.run(NAME))["error"] is None


@pytest.mark.django_db(transaction=True)
def test_many_commits_ask_for_one_tick_and_the_tick_takes_the_request():
    for _ in range(5):
        sweeping.nudge(NAME)
    assert OrmQ.objects.count() == 1
    assert Nudge.objects.get().asked
    sweeping.tick(NAME)
    assert not Nudge.objects.get().asked
    sweeping.nudge(NAME)
    assert OrmQ.objects.count() == 2


@pytest.mark.django_db
def test_schedules_are_exactly_the_table(settings):
    Schedule.objects.create(name="stray", func="os.system", args="oops")
    Schedule.objects.create(name=NAME, func="config.sweeping.tick", args="broken(")
    Schedule.objects.create(name=NAME, func="config.sweeping.tick")
    call_command("sync_schedules", stdout=StringIO())
    rows = {row.name: row for row in Schedule.objects.all()}
    assert set(rows) == set(settings.SWEEPS)
    assert Schedule.objects.count() == len(settings.SWEEPS)
    assert rows[NAME].args == repr((NAME,))
    assert rows[NAME].cron == settings.SWEEPS[NAME]["cron"]


def test_the_start_fails_on_a_sweep_without_a_function_or_with_a_bad_schedule(settings):
    wrong = {"devices.nothing": {"cron": "* * * * *"}, NAME: {"cron": "now and then"}}
    settings.SWEEPS = {**settings.SWEEPS, **wrong}
    assert {error.id for error in sweeping.check_sweeps()} == {"config.E006", "config.E007"}


def test_the_start_fails_without_any_one_of_the_sweeps(settings):
    table = settings.SWEEPS
    for name in table:
        settings.SWEEPS = {kept: plan for kept, plan in table.items() if kept != name}
        assert [error.id for error in sweeping.check_sweeps()] == ["config.E009"]
    settings.SWEEPS = table
    assert sweeping.check_sweeps() == []


def statement_timeout():
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        return cursor.fetchone()[0]


@pytest.mark.django_db
def test_a_statement_of_a_sweep_ends_before_its_task_is_killed(monkeypatch):
    before, within = statement_timeout(), []
    monkeypatch.setattr("devices.sweeps.mark_silent_pcs", lambda sweep: within.append(statement_timeout()))
    sweeping.run(NAME)
    sweeping.run(NAME, dry_run=True)
    assert within == ["1min", "1min"]  # 90 s of the task, less 20 s of budget and 10 s of margin
    assert statement_timeout() == before


@pytest.mark.django_db
def test_a_sweep_whose_statement_takes_too_long_ends_with_an_error_and_the_next_goes_on(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("config.sweeping.MARGIN", 69.99)  # leaves the least, a second
        patched.setattr("devices.sweeps.mark_silent_pcs", lambda sweep: sweep.repeat(slow_step))
        assert "statement timeout" in sweeping.run(NAME)["error"]
    assert "statement timeout" in SweepRun.objects.get().error
    assert sweeping.run(NAME)["error"] is None


def slow_step():
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(60)")
    return {"done": 1}


@pytest.mark.django_db
def test_a_page_that_takes_too_long_is_told_and_the_next_run_goes_on_behind_it():
    keys = [row.pk for row in PCFactory.create_batch(6)]

    def slow(page):
        sweep.ends = 0
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = 1")
            cursor.execute("SELECT pg_sleep(60)")

    sweep = a_sweep()
    sweep.pages(PC.objects.all(), slow, size=4)
    [told] = sweep.errors
    assert told.startswith(f"{keys[0]} … {keys[3]}: OperationalError: canceling statement due to statement timeout")
    assert sweep.counts == Counter(error=1, out_of_time=1)
    assert sweep.cursor == {"": [str(keys[3])]}


def test_a_budget_that_leaves_a_statement_no_time_fails_the_start(settings):
    settings.SWEEPS = {**settings.SWEEPS, NAME: {"cron": "* * * * *", "budget": timedelta(seconds=70)}}
    assert [error.id for error in sweeping.check_sweeps()] == ["config.E008"]


@pytest.mark.django_db
def test_a_later_run_of_the_same_task_leaves_its_statements_less_time(monkeypatch):
    within = []
    monkeypatch.setattr("devices.sweeps.mark_silent_pcs", lambda sweep: within.append(statement_timeout()))
    sweeping.run(NAME, used=20)
    assert within == ["40s"]
