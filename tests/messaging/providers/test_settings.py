"""Each variable of the providers, broken: one clear line that names it, and a start that stops."""

import json

import pytest
from django.core.exceptions import ImproperlyConfigured

from config import settings as house
from tests.config.test_settings import manage

from .conftest import pem

SMS_BY_TWILIO = {"PROVIDERS": "SMS=twilio", "TWILIO_ACCOUNT_SID": "AC1", "TWILIO_AUTH_TOKEN": "t", "TWILIO_FROM": "+1"}


def refused(parse, text):
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROVIDERS", "SMS=pigeon"),
        ("FCM_CREDENTIALS", "{"),
        ("APNS_KEY", "/nowhere/key.p8"),
        ("SMTP_URL", "http://localhost:25"),
        ("EMAIL_FROM", "nobody"),
        ("TWILIO_BASE_URL", "http://api.twilio.com"),
        ("NHN_SMS_APPKEY", "two words"),
        ("PROVIDER_CA_FILE", "/nowhere/ca.pem"),
        ("PROVIDER_TIMEOUT", "0"),
        ("WEBHOOK_ALLOW_PRIVATE", "perhaps"),
    ],
)
def test_a_bad_value_stops_the_start_with_its_name_in_one_line(name, value):
    done = manage("check", SECRET_KEY="k" * 60, **{name: value})
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: {name}: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("missing", ["TWILIO_ACCOUNT_SID", "TWILIO_AUTH_TOKEN", "TWILIO_FROM"])
def test_a_provider_without_its_credentials_stops_the_start(missing):
    done = manage("check", SECRET_KEY="k" * 60, **{**SMS_BY_TWILIO, missing: ""})
    assert done.stderr == f"error: {missing}: required by SMS=twilio of PROVIDERS\n"


def test_a_provider_with_its_credentials_starts():
    assert manage("check", SECRET_KEY="k" * 60, **SMS_BY_TWILIO).returncode == 0


def test_the_providers_of_the_specification():
    text = "iOSPush=apns, AndroidPush=fcm,Email=smtp,SMS=twilio,KakaoTalk=nhn"
    assert house.providers(text) == {
        "iOSPush": "apns", "AndroidPush": "fcm", "Email": "smtp", "SMS": "twilio", "KakaoTalk": "nhn",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["SMS", "SMS=", "SMS=apns", "Fax=null", "SMS=null,SMS=console", "sms=twilio", "Email=anymail-nobody"]
)
def test_providers_that_do_not_go_together(text):
    refused(house.providers, text)


@pytest.mark.parametrize(
    "text", ["https://api.example.com", "http://127.0.0.1:9000", "http://localhost:9000/", "http://[::1]:9000"]
)
def test_a_base_url_is_scheme_and_host(text):
    assert house.base_url(text) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "http://api.example.com",
        "http://127.0.0.1.example.com",
        "https://api.example.com/v1",
        "https://user:pw@api.example.com",
        "https://api.example.com?x=1",
        "https://api.example.com#x",
        "https://api.example.com:port",
        "ftp://api.example.com",
        "api.example.com",
        "https://",
    ],
)
def test_other_base_urls_are_refused(text):
    refused(house.base_url, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smtp://localhost:1025", ("localhost", 1025, "", "", "")),
        ("smtp://mail.example:587?starttls=1", ("mail.example", 587, "", "", "starttls")),
        ("smtp://u%40x:p%3Aw@localhost:25?starttls=0", ("localhost", 25, "u@x", "p:w", "")),
        ("smtps://u:p@mail.example", ("mail.example", 465, "u", "p", "smtps")),
        ("smtp://u:p@mail.example:25", ("mail.example", 25, "u", "p", "starttls")),
    ],
)
def test_the_address_of_a_mail_server(text, expected):
    server = house.smtp_url(text)
    assert tuple(server[key] for key in ("host", "port", "user", "password", "tls")) == expected


@pytest.mark.parametrize(
    "text",
    [
        "smtp://", "smtp://host:port", "smtp://user@host:25", "smtp://host:25/path", "smtp://host:25?tls=1",
        "smtp://host:25?starttls=maybe", "smtps://host:465?starttls=1", "smtp://host:25?starttls", "mail.example:25",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(text):
    assert "pw" not in refused(house.smtp_url, text)


def test_a_service_account_as_text_or_file(service_account, tmp_path):
    account = service_account("https://oauth2.example/token")
    path = tmp_path / "account.json"
    path.write_text(json.dumps(account))
    assert house.service_account(json.dumps(account)) == house.service_account(str(path)) == account


@pytest.mark.parametrize(
    "broken",
    [
        {"private_key": "-----BEGIN nothing"},
        {"token_uri": "http://oauth2.example/token"},
        {"token_uri": ""},
        {"project_id": 5},
        {"client_email": None},
    ],
)
def test_a_broken_service_account(service_account, broken):
    account = {**service_account("https://oauth2.example/token"), **broken}
    assert "PRIVATE" not in refused(house.service_account, json.dumps(account))


def test_apples_key_as_text_line_or_file(ec_key, rsa_key, tmp_path):
    key = pem(ec_key)
    path = tmp_path / "key.p8"
    path.write_text(key)
    assert house.signing_key(key) == house.signing_key(str(path)) == key
    assert house.signing_key(key.replace("\n", "\\n")) == key
    refused(house.signing_key, pem(rsa_key))


@pytest.mark.parametrize("text", ["0", "31", "-1", "1e3", "fast", "5s", "nan"])
def test_a_timeout_has_bounds(text):
    refused(house.seconds(0.1, 30), text)
    assert house.seconds(0.1, 30)("2.5") == 2.5


@pytest.mark.parametrize("text", ["a@b", "Sender <a@b.example>", "시그널 <a@b.example>"])
def test_a_sender_of_mail(text):
    assert house.mailbox(text) == text


@pytest.mark.parametrize("text", ["a", "a@b\nBcc: c@d", "<>", "a b <c>"])
def test_no_sender_of_mail(text):
    refused(house.mailbox, text)


def test_the_reason_never_tells_the_value_of_a_secret():
    with pytest.raises(ImproperlyConfigured) as raised:
        house.env("X", lambda text: house.credential("two words " + text), "")
        raise ImproperlyConfigured("X: ")
    assert "two words" not in str(raised.value)
