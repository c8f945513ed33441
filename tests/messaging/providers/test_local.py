from uuid import uuid4

import pytest

from messaging.providers import Outgoing, masked, provider_for, reset_providers
from messaging.providers.local import Console


@pytest.fixture(autouse=True)
def fresh():
    reset_providers()
    yield
    reset_providers()


def outgoing(**changes):
    fields = {
        "message_id": uuid4(),
        "attempt_no": 1,
        "channel_type": "push",
        "subscription_type": "AndroidPush",
        "token": "t0ken-of-a-device",
        "title": "Hello",
    }
    return Outgoing(**{**fields, **changes})


def test_a_type_left_out_has_no_provider(settings):
    settings.PROVIDERS, settings.DEBUG = {}, False
    assert provider_for("SMS") is None


def test_under_debug_a_type_left_out_goes_to_the_console(settings):
    settings.PROVIDERS, settings.DEBUG = {"Email": "null"}, True
    assert provider_for("SMS").name == "console"
    assert provider_for("Email").name == "null"


def test_in_app_messages_need_no_provider_of_the_environment(settings):
    settings.PROVIDERS, settings.DEBUG = {}, False
    [answer] = provider_for("InAppMessage").send([outgoing()])
    assert answer.outcome == "accepted"


def test_a_provider_is_built_once(settings):
    settings.PROVIDERS = {"SMS": "null"}
    assert provider_for("SMS") is provider_for("SMS")


def test_the_console_tells_the_message_and_not_the_address(caplog):
    [answer] = Console().send([outgoing(body="for t0ken-of-a-device")])
    printed = caplog.text
    assert answer.outcome == "accepted"
    assert "Hello" in printed
    assert "t0ken-of-a-device" not in printed


@pytest.mark.parametrize(
    ("token", "echo"),
    [
        ("+821012345678", "no such number 01012345678"),
        ("+821012345678", "no such number 821012345678"),
        ("+821012345678", "to=%2B821012345678"),
        ("Kim.Lee@Example.com", "<kim.lee@example.com>: unknown"),
        ("a+b@example.com", "a%2Bb%40example.com"),
        ("abc:DEF_123", "token ABC:def_123 is bad"),
        ("x" * 163, "y" * 480 + "x" * 163),
    ],
)
def test_no_spelling_of_the_address_is_kept(token, echo):
    kept = masked(echo, token).lower()
    assert token.lower().lstrip("+") not in kept
    assert "1012345678" not in kept
    assert "example.com" not in kept
    assert "xxxx" not in kept
