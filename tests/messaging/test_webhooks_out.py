"""Outgoing webhooks, to a server on loopback."""

import base64
import hashlib
import hmac
import json
import socket
import ssl
import threading
from collections import Counter
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import certifi
import pytest
import trustme
from django.utils import timezone

from config.models import IdempotencyKey
from config.sweeping import run
from messaging.models import Message, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookInbox
from messaging.services import webhooks
from messaging.services.webhooks import (
    DELAYS,
    claim_deliveries,
    create_endpoint,
    deliver_due,
    is_private,
    resend_deliveries,
)
from tests.messaging.factories import ApplicationFactory, message, subscribe

SWEEP = "messaging.deliver_webhooks"


class Receiver:
    """Answers what it is told to and keeps what it got."""

    def __init__(self):
        self.status, self.headers, self.got = 200, {}, []
        self.at_once, self.most_at_once, self.pause = 0, 0, threading.Event()
        self.seconds = 0.0  # that it takes to answer
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.at_once += 1
                receiver.most_at_once = max(receiver.most_at_once, receiver.at_once)
                receiver.pause.wait(receiver.seconds)
                receiver.at_once -= 1
                receiver.got.append((self.path, dict(self.headers.items()), body))
                self.send_response(receiver.status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                answer = b"thanks a@b.example"
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # the default 5 turns callers away when many come at once

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/hook?a=1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def told(db, settings, receiver):
    """A message of an application with an endpoint, and the endpoint's secret."""
    settings.WEBHOOK_ALLOW_PRIVATE = True
    subscription = subscribe()
    endpoint, secret = create_endpoint(subscription.application, receiver.url)
    row = message(subscription)
    row.endpoint, row.secret = endpoint, secret
    return row


def accept(row, at=None):
    Message.objects.filter(pk=row.pk).update(status="successful", sent_at=at or row.created_at + timedelta(seconds=5))


def with_nobody_listening():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def later(delta):
    return timezone.now() + delta


class TestOutbox:
    def test_each_status_change_is_told_to_each_endpoint_once(self, told):
        create_endpoint(told.application, "https://other.example/hook")
        assert not WebhookDelivery.objects.exists()
        accept(told)
        Message.objects.filter(pk=told.pk).update(status="successful", priority=1)
        assert list(WebhookDelivery.objects.values_list("event_type", flat=True)) == ["message.successful"] * 2
        assert len(set(WebhookDelivery.objects.values_list("webhook_id", flat=True))) == 2

    def test_others_hear_nothing(self, told):
        accept(message(subscribe(application=ApplicationFactory())))
        WebhookEndpoint.objects.update(active=False)
        accept(told)
        assert not WebhookDelivery.objects.exists()


class TestDelivering:
    def test_it_is_signed_by_the_standard(self, told, receiver):
        accept(told)
        assert run(SWEEP)["counts"] == {"delivered": 1}
        ((path, headers, body),) = receiver.got
        assert path == "/hook?a=1"
        key = base64.b64decode(told.secret.removeprefix("whsec_"))
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(int(headers["webhook-timestamp"]) - timezone.now().timestamp()) < 60
        said = json.loads(body)
        assert list(said) == ["type", "timestamp", "data"]
        assert said["type"] == "message.successful" and said["data"]["id"] == str(told.pk)
        assert said["data"]["status"] == "successful" and said["data"]["application"] == told.application.slug
        assert said["timestamp"].startswith("2026-03-10T03:00:05")
        attempt = WebhookAttempt.objects.get()
        assert (attempt.attempt_no, attempt.status_code, attempt.error) == (1, 200, "")
        assert attempt.answer == "thanks [email]"
        assert run(SWEEP)["counts"] == {}
        assert len(receiver.got) == 1

    def test_a_failure_is_retried_within_the_hour_with_the_same_id(self, told, receiver):
        receiver.status = 500
        accept(told)
        assert run(SWEEP)["counts"] == {"to_retry": 1}
        assert run(SWEEP)["counts"] == {}
        receiver.status = 204
        assert run(SWEEP, now=later(timedelta(hours=1)))["counts"] == {"delivered": 1}
        assert len({headers["webhook-id"] for _path, headers, _body in receiver.got}) == 1
        assert receiver.got[0][2] == receiver.got[1][2]
        assert list(WebhookAttempt.objects.order_by("id").values_list("attempt_no", "status_code")) == [
            (1, 500),
            (2, 204),
        ]

    def test_it_is_given_up_in_the_end_and_may_be_sent_again(self, told, receiver):
        receiver.status = 503
        accept(told)
        now = timezone.now()
        for delay in [timedelta(0), *DELAYS]:
            now += delay + timedelta(seconds=1)
            run(SWEEP, now=now)
        row = WebhookDelivery.objects.get()
        assert (row.attempt_count, row.given_up_at is not None) == (len(DELAYS) + 1, True)
        assert run(SWEEP, now=now + timedelta(days=9))["counts"] == {}
        receiver.status = 200
        assert resend_deliveries([row.pk], now) == 1
        assert run(SWEEP, now=now)["counts"] == {"delivered": 1}
        assert len({headers["webhook-id"] for _path, headers, _body in receiver.got}) == 1

    def test_what_happens_to_one_message_is_told_in_its_order(self, told, receiver):
        accept(told)
        at = told.created_at + timedelta(seconds=9)
        Message.objects.filter(pk=told.pk).update(status="received", received_at=at)
        Message.objects.filter(pk=told.pk).update(status="converted", converted_at=at)
        receiver.seconds = 0.1
        assert run(SWEEP)["counts"] == {"delivered": 3}
        heard = [json.loads(body)["type"] for _path, _headers, body in receiver.got]
        assert heard == ["message.successful", "message.received", "message.converted"]
        assert receiver.most_at_once == 1

    def test_an_endpoint_that_does_not_answer_is_asked_with_one_call_a_minute(self, told, receiver, monkeypatch):
        monkeypatch.setattr(webhooks, "AT_ONCE", 1)
        for row in (told, message(told.subscription), message(told.subscription)):
            accept(row)
        away = with_nobody_listening()
        WebhookEndpoint.objects.update(url=away)
        now = timezone.now() + timedelta(seconds=1)
        assert run(SWEEP, now=now)["counts"] == {"to_retry": 1, "put_back": 2}
        assert sorted(WebhookDelivery.objects.values_list("attempt_count", flat=True)) == [0, 0, 1]
        assert run(SWEEP, now=now + timedelta(seconds=49))["counts"] == {}
        now += timedelta(minutes=1)
        assert run(SWEEP, now=now)["counts"] == {"to_retry": 1}
        WebhookEndpoint.objects.update(url=receiver.url)
        now += timedelta(minutes=5)
        assert run(SWEEP, now=now)["counts"] == {"delivered": 3}
        assert WebhookEndpoint.objects.get().resting_until is None

    def test_an_endpoint_with_a_long_queue_leaves_room_for_the_others(self, told, receiver, monkeypatch):
        monkeypatch.setattr(webhooks, "SHARE", 2)
        for row in (told, message(told.subscription), message(told.subscription)):
            accept(row)
        other = subscribe(application=ApplicationFactory())
        endpoint, _secret = create_endpoint(other.application, receiver.url)
        accept(message(other))
        now = timezone.now() + timedelta(seconds=1)
        calls = claim_deliveries(now, told.pk, 3)
        assert Counter(call.endpoint_id for call in calls) == {told.endpoint.pk: 2, endpoint.pk: 1}

    def test_a_batch_begins_no_call_after_its_time(self, told, receiver, monkeypatch):
        monkeypatch.setattr(webhooks, "START_WITHIN", -1.0)
        accept(told)
        assert deliver_due(timezone.now() + timedelta(seconds=1)) == {"put_back": 1}
        row = WebhookDelivery.objects.get()
        assert (row.attempt_count, row.lease_id, receiver.got) == (0, None, [])

    def test_what_an_endpoint_does_not_take_for_days_is_given_up(self, told):
        WebhookEndpoint.objects.update(url=with_nobody_listening())
        accept(told)
        now = timezone.now() + timedelta(seconds=1)
        run(SWEEP, now=now)
        run(SWEEP, now=now + timedelta(days=4))
        assert WebhookDelivery.objects.get().given_up_at is None
        WebhookDelivery.objects.update(next_attempt_at=now)
        run(SWEEP, now=now + timedelta(days=4, seconds=1))
        assert WebhookDelivery.objects.get().given_up_at is not None

    def test_our_own_authority_is_trusted_beside_the_public_ones(self, told, receiver, settings, monkeypatch, tmp_path):
        public, own = trustme.CA(), trustme.CA()
        for authority, name in ((public, "public.pem"), (own, "own.pem")):
            authority.cert_pem.write_to_path(tmp_path / name)
        monkeypatch.setattr(certifi, "where", lambda: str(tmp_path / "public.pem"))
        settings.PROVIDER_CA_FILE = str(tmp_path / "own.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        public.issue_cert("127.0.0.1").configure_cert(context)
        receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        WebhookEndpoint.objects.update(url=receiver.url.replace("http:", "https:"))
        accept(told)
        assert run(SWEEP)["counts"] == {"delivered": 1}, WebhookAttempt.objects.values_list("error")

    def test_a_redirect_is_a_failure_and_not_followed(self, told, receiver):
        receiver.status, receiver.headers = 302, {"Location": f"http://127.0.0.1:{receiver.port}/inside"}
        accept(told)
        assert run(SWEEP)["counts"] == {"to_retry": 1}
        assert [path for path, _headers, _body in receiver.got] == ["/hook?a=1"]

    def test_an_endpoint_that_is_gone_is_switched_off(self, told, receiver):
        receiver.status = 410
        accept(told)
        run(SWEEP)
        assert WebhookEndpoint.objects.get().active is False
        assert run(SWEEP, now=later(timedelta(hours=2)))["counts"] == {}
        run(SWEEP, now=later(timedelta(days=5)))
        assert WebhookDelivery.objects.get().given_up_at is not None

    def test_nobody_listening_is_logged(self, told, receiver):
        WebhookEndpoint.objects.update(url=with_nobody_listening())
        accept(told)
        assert run(SWEEP)["counts"] == {"to_retry": 1}
        attempt = WebhookAttempt.objects.get()
        assert attempt.status_code is None and "ConnectError" in attempt.error

    def test_a_dead_senders_claim_runs_out(self, told, receiver):
        accept(told)
        now = timezone.now() + timedelta(seconds=1)
        (call,) = claim_deliveries(now, told.pk, 10)
        assert run(SWEEP, now=now)["counts"] == {}
        assert run(SWEEP, now=now + timedelta(minutes=6))["counts"] == {"delivered": 1}
        assert receiver.got[0][1]["webhook-id"] == call.webhook_id

    def test_a_dry_run_calls_nobody(self, told, receiver):
        accept(told)
        assert run(SWEEP, dry_run=True)["counts"] == {"due": 1}
        assert receiver.got == [] and WebhookDelivery.objects.get().attempt_count == 0


PRIVATE = [
    "http://127.0.0.1/", "http://localhost:8000/", "http://x.localhost/", "http://10.1.2.3/", "http://192.168.0.1/",
    "http://169.254.169.254/latest/meta-data", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::127.0.0.1]/", "http://[fd00::1]/",
    "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://0.0.0.0/", "http://100.64.0.1/",
    "http://[64:ff9b::7f00:1]/", "http://224.0.0.1/", "https://metadata.google.internal/", "http://printer.local/",
]  # fmt: skip


class TestPrivateAddresses:
    @pytest.mark.parametrize("url", PRIVATE)
    def test_they_are_refused_when_an_endpoint_is_made(self, make_client, url):
        client = sender(make_client)
        answer = client.post("/api/v1/webhook-endpoints/", {"url": url})
        assert answer.status_code == 400 and answer.json()["errors"][0]["attr"] == "url"
        assert not WebhookEndpoint.objects.exists()

    @pytest.mark.parametrize("url", PRIVATE[:3])
    def test_they_are_allowed_by_setting(self, make_client, settings, url):
        settings.WEBHOOK_ALLOW_PRIVATE = True
        assert sender(make_client).post("/api/v1/webhook-endpoints/", {"url": url}).status_code == 201

    def test_a_name_that_leads_inside_is_refused_at_each_call(self, told, receiver, settings, monkeypatch):
        settings.WEBHOOK_ALLOW_PRIVATE = False
        WebhookEndpoint.objects.update(url=f"http://rebind.example:{receiver.port}/")
        answers = iter([["93.184.216.34", "127.0.0.1"], ["127.0.0.1"]])
        resolve_to(monkeypatch, lambda: next(answers))
        accept(told)
        run(SWEEP)
        run(SWEEP, now=later(timedelta(hours=1)))
        assert receiver.got == []
        assert ["PrivateAddress" in row.error for row in WebhookAttempt.objects.all()] == [True, True]

    def test_the_call_goes_to_the_address_that_was_checked(self, told, receiver, monkeypatch):
        WebhookEndpoint.objects.update(url=f"http://hooks.example:{receiver.port}/in?x=1")
        asked = resolve_to(monkeypatch, lambda: ["127.0.0.1"])
        accept(told)
        assert run(SWEEP)["counts"] == {"delivered": 1}
        path, headers, _body = receiver.got[0]
        assert (path, headers["Host"]) == ("/in?x=1", f"hooks.example:{receiver.port}")
        assert asked.count("hooks.example") == 1

    @pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
    def test_public_ones_are_not_private(self, address):
        assert not is_private(address)


def resolve_to(monkeypatch, addresses):
    asked, real = [], socket.getaddrinfo

    def resolve(host, port, *args, **kwargs):
        asked.append(host)
        if not str(host).endswith(".example"):
            return real(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses()]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def sender(make_client, group="message-sender", username="client", application=None):
    client = make_client(group, username=username)
    (application or ApplicationFactory()).members.add(client.user)
    return client


@pytest.mark.django_db
class TestEndpoints:
    URL = "/api/v1/webhook-endpoints/"

    def test_the_secret_is_shown_once(self, make_client):
        client = sender(make_client)
        made = client.post(self.URL, {"url": "https://hooks.example/in"})
        assert made.status_code == 201
        row = made.json()
        assert row["secret"].startswith("whsec_") and len(base64.b64decode(row["secret"][6:])) == 32
        for answer in (client.get(f"{self.URL}{row['id']}/"), client.get(self.URL)):
            assert answer.status_code == 200 and "secret" not in answer.content.decode()
        assert row["secret"] not in WebhookEndpoint.objects.get().secret_encrypted

    def test_an_answer_kept_to_be_given_again_does_not_show_it(self, make_client):
        client = make_client("message-sender")
        ApplicationFactory().members.add(client.user)
        first, again = (
            client.post(self.URL, {"url": "https://x.example/"}, headers={"Idempotency-Key": "k1"}) for _ in range(2)
        )
        assert (first.status_code, again.json()) == (201, first.json())
        assert WebhookEndpoint.objects.count() == 1
        assert first.json()["secret"] not in json.dumps(IdempotencyKey.objects.get().body)

    def test_it_can_be_changed_and_removed(self, make_client):
        client = sender(make_client)
        row = client.post(self.URL, {"url": "https://hooks.example/in"}).json()
        url = f"{self.URL}{row['id']}/"
        assert client.patch(url, {"active": False}).json()["active"] is False
        assert client.patch(url, {"url": "http://127.0.0.1/"}).status_code == 400
        assert client.patch(url, {"id": row["id"]}).status_code == 400
        assert client.delete(url).status_code == 204
        assert client.get(url).status_code == 404

    @pytest.mark.parametrize(
        "body",
        [
            {}, {"url": ""}, {"url": "ftp://x.example/"}, {"url": "x"}, {"url": "http://"}, {"url": 7}, {"url": None},
            {"url": "https://u:p@x.example/"}, {"url": "https://x.example:99999/"}, {"url": "http://a b/"},
            {"url": "https://x.example/", "secret": "whsec_x"}, {"url": "https://x.example/" + "a" * 2000},
            {"url": "https://x.example/\x00"}, {"url": "https://[::1/"}, {"url": "https://ü.example/"},
        ],
    )  # fmt: skip
    def test_bad_input_is_a_400_and_writes_nothing(self, make_client, body):
        assert sender(make_client).post(self.URL, body).status_code == 400
        assert not WebhookEndpoint.objects.exists()

    def test_who_may(self, make_client):
        client = sender(make_client)
        row = client.post(self.URL, {"url": "https://hooks.example/in"}).json()
        stranger = sender(make_client, username="stranger")
        assert stranger.get(f"{self.URL}{row['id']}/").status_code == 404
        assert sender(make_client, "message-client", "phone").get(self.URL).status_code == 403
        viewer = make_client("viewer", username="viewer")
        assert viewer.get(self.URL).status_code == 200
        assert viewer.post(self.URL, {"url": "https://x.example/"}).status_code == 403


def test_old_webhooks_and_links_are_purged_and_open_ones_stay(told):
    from messaging.retention import purge

    accept(told)
    open_one = WebhookDelivery.objects.get()
    done = WebhookDelivery.objects.create(
        endpoint=told.endpoint, message_id=told.pk, event_type="message.failed", payload={}, delivered_at=timezone.now()
    )
    heard = WebhookInbox.objects.create(provider="twilio", event_id="1", state="ignored", applied_at=timezone.now())
    assert purge(later(timedelta(days=89)), False)["webhook deliveries"] == 0
    assert purge(later(timedelta(days=91)), True)["webhook deliveries"] == 1
    counts = purge(later(timedelta(days=91)), False)
    assert (counts["webhook deliveries"], counts["provider events"]) == (1, 1)
    assert list(WebhookDelivery.objects.all()) == [open_one]
    assert (
        not WebhookDelivery.objects.filter(pk=done.pk).exists()
        and not WebhookInbox.objects.filter(pk=heard.pk).exists()
    )
