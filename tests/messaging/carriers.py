"""A carrier that answers as told and remembers what it was handed: the only fake, at the edge of the house."""

import threading

import pytest

from messaging import providers
from messaging.providers import Answer
from messaging.providers.answers import accepted


class Carrier:
    idempotent = True
    receipts = True
    concurrency = 100

    def __init__(self, name="carrier"):
        self.name = name
        self.lock = threading.Lock()
        self.sent = []
        self.asked = []
        self.answer = lambda message: accepted(str(message.message_id))
        self.known = lambda message_id: None

    def send(self, batch):
        with self.lock:
            self.sent += batch
        return [self.answer(message) for message in batch]

    def query(self, message_id, provider_message_id, started_at, message=None):
        with self.lock:
            self.asked.append(message_id)
        return self.known(message_id)

    def says(self, outcome, failure_type="", scope="", **more):
        self.answer = lambda _message: Answer(outcome, failure_type, scope, more.pop("code", "x"), **more)


@pytest.fixture
def carrier(null_providers):
    """Carries all types at once, under one name."""
    found = Carrier()
    providers._built[("null", "")] = found
    return found
