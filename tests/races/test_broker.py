from datetime import timedelta

import pytest
from django.conf import settings
from django.utils import timezone
from django_q.brokers import get_broker
from django_q.models import OrmQ

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_task_is_claimed_by_one_cluster_only(at_once):
    past = timezone.now() - timedelta(minutes=1)
    name = settings.Q_CLUSTER["name"]
    OrmQ.objects.bulk_create([OrmQ(key=name, payload=str(n), lock=past) for n in range(24)])
    claims = at_once(*[lambda: [get_broker().dequeue()[0][0] for _ in range(4)]] * 6)
    taken = [key for claim in claims for key in claim]
    assert sorted(taken) == sorted(OrmQ.objects.values_list("pk", flat=True))
