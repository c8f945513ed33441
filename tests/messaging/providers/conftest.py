import json
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from messaging.providers import Outgoing, reset_providers

from .servers import H2Server, PlainServer

PUSH_TOKEN = "fGx7-device_token:APA91bH" + "x" * 120
NUMBER = "+821012345678"
ADDRESS = "kim.lee@example.com"


@pytest.fixture(autouse=True)
def fresh_providers(settings):
    settings.PROVIDER_TIMEOUT = 5.0
    reset_providers()
    yield
    reset_providers()


@pytest.fixture
def quick(settings):
    """Silence is noticed soon."""
    settings.PROVIDER_TIMEOUT = 0.4


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    ca = trustme.CA()
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    ca.path = str(path)
    return ca


@pytest.fixture(scope="session")
def certificate(authority):
    return authority.issue_cert("localhost", "127.0.0.1")


@pytest.fixture
def h2_server(certificate, authority, settings):
    settings.PROVIDER_CA_FILE = authority.path
    server = H2Server(certificate)
    yield server
    server.close()


@pytest.fixture
def plain_server():
    server = PlainServer()
    yield server
    server.close()


def pem(key):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@pytest.fixture(scope="session")
def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="session")
def ec_key():
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(scope="session")
def service_account(rsa_key):
    def make(token_uri):
        return {
            "type": "service_account",
            "project_id": "signalbox-test",
            "client_email": "sender@signalbox-test.iam.example",
            "private_key": pem(rsa_key),
            "token_uri": token_uri,
        }

    return make


@pytest.fixture
def message():
    """An outgoing message of a channel, with anything changed."""
    tokens = {"push": PUSH_TOKEN, "email": ADDRESS, "sms": NUMBER, "kakao_talk": NUMBER}
    types = {"push": "AndroidPush", "email": "Email", "sms": "SMS", "kakao_talk": "KakaoTalk"}

    def make(channel="push", **changes):
        fields = {
            "message_id": uuid4(),
            "attempt_no": 1,
            "channel_type": channel,
            "subscription_type": types[channel],
            "token": tokens[channel],
            "title": "제목 Title",
            "body": "Hello",
            "created_at": datetime(2026, 5, 1, 12, 0, tzinfo=UTC),
        }
        return Outgoing(**{**fields, **changes})

    return make


def nobody_listens():
    """A loopback port where nothing answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def dead_port():
    return nobody_listens()


@pytest.fixture
def send_one():
    """One message through a provider; its answer never holds the plain address."""

    def send(provider, message):
        [answer] = provider.send([message])
        assert message.token not in repr(answer)
        assert message.token.lstrip("+") not in json.dumps(answer.raw, ensure_ascii=False)
        return answer

    return send


def summary(answer):
    """What the next step depends on."""
    return (answer.outcome, answer.failure_type, answer.scope)


ACCEPTED = ("accepted", "", "")
NETWORK = ("transient", "network", "provider")
OUTAGE = ("transient", "outage", "provider")
UNKNOWN = ("unknown", "", "")
CONFIG = ("config", "config", "provider")
LIMITED = ("rate_limited", "rate_limited", "sender")
SOME_ID = UUID("0197f000-0000-7000-8000-000000000001")
