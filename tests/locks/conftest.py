import pytest
from django.db import connection

from locks.services.waiting import ROOM

PREFIX = "/api/v1/branch-locks"


@pytest.fixture(autouse=True, scope="session")
def _let_the_listener_leave(django_db_setup):
    """Its connection would keep the test database from being dropped."""
    yield
    if ROOM.listener:
        ROOM.listener.join()


@pytest.fixture
def holder(make_client):
    return Door(make_client("lock-holder", username="indexer"))


@pytest.fixture
def other(make_client):
    return Door(make_client("lock-holder", username="migrator"))


@pytest.fixture
def admin(make_client):
    return Door(make_client("lock-admin", username="boss"))


@pytest.fixture
def viewer(make_client):
    return Door(make_client("viewer", username="guest"))


class Door:
    """A client of the lock API: paths are below the prefix, answers are DRF's."""

    def __init__(self, client):
        self.client = client
        self.name = client.user.username

    def get(self, path, **query):
        return self.client.get(f"{PREFIX}{path}", query)

    def post(self, path, body=None, **headers):
        return self.client.post(f"{PREFIX}{path}", {} if body is None else body, headers=headers or None)

    def delete(self, path, body=None):
        return self.client.delete(f"{PREFIX}{path}", body)

    def ask(self, branch="main", kind="MAINTENANCE", scope="BRANCH", *, key=None, **more):
        body = {"branch_name": branch, "lock_type": kind, "lock_scope": scope, "reason": "night work", **more}
        return self.post("/acquire/", body, **({"Idempotency-Key": key} if key else {}))

    def acquire(self, *args, **more):
        answer = self.ask(*args, **more)
        assert answer.status_code == 201, answer.data
        return answer.data

    def release(self, lock):
        return self.delete(f"/locks/{lock['lock_id']}/?fence={lock['fence']}")

    def beat(self, lock, **more):
        return self.post(f"/locks/{lock['lock_id']}/heartbeat/", {"fence": lock["fence"], **more})

    def extend(self, lock, hours, **more):
        return self.post(
            f"/locks/{lock['lock_id']}/extend-ttl/", {"fence": lock["fence"], "extension_hours": hours, **more}
        )

    def lock(self, lock, **query):
        return self.get(f"/locks/{lock['lock_id']}/", **query)

    def health(self, lock):
        return self.get(f"/locks/{lock['lock_id']}/health/")

    def check(self, branch="main", **more):
        return self.post("/check/", {"branch_name": branch, **more}).data


def shift(lock, **columns):
    """Move times of a lock as a person with SQL would: seconds from now."""
    sets = ", ".join(f"{name} = statement_timestamp() + make_interval(secs => %s)" for name in columns)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE branch_locks SET {sets} WHERE id = %s", [*columns.values(), str(lock["lock_id"])])


def kinds(lock):
    with connection.cursor() as cursor:
        cursor.execute("SELECT kind FROM branch_lock_events WHERE lock_id = %s ORDER BY id", [str(lock["lock_id"])])
        return [row[0] for row in cursor.fetchall()]
