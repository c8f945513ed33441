"""The rule of scopes: six things to hold, six to ask for, in both orders, over REST and by bare SQL."""

from itertools import product

import pytest
from django.db import IntegrityError, connection, transaction

from locks.models import Branch, LockWaiter
from tests.locks.conftest import shift

pytestmark = pytest.mark.django_db

BRANCH = ("BRANCH", None, None)
THINGS = [
    BRANCH,
    ("RESOURCE_TYPE", "a", None),
    ("RESOURCE_TYPE", "b", None),
    ("RESOURCE", "a", "1"),
    ("RESOURCE", "a", "2"),
    ("RESOURCE", "b", "1"),
]


def conflict(one, other):
    if BRANCH in (one, other):
        return True
    same_type = one[1] == other[1]
    if "RESOURCE_TYPE" in (one[0], other[0]):
        return same_type
    return one == other


PAIRS = list(product(THINGS, THINGS))


def test_there_are_36_pairs_and_the_rule_is_the_same_both_ways():
    assert len(PAIRS) == 36
    assert all(conflict(one, other) == conflict(other, one) for one, other in PAIRS)
    assert sum(conflict(one, other) for one, other in PAIRS) == 11 + 5 + 3 + 3


def name(thing):
    return "-".join(part for part in thing if part)


def ask(door, thing, branch="main"):
    scope, kind, key = thing
    fields = {"resource_type": kind, "resource_id": key}
    return door.ask(branch, scope=scope, **{name: value for name, value in fields.items() if value})


@pytest.mark.parametrize(("held", "asked"), PAIRS, ids=lambda thing: name(thing))
def test_over_rest(holder, other, held, asked):
    assert ask(holder, held).status_code == 201
    answer = ask(other, asked)
    assert answer.status_code == (409 if conflict(held, asked) else 201)
    assert ask(other, asked, branch="elsewhere").status_code == 201


def insert(branch, thing, **more):
    columns = {
        "branch_id": branch.pk,
        "lock_type": "BACKUP",
        "lock_scope": thing[0],
        "resource_type": thing[1],
        "resource_id": thing[2],
        "locked_by": "somebody",
        "reason": "by hand",
        **more,
    }
    sql = (
        f"INSERT INTO branch_locks ({', '.join(columns)}, expires_at)"
        f" VALUES ({', '.join(['%s'] * len(columns))}, now() + interval '1 hour') RETURNING fence"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, list(columns.values()))
        return cursor.fetchone()[0]


@pytest.mark.parametrize(("held", "asked"), PAIRS, ids=lambda thing: name(thing))
def test_by_bare_sql(held, asked):
    branch, elsewhere = Branch.objects.create(name="main"), Branch.objects.create(name="elsewhere")
    assert insert(branch, held) == 1
    assert insert(elsewhere, asked) == 1
    if not conflict(held, asked):
        assert insert(branch, asked) == 2
        return
    with pytest.raises(IntegrityError) as refusal, transaction.atomic():
        insert(branch, asked)
    assert refusal.value.__cause__.diag.constraint_name == "branch_locks_exclusive"


@pytest.mark.parametrize(
    "thing",
    [
        ("BRANCH", "a", None),
        ("BRANCH", None, "1"),
        ("RESOURCE_TYPE", None, None),
        ("RESOURCE_TYPE", "a", "1"),
        ("RESOURCE", "a", None),
        ("RESOURCE", None, "1"),
        ("RESOURCE", "", "1"),
        ("RESOURCE", "a", "1" * 256),
        ("EVERYTHING", "a", "1"),
    ],
)
def test_a_scope_and_its_fields_must_fit(holder, thing):
    scope, kind, key = thing
    body = {"resource_type": kind, "resource_id": key}
    assert holder.ask(scope=scope, **body).status_code == 400
    with pytest.raises(IntegrityError), transaction.atomic():
        insert(Branch.objects.create(name="main"), thing)


def test_the_longest_names_fit_the_index(holder, other):
    long = {"resource_type": "가" * 100, "resource_id": "나" * 255}
    holder.acquire("b" * 200, scope="RESOURCE", **long)
    assert other.ask("b" * 200, scope="RESOURCE", **long).status_code == 409
    assert other.ask("b" * 200, scope="RESOURCE", **long | {"resource_id": "나" * 254 + "다"}).status_code == 201


def test_names_are_compared_letter_by_letter(holder, other):
    holder.acquire("Main", scope="RESOURCE_TYPE", resource_type="Template")
    assert other.ask("main").status_code == 201
    assert other.ask("Main", scope="RESOURCE_TYPE", resource_type="template").status_code == 201
    assert other.ask("Main", scope="RESOURCE_TYPE", resource_type="Template ").status_code == 201


