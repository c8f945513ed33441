"""The admin's own promises."""

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.db import connection, models
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone, translation
from django_fsm import FSMField, transition

from config import console, integrity, sweeping
from config.admin import SweepRunAdmin
from config.console import badges, base, panels
from config.console.actions import BATCH
from config.errors import Conflict
from config.models import BulkAction, Canary, Decision, IntegrityReading, SweepRun

pytestmark = pytest.mark.django_db
CHANGELIST = "admin:config_sweeprun_changelist"


@pytest.fixture
def boss(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("boss", password="x"), settings.AUTHENTICATION_BACKENDS[-1])
    return client


@pytest.fixture
def looker(client: Client) -> Client:
    user = User.objects.create_user("looker", password="x", is_staff=True)
    names = ["view_sweeprun", "view_decision", "view_integrity"]
    user.user_permissions.set(Permission.objects.filter(codename__in=names, content_type__app_label="config"))
    client.force_login(user, settings.AUTHENTICATION_BACKENDS[-1])
    return client


def sweep_runs(count: int, **fields: Any) -> list[SweepRun]:
    now = timezone.now()
    plain = {"name": "config.purge_expired", "now": now, "started_at": now, "ended_at": now, **fields}
    return SweepRun.objects.bulk_create(SweepRun(**plain) for _number in range(count))


