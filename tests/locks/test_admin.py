"""The admin's pages of locks: what an operator sees and may do."""

import json
import re
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.db import connection
from django.urls import reverse

from locks.admin import span
from locks.models import Branch, BranchLock, LockEvent, LockWaiter
from locks.services.acquiring import try_acquire
from tests.locks.conftest import kinds, shift
from tests.races.test_locks import request

pytestmark = pytest.mark.django_db
LOCKS = reverse("admin:locks_branchlock_changelist")


@pytest.fixture
def signed_in(client):
    def sign_in(group):
        user = User.objects.create_user(f"staff-{group}", password="x", is_staff=True)
        user.groups.set([Group.objects.get(name=group)])
        client.force_login(user, settings.AUTHENTICATION_BACKENDS[-1])
        return client

    return sign_in


def text(response):
    assert response.status_code == 200
    return response.content.decode()


def test_the_list_shows_health_countdown_and_progress(holder, signed_in):
    lock = holder.acquire(kind="INDEXING")
    holder.beat(lock, progress_info={"progress": 65, "estimated_remaining_hours": 0.1})
    page = signed_in("viewer")
    shown = text(page.get(LOCKS))
    assert "healthy" in shown and "3 h 59 min" in shown
    assert re.search(r"65 % · (6 min 0|5 min \d+) s", shown)
    shift(lock, last_heartbeat=-200)
    assert "warning" in text(page.get(LOCKS))
    shift(lock, last_heartbeat=-361)
    assert "critical" in text(page.get(f"{LOCKS}?health=critical"))
    holder.acquire("b")
    assert "no heartbeat" in text(page.get(LOCKS))


def test_every_page_opens_for_those_who_may_see(holder, other, signed_in):
    lock = holder.acquire("a/b", scope="RESOURCE", resource_type="template", resource_id="<7>")
    other.ask("a/b")
    holder.beat(lock)
    try_acquire(request("patient", branch="a/b"), 30)
    page = signed_in("operator")
    branch = Branch.objects.get()
    shown = text(page.get(reverse("admin:locks_branch_change", args=[branch.pk])))
    assert "patient" in shown and "&lt;7&gt;" in shown
    shown = text(page.get(reverse("admin:locks_branchlock_change", args=[lock["lock_id"]])))
    assert "heartbeat" in shown and "acquired" in shown
    for model in ("branch", "lockwaiter", "lockevent"):
        text(page.get(reverse(f"admin:locks_{model}_changelist")))
    assert "Locks" in text(page.get(reverse("admin:index")))


def test_the_page_of_a_branch_shows_its_line_in_the_time_of_the_house(holder, signed_in, settings):
    settings.TIME_ZONE = "Asia/Seoul"
    page = signed_in("operator")
    holder.acquire()
    waiter = LockWaiter.objects.get(pk=try_acquire(request("patient"), 30).waiter.pk)
    shown = text(page.get(reverse("admin:locks_branch_change", args=[waiter.branch_id])))
    assert f"patient: BRANCH   · {waiter.deadline_at.astimezone(ZoneInfo('Asia/Seoul')):%H:%M:%S}" in shown


def act(page, url, action, chosen, **more):
    data = {"action": action, "_selected_action": [str(chosen[0])], **more}
    return page.post(url, data, follow=True)


def confirm(page, url, action, keys, reason="stuck since the crash"):
    return act(page, url, action, keys, confirmed="yes", keys=",".join(map(str, keys)), reason=reason)


def test_force_unlock_asks_first_naming_the_locks_and_leaves_a_trace(holder, signed_in):
    lock = holder.acquire()
    page = signed_in("lock-admin")
    asked = text(act(page, LOCKS, "force_unlock", [lock["lock_id"]]))
    assert "main" in asked and holder.name in asked and 'name="reason"' in asked
    text(confirm(page, LOCKS, "force_unlock", [lock["lock_id"]], reason=""))
    assert kinds(lock) == ["ACQUIRED"]
    text(confirm(page, LOCKS, "force_unlock", [lock["lock_id"]]))
    event = LockEvent.objects.get(kind="FORCE_RELEASED")
    assert (event.actor, event.reason) == ("staff-lock-admin", "stuck since the crash")
    assert LogEntry.objects.get().object_id == str(lock["lock_id"])


def test_only_a_lock_admin_has_the_actions(holder, signed_in):
    lock = holder.acquire()
    page = signed_in("operator")
    assert 'value="force_unlock"' not in text(page.get(LOCKS))
    confirm(page, LOCKS, "force_unlock", [lock["lock_id"]])
    assert kinds(lock) == ["ACQUIRED"]


def test_extend(holder, signed_in):
    lock, dead = holder.acquire("a"), holder.acquire("b")
    shift(dead, expires_at=-1)
    told = text(confirm(signed_in("lock-admin"), LOCKS, "extend_4h", [lock["lock_id"], dead["lock_id"]]))
    assert kinds(lock) == ["ACQUIRED", "EXTENDED"]
    assert kinds(dead) == ["ACQUIRED"]
    assert "extended 1" in told and "lock_gone 1" in told


def test_the_state_of_a_branch_changes_by_its_edges_only(holder, signed_in):
    lock = holder.acquire()
    url, page, branch = reverse("admin:locks_branch_changelist"), signed_in("lock-admin"), Branch.objects.get()
    assert holder.name in text(act(page, url, "force_unlock_branches", [branch.pk]))
    text(confirm(page, url, "force_unlock_branches", [branch.pk]))
    assert kinds(lock)[-1] == "FORCE_RELEASED"
    for action, state in (("set_error", "ERROR"), ("archive", "ERROR"), ("set_active", "ACTIVE")):
        text(confirm(page, url, action, [branch.pk]))
        assert Branch.objects.get().state == state
    assert not BranchLock.objects.active().exists()


def test_the_list_costs_the_same_with_many_locks(holder, signed_in, django_assert_max_num_queries):
    for n in range(12):
        holder.acquire(f"b{n}")
    page = signed_in("viewer")
    with django_assert_max_num_queries(12):
        page.get(LOCKS)


def test_the_counts_of_a_branch_do_not_multiply_its_locks_by_its_waiters(holder):
    branch = Branch.objects.create(name="main")
    with connection.cursor() as cursor:
        for table, columns, ended in (
            ("branch_locks", "lock_scope, resource_type) SELECT %s, 'RESOURCE_TYPE', n::text", "released"),
            ("branch_lock_waiters", "client) SELECT %s, n::text", "timed_out"),
        ):
            cursor.execute(f"INSERT INTO {table} (branch_id, {columns} FROM generate_series(1, 100) AS n", [branch.pk])
            cursor.execute(f"UPDATE {table} SET state = %s", [ended])
    holder.acquire()
    for _n in range(2):
        try_acquire(request("patient"), 30)
    rows = admin.site.get_model_admin(Branch).get_queryset(None)
    assert [(row.held_count, row.waiting_count) for row in rows] == [(1, 2)]

    def read(node):
        return max([node["Actual Rows"], *(read(child) for child in node.get("Plans", ()))])

    assert read(json.loads(rows.explain(analyze=True, format="json"))[0]["Plan"]) <= 103


def test_spans_read_well():
    assert [span(seconds) for seconds in (5, -65, 3600, 90061)] == ["5 s", "1 min 5 s", "1 h 0 min", "25 h 1 min"]