def test_a_fence_given_by_hand_lifts_the_branch(holder):
    branch = Branch.objects.create(name="main")
    assert insert(branch, THINGS[1], fence=7) == 7
    assert Branch.objects.get().fence == 7
    assert holder.acquire(scope="RESOURCE_TYPE", resource_type="b")["fence"] == 8


def test_the_fence_of_a_branch_only_grows():
    branch = Branch.objects.create(name="main", fence=5)
    with pytest.raises(IntegrityError):
        Branch.objects.filter(pk=branch.pk).update(fence=4)


def test_a_lock_ended_by_bare_sql_tells_when(holder, other):
    lock = holder.acquire()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE branch_locks SET state = 'released' WHERE id = %s", [str(lock["lock_id"])])
    assert holder.lock(lock, history=1).data["released_at"] is not None
    assert other.ask().status_code == 201


def test_the_database_knows_the_kinds_of_events(holder):
    holder.acquire()
    with pytest.raises(IntegrityError, match="branch_lock_events_kind"), connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO branch_lock_events (branch_id, kind, actor) SELECT id, 'WHATEVER', 'x' FROM branches"
        )


def refused(constraint, statement, *values):
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.mark.parametrize("time", ["infinity", "-infinity"])
def test_every_time_is_one_that_can_be_read(holder, time):
    holder.release(holder.acquire())
    for table, *columns in (
        ("branches", "indexing_started_at", "indexing_completed_at", "created_at"),
        ("branch_locks", "locked_at", "expires_at", "last_heartbeat", "estimated_at", "released_at", "expired_at"),
    ):
        for column in columns:
            refused(f"{table}_times", f"UPDATE {table} SET {column} = %s", time)
    events = "INSERT INTO branch_lock_events (branch_id, kind, created_at) SELECT id, 'HEARTBEAT', %s FROM branches"
    refused("branch_lock_events_times", events, time)


@pytest.mark.parametrize(
    ("column", "number"), [("progress", "NaN"), ("progress", 100.1), ("estimated_remaining_hours", "infinity")]
)
def test_what_a_heartbeat_told_is_a_number_that_can_be_shown(holder, column, number):
    holder.acquire()
    refused("branch_locks_progress", f"UPDATE branch_locks SET {column} = %s", number)


@pytest.mark.parametrize(
    ("column", "value"), [("deadline_at", "infinity"), ("seen_at", "infinity"), ("terms", "[]"), ("terms", "null")]
)
def test_no_waiter_stops_the_releases_of_its_branch(holder, column, value):
    holder.acquire()
    waiter = f"INSERT INTO branch_lock_waiters (branch_id, state, {column}) SELECT id, 'waiting', %s FROM branches"
    refused("branch_lock_waiters_(times|terms)", waiter, value)


def test_a_lock_of_the_contracts_columns_alone_blocks_like_any_other(holder, other):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO branches (name, state, fence) VALUES ('main', 'ACTIVE', 0)")
        cursor.execute("INSERT INTO branch_locks (branch_id, state) SELECT id, 'active' FROM branches")
        cursor.execute("INSERT INTO branch_lock_events (branch_id, kind) SELECT id, 'CONFLICT' FROM branches")
    [blocker] = other.ask(scope="RESOURCE", resource_type="a", resource_id="1").data["conflicts"]
    assert (blocker["locked_by"], blocker["lock_scope"]) == ("sql", "BRANCH")
    shift(blocker, expires_at=-1)
    assert other.ask().status_code == 201


@pytest.mark.parametrize("columns", [{}, {"terms": '{"reason": "a", "of another version": 1}'}])
def test_a_waiter_by_bare_sql_stands_in_line_and_in_nobodys_way(holder, other, columns):
    lock = holder.acquire()
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO branch_lock_waiters ({', '.join(['branch_id', 'state', *columns])})"
            f" SELECT id, 'waiting' {''.join(', %s' for _column in columns)} FROM branches",
            list(columns.values()),
        )
    assert holder.release(lock).status_code == 204
    assert LockWaiter.objects.get().state == "granted"
    assert other.ask().data["conflicts"][0]["locked_by"] == "sql"
    shift({"lock_id": LockWaiter.objects.get().lock_id}, expires_at=-1)
    assert other.ask().status_code == 201


def test_a_waiter_asks_for_what_can_be_granted(holder):
    holder.acquire()
    with pytest.raises(IntegrityError, match="scope_fits"), connection.cursor() as cursor:
        cursor.execute("INSERT INTO branch_lock_waiters (branch_id, lock_scope) SELECT id, 'RESOURCE' FROM branches")
