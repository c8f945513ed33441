"""What an operator does in the console, by hand, in a real browser."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import axe_playwright_python
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils import timezone

from campaigns.models import Enrollment, Execution, Sequence
from locks import demo as locks_demo
from locks.models import BranchLock
from messaging.models import Message
from tests.campaigns.factories import DAY, ReplyFactory, SenderFactory, SequenceFactory, work
from tests.messaging.factories import message_in, subscribe

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
LISTS = (
    "/admin/campaigns/lead/", "/admin/messaging/message/", "/admin/locks/branchlock/", "/admin/devices/pc/",
    "/admin/reminders/alarm/", "/admin/config/sweeprun/",
)  # fmt: skip


def faults(page: Any) -> list[str]:
    """What axe-core calls serious or critical. Debugging scripts may run where the page's policy allows none."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{page.url} {fault['id']}: {node['html'][:200]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


def one_of(model: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[model.objects.first().pk])


WIDER = """() => document.documentElement.scrollWidth > document.documentElement.clientWidth
    || [...document.querySelectorAll('#content *')].some(part =>
    ['auto', 'scroll'].includes(getComputedStyle(part).overflowX) && part.scrollWidth > part.clientWidth + 1
    && part.querySelector('#result_list'))"""


def test_every_page_fits_and_shuts_nobody_out(visit: Any, demo: None) -> None:
    """In English by day and in Korean by night."""
    main = [
        "/admin/",
        "/admin/integrity/",
        "/admin/campaigns/sequence/",
        one_of(Sequence),
        "/admin/messaging/messagerollup/",
    ]
    rest = ["/admin/devices/task/queue/", *LISTS, one_of(Enrollment), one_of(Message), one_of(BranchLock)]
    for locale, scheme, paths in (("en-GB", "light", main + rest), ("ko-KR", "dark", main)):
        seen = visit(locale, scheme)
        found = faults(seen.go("/admin/"))
        seen.login("boss")
        for path in paths:
            page = seen.go(path, until="load")
            found += faults(page) + ([f"{path} is too wide"] if page.evaluate(WIDER) else [])
        assert found == []
        # Its two boxes are Django's own, and so are their faults.
        assert not seen.go(one_of(User), until="load").evaluate(WIDER)
        assert seen.problems == []
        assert seen.strangers == []
    numbers_are_the_database_s(visit)


def numbers_are_the_database_s(visit: Any) -> None:
    ReplyFactory(enrollment=work(status="sent", enrollment="replied").enrollment, received_at=timezone.now())
    # The demo's night may be still, and what is none is not shown.
    message_in("received", subscribe(type="InAppMessage"), at=timezone.now())
    seen = visit()
    seen.login("boss")
    text, now = " ".join(seen.text().split()), timezone.now()
    today = Message.objects.filter(created_at__gte=now.replace(hour=0, minute=0, second=0, microsecond=0))
    assert f"{today.filter(sent_at__isnull=False).count()} accepted" in text
    assert f"{today.filter(received_at__isnull=False).count()} delivered" in text
    assert f"{Sequence.objects.filter(status='paused').count()} paused" in text
    assert "1 receiving replies" in text
    assert f"{BranchLock.objects.filter(state='active').count()} held" in text


def test_filtering_finalizing_shows_those_and_says_until_when(visit: Any, boss: User) -> None:
    ending = work(status="sent", enrollment="completed").enrollment.sequence
    running = work(sender=SenderFactory(), due=timezone.now() + DAY).enrollment.sequence
    seen = visit()
    seen.login("boss")
    seen.page.click(".sb-figure:has-text('finalizing')")
    seen.page.wait_for_selector("#result_list")
    names = seen.page.inner_text("#result_list")
    assert ending.name in names
    assert running.name not in names
    assert "completed by the next tick" in seen.page.inner_html("#result_list")
    assert seen.problems == []


def test_skip_stale_previews_then_skips(visit: Any, boss: User) -> None:
    old = work(sender=SenderFactory(), due=timezone.now() - timedelta(days=4000))
    seen = visit()
    seen.login("boss")
    choose(seen, "/admin/campaigns/sequence/", old.enrollment.sequence.pk, "skip_stale")
    assert "1 stale" in seen.text()
    assert Execution.objects.get(pk=old.pk).status == "pending"
    confirm(seen, "forgotten since spring")
    assert Execution.objects.get(pk=old.pk).skip_reason == "stale"
    page = seen.go(reverse("admin:campaigns_sequence_change", args=[old.enrollment.sequence_id]))
    story = page.inner_text("#timeline")
    assert "boss: Skip stale steps" in story and "forgotten since spring" in story
    assert "A person had the forgotten steps skipped." in story
    assert seen.problems == []


