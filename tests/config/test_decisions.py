from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from config.decisions import decide, decide_bulk, record
from config.models import Decision
from tests.factories import PCFactory

pytestmark = pytest.mark.django_db


def test_any_number_of_decisions_is_one_statement(django_assert_num_queries):
    pc = PCFactory()
    with django_assert_num_queries(1):
        record([decide("rule", pc, before={}, after={}) for _ in range(500)])
    assert Decision.objects.count() == 500


def test_a_bulk_decision_carries_count_and_id_range():
    pc = PCFactory()
    record([decide_bulk("skip_stale", pc, ["b", "c", "a"], before={"status": "x"}, after={"status": "y"})])
    row = Decision.objects.get()
    assert (row.affected, row.inputs) == (3, {"first_id": "a", "last_id": "c"})
    assert row.created_at is not None


def test_one_written_by_hand_needs_no_more_than_what_it_is_about():
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO decisions (rule, object_type, object_id) VALUES ('rule', 'pcs', '1')")
    row = Decision.objects.get()
    assert (row.inputs, row.before, row.after, row.won, row.affected) == ({}, {}, {}, True, 1)


@pytest.mark.parametrize("sql", ["UPDATE decisions SET rule = 'x'", "DELETE FROM decisions", "TRUNCATE decisions"])
def test_the_record_cannot_be_changed_afterwards(sql):
    record([decide("rule", PCFactory(), before={}, after={})])
    with pytest.raises(IntegrityError) as error, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)
    assert error.value.__cause__.diag.constraint_name == "decisions_append_only"
    assert Decision.objects.get().rule == "rule"


def test_purge_retention_deletes_only_what_is_old_enough_and_a_dry_run_nothing():
    fresh, old = (decide("rule", PCFactory(), before={}, after={}) for _ in range(2))
    old.created_at = timezone.now() - timedelta(days=731)
    fresh.created_at = timezone.now() - timedelta(days=729)
    record([fresh, old])
    out = StringIO()
    call_command("purge_retention", "--dry-run", stdout=out)
    assert "would delete 1 decisions" in out.getvalue()
    assert Decision.objects.count() == 2
    call_command("purge_retention", stdout=out)
    assert Decision.objects.get().created_at == fresh.created_at
