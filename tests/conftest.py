import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.db.backends.postgresql.operations import DatabaseOperations
from knox.models import AuthToken
from rest_framework.test import APIClient


def _flush_past_append_only(self, using, sql_list):
    """Append-only tables refuse TRUNCATE always, so emptying the test database steps around the triggers."""
    from django.apps import apps
    from django.db import connections, transaction

    tables = [m._meta.db_table for m in apps.get_models() if getattr(m._meta, "triggers", None)]
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        for table in tables:
            cursor.execute(f'ALTER TABLE "{table}" DISABLE TRIGGER USER')
        for sql in sql_list:
            cursor.execute(sql)
        for table in tables:
            cursor.execute(f'ALTER TABLE "{table}" ENABLE TRIGGER USER')


DatabaseOperations.execute_sql_flush = lambda self, sql_list: _flush_past_append_only(
    self, self.connection.alias, sql_list
)


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """Rows that are rolled back look like none to autovacuum, and plans for none take minutes over thousands."""
    from django.apps import apps
    from django.db import connection

    with django_db_blocker.unblock(), connection.cursor() as cursor:
        for model in apps.get_models(include_auto_created=True):
            if model._meta.managed and not model._meta.proxy:
                cursor.execute(f'ALTER TABLE "{model._meta.db_table}" SET (autovacuum_enabled = off)')


@pytest.fixture(autouse=True)
def _nothing_remembered():
    """What a page keeps for a minute would be the next test's."""
    from django.core.cache import cache

    cache.clear()


@pytest.fixture
def make_client(db):
    """An API client with a knox token in the groups named."""

    def make(*groups, username="client", **user_fields):
        user, _ = get_user_model().objects.get_or_create(username=username, defaults=user_fields)
        user.groups.set(Group.objects.filter(name__in=groups))
        _row, token = AuthToken.objects.create(user)
        client = APIClient()
        client.credentials(HTTP_AUTHORIZATION=f"Token {token}")
        client.user = user
        return client

    return make


@pytest.fixture
def keeps_its_connection():
    """Between requests Django closes a connection that is inside a transaction, which here is the test's own."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def run_in_thread():
    """Call something in a thread with its own connection, and give back its result or raise its error."""
    from concurrent.futures import ThreadPoolExecutor

    from django.db import connection

    def call(function):
        def with_own_connection():
            try:
                return function()
            finally:
                connection.close()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(with_own_connection).result(timeout=60)

    return call