def choose(seen: Any, path: str, pk: Any, action: str) -> None:
    page = seen.go(path)
    page.check(f"input[name=_selected_action][value='{pk}']")
    page.select_option("select[name=action]", action)
    page.click("button[name=index]")
    page.wait_for_selector(".sb-lines")


def confirm(seen: Any, reason: str) -> None:
    seen.page.fill("textarea[name=reason]", reason)
    seen.page.click(".sb-form button[type=submit]")
    seen.page.wait_for_selector("#result_list")


def test_force_unlock_needs_a_reason_and_tells_it(visit: Any, boss: User) -> None:
    locks_demo.seed(1, lambda line: None)
    lock = BranchLock.objects.get(branch__name="demo/object-links", resource_type="link_type", state="active")
    seen = visit()
    seen.login("boss")
    choose(seen, "/admin/locks/branchlock/", lock.pk, "force_unlock")
    assert "demo/object-links" in seen.page.inner_text(".sb-lines")
    assert seen.page.get_attribute("textarea[name=reason]", "required") is not None
    assert BranchLock.objects.get(pk=lock.pk).state == "active"
    confirm(seen, "its holder crashed")
    assert BranchLock.objects.get(pk=lock.pk).state == "force_released"
    assert LogEntry.objects.filter(object_id=str(lock.pk), user__username="boss").exists()
    assert "its holder crashed" in seen.go(one_page(lock)).inner_text("#timeline")
    assert seen.problems == []


def one_page(row: Any) -> str:
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])


def test_a_lead_s_page_tells_its_whole_story(visit: Any, boss: User) -> None:
    row = work(SequenceFactory(name="Spring"), status="sent", enrollment="replied", due=timezone.now())
    ReplyFactory(enrollment=row.enrollment, text="Please call me.", received_at=timezone.now())
    seen = visit()
    seen.login("boss")
    seen.go(f"/admin/campaigns/lead/?q={row.enrollment.lead.email}")
    seen.page.click("#result_list tbody a >> nth=0")
    story = seen.page.wait_for_selector("#timeline").inner_text()
    assert "enrolled in Spring" in story
    assert "1. Hello · sent" in story
    assert "reply: human" in story and "Please call me." in story
    seen.page.click("#timeline a:has-text('enrolled in Spring')")
    seen.page.wait_for_selector("#explain")
    assert seen.problems == []


def test_a_campaign_is_written_filled_and_started(visit: Any, boss: User) -> None:
    sender = SenderFactory()
    seen = visit()
    seen.login("boss")
    page = seen.go("/admin/campaigns/sequence/add/", "load")
    page.fill("#id_name", "Spring")
    page.select_option("#id_application", str(sender.application_id))
    page.click("text=Add another Sender")
    page.select_option("[name=pool-0-sender]", str(sender.pk))
    page.select_option("[name=steps-0-channel]", "email")
    page.fill("[name=steps-0-delay_seconds]", "soon")
    page.fill("[name=steps-0-subject]", "Hello {{name}}")
    page.fill("[name=steps-0-body]", "<p>About {{plan}}</p>")
    page.click("[name=_continue]")
    page.wait_for_selector("text=Write it like 3 d")
    page.fill("[name=steps-0-delay_seconds]", "2 h")
    page.click("[name=_continue]")
    page.click("text=Enroll leads…")
    page.fill("#id_text", "name,email,plan\nJiwoo,jiwoo@example.com,gold\nNobody,x,\n")
    page.click("button:has-text('Import')")
    page.wait_for_selector("text=Line 3")
    sequence = Sequence.objects.get()
    page = seen.go(reverse("admin:campaigns_sequence_change", args=[sequence.pk]), "load")
    page.click(".sb-acts >> text=Activate")
    page.click(".sb-form button[type=submit]")
    page.wait_for_selector(".sb-acts >> text=Pause")
    assert Sequence.objects.get().status == "active"
    assert Execution.objects.get().step.delay_seconds == 7200
    assert seen.problems == [] and seen.strangers == []
