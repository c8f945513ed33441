import pytest

from config import integrity
from messaging import demo
from messaging.models import Message, MessageEvent

pytestmark = pytest.mark.django_db


def test_the_demo_shows_every_state_breaks_nothing_and_comes_once():
    said = []
    demo.seed(1, said.append)
    assert set(Message.objects.values_list("status", flat=True)) == set(Message.Status.values)
    assert set(Message.objects.values_list("channel_type", flat=True)) == {
        "push",
        "email",
        "sms",
        "kakao_talk",
        "in_app",
    }
    assert MessageEvent.objects.filter(event_type="retried").exists()
    assert [r for r in integrity.report() if r.name.startswith("messaging.") and r.count] == []
    count = Message.objects.count()
    demo.seed(1, said.append)
    assert Message.objects.count() == count
    assert len(said) == 2
