"""The write gate, as other apps use it."""

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.translation import override

from config.errors import Conflict, Unavailable
from locks.models import Branch, BranchLock
from locks.services import Locked, LockRequest, acquire_lock, check_write, set_branch_state

pytestmark = pytest.mark.django_db


def lock(branch="main", scope="BRANCH", client="holder", kind="MAINTENANCE", **terms):
    return acquire_lock(LockRequest(branch, kind, scope, client, "night work", **terms))[0]


def test_an_unlocked_branch_lets_everybody_write_and_is_made_on_first_use():
    check_write("main", "template", "7")
    assert Branch.objects.get().state == "ACTIVE"


@pytest.mark.parametrize("table", ["branches", "branch_locks"])
def test_a_lock_store_that_cannot_be_asked_refuses_the_write(table):
    with pytest.raises(Unavailable), transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO away")
        check_write("main", "template", "7")


def test_a_write_shares_the_row_of_the_branch():
    Branch.objects.create(name="main")
    with CaptureQueriesContext(connection) as queries:
        check_write("main", "template", "7")
    assert any("FOR SHARE" in query["sql"] for query in queries.captured_queries)


@pytest.mark.parametrize(
    ("scope", "resource_type", "resource_id", "blocks"),
    [
        ("BRANCH", None, None, True),
        ("RESOURCE_TYPE", "template", None, True),
        ("RESOURCE_TYPE", "sequence", None, False),
        ("RESOURCE", "template", "7", True),
        ("RESOURCE", "template", "8", False),
        ("RESOURCE", "sequence", "7", False),
    ],
)
def test_a_write_conflicts_like_an_acquire_of_its_scope(scope, resource_type, resource_id, blocks):
    held = lock(scope=scope, resource_type=resource_type, resource_id=resource_id)
    if not blocks:
        check_write("main", "template", "7")
        return
    with pytest.raises(Locked) as refusal:
        check_write("main", "template", "7", actor="somebody")
    assert refusal.value.body["locked_by"] == held.locked_by
    assert refusal.value.status == 423


@pytest.mark.parametrize(
    ("terms", "english", "korean"),
    [
        ({}, "The branch main is locked by holder: night work", "브랜치 main: holder 님이"),
        (
            {"scope": "RESOURCE", "resource_type": "template", "resource_id": "7"},
            "template 7 on main is locked by holder: night work",
            "main의 template 7: holder 님이",
        ),
    ],
)
def test_a_refusal_says_what_is_locked_in_the_language_of_its_reader(terms, english, korean):
    lock(**terms)
    with pytest.raises(Locked) as refusal:
        check_write("main", "template", "7")
    assert refusal.value.body["message"] == refusal.value.detail == english
    with override("ko"), pytest.raises(Locked) as refusal:
        check_write("main", "template", "7")
    assert refusal.value.detail.startswith(korean)


def test_the_holder_passes_with_its_lock_and_fence_only():
    held = lock()
    check_write("main", "template", "7", lock_id=held.pk, fence=held.fence, actor="holder")
    with pytest.raises(Locked):
        check_write("main", "template", "7", actor="holder")
    for wrong in ({"fence": held.fence + 1}, {"actor": "other"}, {"lock_id": "0" * 8 + str(held.pk)[8:]}):
        with pytest.raises(Conflict) as refusal:
            check_write("main", None, None, **{"lock_id": held.pk, "fence": held.fence, "actor": "holder"} | wrong)
        assert refusal.value.code == "stale_fence"


def test_a_dead_lock_is_refused_even_if_nothing_else_blocks():
    held = lock()
    BranchLock.objects.update(expires_at="2020-01-01T00:00Z")
    with pytest.raises(Conflict) as refusal:
        check_write("main", "template", "7", lock_id=held.pk, fence=held.fence, actor="holder")
    assert refusal.value.code == "stale_fence"
    check_write("main", "template", "7", actor="somebody")


@pytest.mark.parametrize("state", ["ARCHIVED", "ERROR"])
def test_a_closed_branch_refuses_every_write(state):
    set_branch_state("main", state, "admin", "broken")
    with pytest.raises(Locked) as refusal:
        check_write("main", "template", "7")
    assert refusal.value.body["locked_by"] is None
    assert state in refusal.value.body["message"]


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_it_is_a_programming_error():
    with pytest.raises(transaction.TransactionManagementError):
        check_write("main", None, None)
