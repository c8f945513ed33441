"""Whatever a client sends, the answer is never a 5xx."""

import json
import os
from functools import cache

import pytest
import schemathesis
from django.contrib.auth import get_user_model
from django.db import transaction
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from knox.models import AuthToken
from schemathesis import GenerationMode

from config.wsgi import application

EXAMPLES_PER_OPERATION = int(os.environ.get("FUZZ_EXAMPLES", 10))


@pytest.fixture
def token(db, keeps_its_connection):
    user = get_user_model().objects.create_superuser("fuzz", password=None)
    return AuthToken.objects.create(user)[1]


def assert_never_5xx(operation, headers):
    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @settings(
        max_examples=EXAMPLES_PER_OPERATION,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(modes))
    def answers(case):
        # Each example starts from the same rows, whatever the one before has written or broken.
        with transaction.atomic():
            response = case.call(headers=headers)
            transaction.set_rollback(True)
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.status_code} {response.text}"

    answers()


@cache
def operations():
    with GENERATOR_STATS.silence():
        described = SchemaGenerator().get_schema(request=None, public=True)
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(described, default=str)))
    schema.app = application
    return {operation.label: operation for operation in (result.ok() for result in schema.get_all_operations())}


@pytest.mark.parametrize("label", operations())
def test_no_input_is_answered_with_5xx(token, label):
    assert_never_5xx(operations()[label], {"Authorization": f"Token {token}"})
