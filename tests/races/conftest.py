"""Real threads, real connections, real commits: what only breaks when two do it at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from django.db import connection


@pytest.fixture
def at_once(transactional_db):
    """Call each function in a thread of its own, all released together; results in order, errors as values."""

    def call(*functions):
        barrier = Barrier(len(functions), timeout=30)

        def start(function):
            try:
                connection.ensure_connection()
                barrier.wait()
                return function()
            except Exception as error:
                return error
            finally:
                connection.close()

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(start, functions))

    return call
