import time
from uuid import uuid4

import pytest

from messaging.providers import Outgoing, masked, provider_for, reset_providers
from messaging.providers.answers import RAW_LENGTH
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


def test_the_console_tells_of_the_message_but_neither_address_nor_content(caplog):
    message = outgoing(body="for t0ken-of-a-device")
    [answer] = Console().send([message])
    printed = caplog.text
    assert answer.outcome == "accepted"
    assert str(message.message_id) in printed
    assert "Hello" not in printed and "t0ken-of-a-device" not in printed


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


@pytest.mark.parametrize("sign", ["x", "9", "["])
def test_a_megabyte_without_a_blank_keeps_nobody_busy(sign):
    started = time.monotonic()
    assert masked(sign * 1_000_000, "+821012345678") == sign * RAW_LENGTH
    assert time.monotonic() - started < 5


def test_half_an_address_at_the_end_of_what_is_looked_at_is_not_kept():
    token = "abcdefghij" * 16
    kept = masked(token * 6 + "y" * 300 + token, token)
    assert "abcdefghij" not in kept
