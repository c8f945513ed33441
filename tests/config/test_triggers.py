import pgtrigger
import pytest
from django.db import IntegrityError, connection, transaction

from devices.models import PC

pytestmark = pytest.mark.django_db


def test_asking_whether_to_fire_needs_no_subtransaction():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT lanname FROM pg_proc JOIN pg_language ON pg_language.oid = prolang"
            " WHERE proname = '_pgtrigger_should_ignore'"
        )
        assert cursor.fetchall() == [("sql",)]


def test_a_trigger_fires_unless_it_is_ignored():
    with pytest.raises(IntegrityError), transaction.atomic():
        PC.objects.create(pc_number="PC-01", status="asleep")
    with pgtrigger.ignore("devices.PC:status_born"):
        PC.objects.create(pc_number="PC-01", status="asleep")
    with pytest.raises(IntegrityError), transaction.atomic():
        PC.objects.create(pc_number="PC-02", status="asleep")