@pytest.fixture
def idle_users(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An invariant over a table that is always there: users must be active."""
    User.objects.bulk_create(User(username=f"idle{n}", is_active=False) for n in range(30))

    def rouse(now: Any) -> Counter[str]:
        return Counter(roused=User.objects.filter(is_active=False).update(is_active=True))

    invariant = integrity.Invariant(
        name="users_are_active",
        severity="error",
        explanation="A user who is not active cannot sign in.",
        violations=lambda now: User.objects.filter(is_active=False),
        healer=rouse,
        heals="sets them active",
    )
    monkeypatch.setattr(integrity, "invariants", lambda: {invariant.name: invariant})
    return list(User.objects.filter(is_active=False).values_list("pk", flat=True))


# --- site and dashboard


def test_dashboard_shows_the_foundation_panels(boss: Client) -> None:
    cache.clear()  # the report of another test's rows may still be kept
    sweep_runs(1, counts={"purged": 3})
    Canary.objects.create(host="web-1", asked_at=timezone.now(), answered_at=timezone.now())
    Decision.objects.create(rule="rescue", object_type="tasks", object_id="7", before={"s": "a"}, after={"s": "b"})
    page = boss.get(reverse("admin:index")).content.decode()
    for text in ("purged 3", "web-1", "rescue", "s: a → b", "Every invariant holds."):
        assert text in page


def test_dashboard_names_what_was_decided_about_and_says_what_the_rule_means(
    boss: Client, monkeypatch: pytest.MonkeyPatch, django_assert_max_num_queries: Any
) -> None:
    runs = sweep_runs(3)
    for key in [*(run.pk for run in runs), "written by hand"]:
        Decision.objects.create(rule="rescue.late", object_type="sweep_runs", object_id=str(key))
    monkeypatch.setattr(admin.site._registry[SweepRun], "rule_words", {"rescue": "Its worker had died."})
    with django_assert_max_num_queries(2):
        said = base.told(Decision.objects.order_by("id"))
    assert [name for _one, name, _story in said] == [*map(str, runs), "sweep_runs written by hand"]
    assert {story for _one, _name, story in said} == {"Its worker had died."}
    assert "Its worker had died." in boss.get(reverse("admin:panels")).content.decode()


def test_dashboard_measures_again_what_the_sweep_found_broken(boss: Client, idle_users: list[int]) -> None:
    integrity.keep_reading("users_are_active", timezone.now())
    assert "users_are_active" in boss.get(reverse("admin:panels")).content.decode()
    User.objects.update(is_active=True)
    cache.clear()  # a minute later
    assert "Every invariant holds." in boss.get(reverse("admin:panels")).content.decode()


def test_dashboard_marks_a_sweep_that_missed_two_ticks_as_late(boss: Client) -> None:
    sweep_runs(1, started_at=timezone.now() - timezone.timedelta(hours=1))
    assert "late" in boss.get(reverse("admin:panels")).content.decode()


@pytest.mark.parametrize(("minutes", "late"), [(4, False), (9, False), (16, True)])
def test_lateness_allows_one_skipped_tick(minutes: int, late: bool) -> None:
    started = timezone.now().replace(minute=0, second=1, microsecond=0)
    assert panels.is_late("*/5 * * * *", started, started + timezone.timedelta(minutes=minutes)) is late


def test_dashboard_reads_a_bounded_number_of_rows_whatever_the_table_sizes(boss: Client) -> None:
    boss.get(reverse("admin:panels"))
    with CaptureQueriesContext(
        connection,
    ) as few:
        boss.get(reverse("admin:panels"))
    sweep_runs(500)
    with CaptureQueriesContext(connection) as many:
        boss.get(reverse("admin:panels"))
    assert len(many) == len(few) <= 40
    unbounded = [query["sql"] for query in many if "COUNT(" in query["sql"].upper() and "LIMIT" not in query["sql"]]
    assert unbounded == []


def test_panels_need_a_login(client: Client) -> None:
    assert client.get(reverse("admin:panels")).status_code == 302


def test_navigation_leaves_out_what_a_person_may_not_see(looker: Client) -> None:
    page = looker.get(reverse("admin:index"))
    titles = {str(item["title"]) for group in page.context["sidebar_navigation"] for item in group["items"]}
    assert {"Dashboard", "Integrity", "Sweeps", "Decisions", "API docs"} <= titles
    assert not {"Users", "Tokens", "Schedules"} & titles


def test_every_registered_page_opens(boss: Client) -> None:
    sweep_runs(2, error="boom")
    Decision.objects.create(rule="rescue", object_type="sweep_runs", object_id="7")
    for model in admin.site._registry:
        if model._meta.app_label in ("config", "auth", "knox", "axes", "django_q"):
            url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
            assert boss.get(url).status_code == 200, url


# --- integrity


def test_integrity_page_explains_counts_and_links_samples(boss: Client, idle_users: list[int]) -> None:
    page = boss.get(reverse("admin:integrity")).content.decode()
    assert "cannot sign in" in page
    assert reverse("admin:auth_user_change", args=[min(idle_users)]) in page


def test_heal_asks_first_then_mends_and_leaves_an_audit_row(boss: Client, idle_users: list[int]) -> None:
    url = reverse("admin:integrity_heal", args=["users_are_active"])
    asked = boss.get(url).content.decode()
    assert "<b>30</b>" in asked and "and 10 more" in asked and "sets them active" in asked
    assert User.objects.filter(is_active=False).count() == 30
    assert "roused 30" in boss.post(url, follow=True).content.decode()
    assert not User.objects.filter(is_active=False).exists()
    assert LogEntry.objects.get().change_message == ('{"action": "heal users_are_active", "details": {"roused": 30}}')


def test_integrity_page_shows_the_course_and_the_heals(boss: Client, idle_users: list[int]) -> None:
    now = timezone.now()
    for hours, count in ((5, 0), (3, 12), (1, 30)):
        IntegrityReading.objects.create(name="users_are_active", count=count, measured_at=now - timedelta(hours=hours))
    assert integrity.trends(now) == {"users_are_active": [0, 12, 30]}
    boss.post(reverse("admin:integrity_heal", args=["users_are_active"]))
    page = boss.get(reverse("admin:integrity")).content.decode()
    assert 'class="sb-spark' in page
    assert "boss: heal users_are_active" in page and "roused: 30" in page


def test_viewer_reads_the_integrity_page_and_may_not_heal(looker: Client, idle_users: list[int]) -> None:
    assert "Heal" not in looker.get(reverse("admin:integrity")).content.decode()
    assert looker.post(reverse("admin:integrity_heal", args=["users_are_active"])).status_code == 403
    assert User.objects.filter(is_active=False).count() == 30


def test_healing_something_unknown_is_a_404(boss: Client) -> None:
    assert boss.post(reverse("admin:integrity_heal", args=["nonsense"])).status_code == 404


# --- confirmed actions


class Toy(SweepRunAdmin):
    calls: list[list[Any]] = []
    poison: Any = None
    refuses = False

    def _end(ids: list[Any], actor: Any, reason: str) -> Counter[str]:  # type: ignore[misc]
        if Toy.refuses:
            raise Conflict("not today")
        if Toy.poison in ids:
            raise ValueError("poison")
        Toy.calls.append(ids)
        return Counter(ended=SweepRun.objects.filter(pk__in=ids).update(error=reason))

    actions = [console.confirmed_action("End them", None, _end, permissions=["config.run_sweeps"], name="end_them")]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    # The URLs are bound to the registered instance, so that one becomes the toy.
    monkeypatch.setattr(admin.site._registry[SweepRun], "actions", Toy.actions)
    monkeypatch.setattr(admin.site._registry[SweepRun], "__class__", Toy)
    Toy.calls, Toy.poison, Toy.refuses = [], None, False
    return Toy


def ask(client: Client, keys: list[Any], across: bool = False) -> Any:
    data = {"action": "end_them", "_selected_action": keys, "select_across": int(across), "index": 0}
    return client.post(reverse(CHANGELIST), data)


def confirm(client: Client, keys: list[Any], reason: str = "stuck") -> Any:
    joined = ",".join(map(str, keys))
    data = {"action": "end_them", "_selected_action": keys[:1], "confirmed": "yes", "keys": joined, "reason": reason}
    return client.post(reverse(CHANGELIST), data, follow=True)


def test_confirmed_action_first_shows_how_many_and_which(boss: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(25)
    page = ask(boss, [run.pk for run in runs]).content.decode()
    assert "<b>25</b>" in page and "and 5 more" in page
    assert str(runs[0]) in page
    assert not toy.calls


def test_confirmed_action_wants_a_reason(boss: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(1)
    assert "This field is required" in confirm(boss, [runs[0].pk], reason=" ").content.decode()
    assert not toy.calls


def test_ten_thousand_rows_are_worked_off_in_the_background(boss: Client, toy: type[Toy], settings: Any) -> None:
    settings.SWEEP_BUDGET = timedelta(minutes=5)  # one run does it all, on a busy machine too
    runs = sweep_runs(10_000)
    with CaptureQueriesContext(connection) as asking:
        page = ask(boss, [runs[0].pk], across=True)
    assert page.context["count"] == 10_000
    with CaptureQueriesContext(connection) as handing_over:
        answer = confirm(boss, page.context["keys"].split(","))
    assert len(asking) < 20 and len(handing_over) < 70, (len(asking), len(handing_over))
    assert "/ 10000" in answer.content.decode() and not toy.calls
    with CaptureQueriesContext(connection) as working:
        done = sweeping.run("config.run_bulk_actions")
    assert done and done["counts"] == {"ended": 10_000} and done["error"] is None
    assert [len(ids) for ids in toy.calls] == [BATCH] * 20
    assert len(working) < 400, len(working)
    assert LogEntry.objects.filter(object_id__in=[str(run.pk) for run in runs]).count() == 10_000
    assert SweepRun.objects.filter(error="stuck").count() == 10_000
    bulk = BulkAction.objects.get()
    assert bulk.status == "finished" and bulk.counts == {"ended": 10_000}
    assert "10000" in boss.get(reverse("admin:bulk_progress", args=[bulk.pk])).content.decode()
    bulk.counts = {"stopped": 10_000}
    bulk.save(update_fields=["counts"])
    korean = boss.get(reverse("admin:bulk_progress", args=[bulk.pk]), headers={"accept-language": "ko"})
    assert "stopped" not in korean.content.decode()
    again = sweeping.run("config.run_bulk_actions")
    assert again and again["counts"] == {}


def test_a_poison_row_of_a_bulk_action_is_named_and_the_rest_goes_on(boss: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(501)
    Toy.poison = runs[7].pk
    confirm(boss, [run.pk for run in runs])
    done = sweeping.run("config.run_bulk_actions")
    assert done and done["counts"] == {"ended": 500, "error": 1}
    bulk = BulkAction.objects.get()
    assert bulk.status == "finished" and bulk.counts == {"ended": 500, "error": 1}
    page = boss.get(reverse("admin:config_bulkaction_change", args=[bulk.pk])).content.decode()
    assert str(runs[7].pk) in page and "ValueError: poison" in page


def test_a_refusal_is_told_and_changes_nothing(boss: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(2)
    Toy.refuses = True
    assert "End them: not today" in confirm(boss, [run.pk for run in runs]).content.decode()
    assert not SweepRun.objects.filter(error="stuck").exists()
    assert not LogEntry.objects.exists()


def test_confirmed_action_is_refused_without_its_permission(looker: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(1)
    assert "End them" not in looker.get(reverse(CHANGELIST)).content.decode()
    confirm(looker, [runs[0].pk])
    assert not toy.calls


def test_confirmed_action_refuses_keys_that_are_none(boss: Client, toy: type[Toy]) -> None:
    runs = sweep_runs(1)
    data = {"action": "end_them", "_selected_action": [runs[0].pk], "confirmed": "yes", "keys": "x'", "reason": "r"}
    assert boss.post(reverse(CHANGELIST), data).status_code == 403


# --- viewers, timelines, badges, counts


def test_viewer_looks_and_cannot_touch(looker: Client) -> None:
    run = sweep_runs(1)[0]
    url = reverse("admin:config_sweeprun_change", args=[run.pk])
    assert looker.get(url).status_code == 200
    assert looker.post(url, {"name": "x"}).status_code == 403
    data = {"action": "run_now", "_selected_action": [run.pk], "index": 0}
    looker.post(reverse(CHANGELIST), data)
    assert not LogEntry.objects.exists()


def test_nobody_changes_a_schedule_by_hand(boss: Client) -> None:
    assert boss.get(reverse("admin:django_q_schedule_add")).status_code == 403


def test_run_now_enqueues_a_tick_per_sweep(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_q.models import OrmQ

    runs = sweep_runs(3)
    data = {"action": "run_now", "_selected_action": [run.pk for run in runs], "index": 0}
    boss.post(reverse(CHANGELIST), data)
    assert [task.func() for task in OrmQ.objects.all()] == ["config.sweeping.tick"]


def test_timeline_merges_decisions_people_and_events_newest_first(boss: Client) -> None:
    run = sweep_runs(1)[0]
    Decision.objects.create(rule="rescued", object_type="sweep_runs", object_id=str(run.pk), after={"s": "b"})
    console.record_human_action(User.objects.get(), run, "poked", "because", {"n": 1})
    entries = base.ConsoleAdmin(SweepRun, admin.site).timeline(run)
    assert {entry.title for entry in entries} == {"rescued", "boss: poked"}
    assert [entry.at for entry in entries] == sorted((entry.at for entry in entries), reverse=True)
    page = boss.get(reverse("admin:config_sweeprun_change", args=[run.pk])).content.decode()
    assert "boss: poked" in page and "because · n: 1" in page


def test_changes_are_told_in_words_and_times_of_the_reader() -> None:
    decision = Decision(
        before={"status": "active", "resume_at": None},
        after={"status": "paused", "resume_at": "2026-11-25T00:00:00+00:00", "who": "T-1"},
    )
    with translation.override("ko"), timezone.override("Asia/Seoul"):
        told = base.change_text(decision)
        last = base.change_text(Decision(before={}, after={"until": "9999-12-31T23:59:59+00:00"}))
    assert last == "until: – → 9999-12-31T23:59:59+00:00"
    assert told == "상태: 활성 → 일시정지 · 재개 시각: – → 2026-11-25 09:00:00 · who: – → T-1"


def test_list_of_decisions_names_their_objects_in_few_queries(boss: Client) -> None:
    runs = sweep_runs(20)
    for run in runs:
        Decision.objects.create(
            rule="rescued", object_type="sweep_runs", object_id=str(run.pk), after={"status": "active"}
        )
    Decision.objects.create(rule="rescued", object_type="elsewhere", object_id="7")
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = boss.get(reverse("admin:config_decision_changelist")).content.decode()
    assert str(runs[0]) in page and "elsewhere 7" in page
    assert len(queries) < 15


def test_an_empty_list_offers_what_can_be_done_about_it(boss: Client) -> None:
    empty = boss.get(reverse("admin:config_bulkaction_changelist")).content.decode()
    assert "Nothing here yet" in empty and "Reset filters" not in empty
    filtered = boss.get(reverse("admin:config_bulkaction_changelist"), {"status__exact": "running"}).content.decode()
    assert "Nothing matches" in filtered and "Reset filters" in filtered


def test_history_leads_to_the_timeline(boss: Client) -> None:
    run = sweep_runs(1)[0]
    answer = boss.get(reverse("admin:config_sweeprun_history", args=[run.pk]))
    assert answer.url == reverse("admin:config_sweeprun_change", args=[run.pk]) + "#timeline"


class Kettle(models.Model):  # noqa: DJ008
    status = FSMField(default="cold", choices=[("cold", "Cold"), ("hot", "Hot")])
    liveness = {"cold": SimpleNamespace()}

    class Meta:
        app_label = "kettles"
        managed = False

    @transition(status, source="cold", target="hot")
    def boil(self) -> None: ...


def test_badge_check_fails_when_a_state_has_no_colour() -> None:
    errors = badges.colour_errors(SimpleNamespace(model=Kettle, state_colours={"cold": "info"}))
    assert [error.id for error in errors] == ["config.E010"] and "hot" in errors[0].msg


def test_badge_check_knows_the_tones() -> None:
    painted = SimpleNamespace(model=Kettle, state_colours={"cold": "info", "hot": "pink"})
    assert [error.id for error in badges.colour_errors(painted)] == ["config.E011"]
    assert not badges.colour_errors(SimpleNamespace(model=Kettle, state_colours={"cold": "info", "hot": "danger"}))


def test_badge_escapes_and_tells_why() -> None:
    show = console.badge("status", labels={"hot": "<hot>"}, tooltip=lambda kettle: 'it "boils"')
    html = show(SimpleNamespace(state_colours={"hot": "danger"}), Kettle(status="hot"))
    assert "&lt;hot&gt;" in html and "it &quot;boils&quot;" in html and "bg-red-100" in html


def test_liveness_names_the_responsible(monkeypatch: pytest.MonkeyPatch) -> None:
    from config.statemachine import Rests, Swept, WaitsFor

    monkeypatch.setattr(Kettle, "liveness", {"cold": Swept("kitchen.boil", "after 5 min")})
    assert "kitchen.boil" in console.owner(Kettle(status="cold")).body  # type: ignore[union-attr]
    monkeypatch.setattr(Kettle, "liveness", {"cold": WaitsFor("the cook")})
    assert "the cook" in console.owner(Kettle(status="cold")).title  # type: ignore[union-attr]
    monkeypatch.setattr(
        Kettle, "liveness", {"cold": Swept("kitchen.boil", "after 5 min", instead=lambda _: Rests("Off"))}
    )
    assert console.owner(Kettle(status="cold")).body == "Off"  # type: ignore[union-attr]
    assert console.owner(Kettle(status="hot")).kind == "nobody"  # type: ignore[union-attr]


def test_paginator_counts_small_tables_exactly_and_estimates_big_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_runs(30)
    rows = SweepRun.objects.order_by("pk")
    assert base.EstimatingPaginator(rows, 10).count == 30
    monkeypatch.setattr(base, "EXACT_UP_TO", 10)
    guessed = base.EstimatingPaginator(rows.filter(error=""), 10).count
    assert guessed > 10 and str(guessed).startswith("≈")


# --- languages


def test_dashboard_speaks_korean(boss: Client) -> None:
    with translation.override("ko"):
        page = boss.get(reverse("admin:index"), headers={"accept-language": "ko"}).content.decode()
    assert "대시보드" in page and "무결성" in page
