"""What only a browser can tell: it runs, in both languages and both schemes, and nothing leaves the machine."""

from collections import Counter
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.utils import timezone

from config import integrity
from config.models import Canary, Decision, SweepRun
from tests.browser.conftest import PASSWORD

PAGES = (
    "/admin/",
    "/admin/integrity/",
    "/admin/config/sweeprun/",
    "/admin/config/decision/",
    "/admin/auth/user/",
    "/admin/knox/authtoken/",
    "/admin/django_q/schedule/",
    "/api/docs/",
)


@pytest.fixture
def some_rows(boss: User) -> SweepRun:
    now = timezone.now()
    fields = {"name": "config.purge_expired", "now": now, "started_at": now, "ended_at": now}
    SweepRun.objects.create(**fields, error="ValueError: boom")
    run = SweepRun.objects.create(**fields, counts={"purged": 12, "kept": 3})
    Canary.objects.create(host="web-1", asked_at=now, answered_at=now)
    for number in range(5):
        Decision.objects.create(
            run_id=run.pk,
            rule="rescue_stuck_attempt",
            object_type="sweep_runs",
            object_id=str(run.pk),
            before={"status": "sending"},
            after={"status": "error"},
            won=number != 2,
        )
    return run


@pytest.fixture
def idle_users(boss: User, monkeypatch: pytest.MonkeyPatch) -> None:
    User.objects.bulk_create(User(username=f"idle{n}", is_active=False) for n in range(7))

    def rouse(now: Any) -> Counter[str]:
        return Counter(roused=User.objects.filter(is_active=False).update(is_active=True))

    def inactive(now: Any) -> Any:
        return User.objects.filter(is_active=False)

    found = [
        integrity.Invariant(
            "users_are_active", "error", "Inactive users cannot sign in.", inactive, rouse, "wakes them"
        ),
        integrity.Invariant("users_are_quiet", "warning", "Nobody mends this one alone.", inactive),
        integrity.Invariant("users_exist", "info", "There is a user.", lambda now: User.objects.none()),
    ]
    monkeypatch.setattr(integrity, "invariants", lambda: {one.name: one for one in found})


@pytest.mark.parametrize(("locale", "word"), [("en-GB", "Dashboard"), ("ko-KR", "대시보드")])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_free_of_errors_and_strangers(
    visit: Any, some_rows: SweepRun, locale: str, word: str, scheme: str
) -> None:
    seen = visit(locale, scheme)
    seen.login("boss")
    assert word in seen.text()
    for path in (*PAGES, f"/admin/config/sweeprun/{some_rows.pk}/change/"):
        seen.go(path, until="networkidle")
        if path.startswith("/admin/"):
            dark = seen.page.evaluate("document.documentElement.classList.contains('dark')")
            assert dark is (scheme == "dark"), path
    assert seen.problems == []
    assert seen.strangers == []


def test_dashboard_refreshes_itself(visit: Any, some_rows: SweepRun) -> None:
    seen = visit()
    seen.login("boss")
    Canary.objects.create(host="web-2", asked_at=timezone.now())
    seen.page.wait_for_selector("text=web-2")
    assert seen.problems == []


def test_heal_flow(visit: Any, idle_users: None) -> None:
    seen = visit()
    seen.login("boss")
    seen.go("/admin/integrity/")
    seen.page.click("#users_are_active >> text=Heal")
    seen.page.wait_for_selector("text=wakes them")
    assert User.objects.filter(is_active=False).exists()
    seen.page.click("button:has-text('Heal')")
    seen.page.wait_for_selector("text=roused 7")
    assert not User.objects.filter(is_active=False).exists()
    assert seen.problems == []


def test_viewer_sees_no_buttons(visit: Any, some_rows: SweepRun, idle_users: None) -> None:
    viewer = User.objects.create_user("viewer", password=PASSWORD, is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename__in=["view_integrity", "view_sweeprun"]))
    seen = visit()
    seen.login("viewer")
    assert "users_are_active" in seen.go("/admin/integrity/").inner_text("#content")
    assert seen.page.locator("#content .sb-button").count() == 0
    seen.go(f"/admin/config/sweeprun/{some_rows.pk}/change/")
    assert seen.page.locator("[name=_save]").count() == 0


def test_theme_switch_turns_the_lights_off(visit: Any, boss: User) -> None:
    seen = visit()
    seen.login("boss")
    seen.page.click("text=unfold_more >> nth=-1")
    seen.page.click("a:has-text('dark_mode')")
    seen.page.wait_for_selector("html.dark")
    seen.go("/admin/")
    seen.page.wait_for_selector("html.dark")
