"""The rule of scopes: six things to hold, six to ask for, in both orders, over REST and by bare SQL."""

from itertools import product

import pytest
from django.db import IntegrityError, connection, transaction

from locks.models import Branch

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
