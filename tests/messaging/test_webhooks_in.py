"""Providers' events: checked, kept once, applied in any order, never a step back."""

import json
from datetime import timedelta
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from config.sweeping import run
from messaging.models import Message, Subscription, Suppression, WebhookInbox
from messaging.providers.answers import rejected
from messaging.providers.webhooks import Event, twilio_signature
from messaging.services.incoming import receive_events
from messaging.services.subscriptions import enable_subscription
from tests.messaging.factories import message, message_in, subscribe

pytestmark = pytest.mark.django_db
NOW = timezone.now()
SWEEP = "messaging.apply_parked_events"


@pytest.fixture(autouse=True)
def credentials(settings):
    settings.TWILIO_AUTH_TOKEN = "twilio-secret"
    settings.NHN_WEBHOOK_SIGNATURE = "nhn-secret"


def accepted(type="SMS", sid="SM1", **fields):
    row = message_in("successful", subscribe(type=type, **fields), at=NOW - timedelta(hours=1))
    Message.objects.filter(pk=row.pk).update(provider_message_id=sid)
    return row


def twilio(client, signature=None, path="/api/v1/webhooks/twilio/", **fields):
    url = f"http://localhost:8000{path}"
    signed = url + "".join(f"{key}{value}" for key, value in sorted(fields.items()))
    signature = signature if signature is not None else twilio_signature("twilio-secret", signed)
    return client.post(
        path,
        urlencode(fields),
        content_type="application/x-www-form-urlencoded",
        headers={"x-twilio-signature": signature},
    )


def nhn(client, *hooks, signature="nhn-secret", event="MESSAGE_RESULT_UPDATE"):
    return client.post(
        "/api/v1/webhooks/nhn/",
        json.dumps({"hooksId": "1", "event": event, "hooks": list(hooks)}),
        content_type="application/json",
        headers={"x-toast-webhook-signature": signature},
    )


def status_of(row):
    return Message.objects.values_list("status", flat=True).get(pk=row.pk)


def inbox():
    return list(WebhookInbox.objects.order_by("id").values_list("event_id", "state"))


class TestTwilio:
    def test_delivered_is_a_receipt(self, client):
        row = accepted()
        answer = twilio(client, MessageSid="SM1", MessageStatus="delivered", To="+821012345678")
        assert answer.status_code == 200
        assert status_of(row) == "received"
        assert inbox() == [("SM1:delivered", "applied")]

    @pytest.mark.parametrize("status", ["failed", "undelivered"])
    def test_failed_and_undelivered_fail(self, client, status):
        row = accepted()
        assert twilio(client, MessageSid="SM1", MessageStatus=status, ErrorCode="30005").status_code == 200
        row = Message.objects.get(pk=row.pk)
        assert (row.status, row.error_reason) == ("failed", "unknown_number")
        assert Subscription.objects.get(pk=row.subscription_id).status == -52

    def test_again_changes_nothing(self, client):
        row = accepted()
        for _time in range(3):
            assert twilio(client, MessageSid="SM1", MessageStatus="delivered").status_code == 200
        assert Message.objects.get(pk=row.pk).version == 2
        assert WebhookInbox.objects.count() == 1

    def test_never_a_step_back(self, client):
        row = accepted()
        twilio(client, MessageSid="SM1", MessageStatus="delivered")
        twilio(client, MessageSid="SM1", MessageStatus="sent")
        twilio(client, MessageSid="SM1", MessageStatus="failed", ErrorCode="30005")
        assert status_of(row) == "received"
        assert [state for _id, state in inbox()] == ["applied", "ignored", "ignored"]
        assert Subscription.objects.get(pk=row.subscription_id).status == 1

    @pytest.mark.parametrize("signature", ["", "nonsense", "é"])
    def test_a_bad_signature_is_403_and_nothing_is_stored(self, client, signature):
        row = accepted()
        answer = twilio(client, signature, MessageSid="SM1", MessageStatus="delivered")
        assert answer.status_code == 403 and answer.json()["errors"][0]["code"] == "bad_signature"
        assert not WebhookInbox.objects.exists() and status_of(row) == "successful"

    def test_the_signed_address_is_the_public_one(self, client, settings):
        settings.PUBLIC_URL = "https://box.example"
        signed = "https://box.example/api/v1/webhooks/twilio/" + "MessageSidSM1MessageStatusdelivered"
        signature = twilio_signature("twilio-secret", signed)
        assert twilio(client, signature, MessageSid="SM1", MessageStatus="delivered").status_code == 200

    def test_without_a_secret_nobody_is_believed(self, client, settings):
        settings.TWILIO_AUTH_TOKEN = ""
        assert twilio(client, MessageSid="SM1", MessageStatus="delivered").status_code == 403

    def test_signed_nonsense_is_a_400(self, client):
        assert twilio(client, Foo="bar").status_code == 400
        assert not WebhookInbox.objects.exists()

    def test_the_number_is_in_no_column(self, client):
        twilio(client, MessageSid="SM1", MessageStatus="delivered", To="+821012345678")
        row = WebhookInbox.objects.get()
        assert "1012345678" not in json.dumps([row.payload, row.event_id, row.note])


class TestParking:
    def test_an_unknown_message_is_parked_and_applied_when_it_is_known(self, client):
        assert twilio(client, MessageSid="SM9", MessageStatus="delivered").status_code == 200
        assert inbox() == [("SM9:delivered", "parked")]
        assert run(SWEEP)["counts"] == {}
        row = accepted(sid="SM9")
        assert run(SWEEP)["counts"] == {"applied": 1}
        assert status_of(row) == "received"
        assert run(SWEEP)["counts"] == {}

    def test_an_event_that_outran_our_own_record_waits_for_it(self, client):
        row = message(subscribe(type="SMS"), now=NOW)
        Message.objects.filter(pk=row.pk).update(provider_message_id="SM1", lease_id=uuid4(), leased_until=NOW)
        twilio(client, MessageSid="SM1", MessageStatus="failed", ErrorCode="30005")
        assert status_of(row) == "pending"
        Message.objects.filter(pk=row.pk).update(status="successful", sent_at=NOW, lease_id=None, leased_until=None)
        run(SWEEP)
        assert status_of(row) == "failed"

    def test_what_never_matches_is_abandoned_after_three_days(self, client):
        twilio(client, MessageSid="SM9", MessageStatus="delivered")
        assert run(SWEEP, now=timezone.now() + timedelta(hours=71))["counts"] == {}
        assert run(SWEEP, now=timezone.now() + timedelta(hours=73))["counts"] == {"abandoned": 1}

    def test_a_providers_word_resolves_an_unknown_outcome(self, client):
        row = message(subscribe(type="SMS"), now=NOW)
        Message.objects.filter(pk=row.pk).update(hold_reason="outcome_unknown", attempt_count=1)
        hook = {"hookId": "h1", "requestId": "r1", "recipientSeq": 1, "resultCode": "1000"}
        nhn(client, {**hook, "recipientGroupingKey": str(row.pk)})
        row = Message.objects.get(pk=row.pk)
        assert (row.status, row.hold_reason) == ("received", None)


class TestNHN:
    @pytest.mark.parametrize("told", [{"kakaoMessageType": "ALIMTALK_NORMAL", "recipientSeq": 1}, {}])
    def test_a_kakao_result_that_did_not_reach_becomes_an_sms(self, client, told):
        kakao = accepted("KakaoTalk", "req", user_id="u1")
        number = subscribe(kakao.application, "SMS", user_id="u1")
        hook = {"hookId": "hook-1", "requestId": "req", "resultCode": "3019", **told}
        assert nhn(client, hook).status_code == 200
        assert nhn(client, hook).status_code == 200
        assert status_of(kakao) == "failed"
        assert Subscription.objects.get(pk=kakao.subscription_id).status == -60
        assert Message.objects.get(failover_of=kakao).subscription_id == number.pk
        assert inbox() == [("hook-1", "applied")]

    def test_the_same_number_means_something_else_of_a_text(self, client):
        text = accepted("SMS", "req", user_id="u1")
        nhn(client, {"hookId": "1", "requestId": "req", "resultCode": "3019", "kakaoMessageType": "odd"})
        assert status_of(text) == "failed"
        assert Subscription.objects.get(pk=text.subscription_id).status == 1
        assert not Message.objects.filter(failover_of=text).exists()

    def test_a_kakao_result_that_may_still_come_moves_nothing(self, client):
        kakao = accepted("KakaoTalk", "req")
        nhn(client, {"hookId": "1", "requestId": "req", "resultCode": "3005"})
        assert (status_of(kakao), inbox()) == ("successful", [("1", "ignored")])

    def test_nested_beyond_reading_is_malformed(self, client):
        headers = {"x-toast-webhook-signature": "nhn-secret"}
        body = '{"hooks":' + "[" * 100_000
        answer = client.post("/api/v1/webhooks/nhn/", body, content_type="application/json", headers=headers)
        assert answer.status_code == 400

    def test_what_cannot_be_stored_is_stored_without_it(self, client):
        kakao = accepted("KakaoTalk", "req")
        odd = {"hookId": "a\x00\ud800", "requestId": "r\ud800", "resultCode": "9\x00\ud800"}
        time_out_of_range = {
            "hookId": "2",
            "requestId": "req",
            "resultCode": "1000",
            "receiveDate": "0001-01-01 00:00:00",
        }
        assert nhn(client, odd, time_out_of_range).status_code == 200
        assert (status_of(kakao), inbox()) == ("received", [("a?", "parked"), ("2", "applied")])

    def test_a_wrong_signature_is_refused(self, client):
        assert nhn(client, {"hookId": "1"}, signature="other").status_code == 403

    def test_an_opt_out_of_a_number_stops_every_subscription_of_it(self, client):
        row = subscribe(type="SMS", token="+821099998888")
        nhn(client, {"hookId": "o1", "recipientNo": "01099998888"}, event="UNSUBSCRIBE")
        assert Subscription.objects.get(pk=row.pk).status == -2
        assert inbox() == [("o1", "applied")]
        assert "99998888" not in json.dumps(list(WebhookInbox.objects.values_list("payload", "event_id", "note")))

    def test_an_opt_out_told_again_does_not_undo_a_later_consent(self, client):
        row = subscribe(type="SMS", token="+821099998888")
        nhn(client, {"hookId": "o1", "recipientNo": "01099998888"}, event="UNSUBSCRIBE")
        enable_subscription(row.pk, consent=True, now=NOW)
        assert nhn(client, {"hookId": "o1", "recipientNo": "01099998888"}, event="UNSUBSCRIBE").status_code == 200
        assert Subscription.objects.get(pk=row.pk).status == 1
        nhn(client, {"hookId": "o2", "recipientNo": "01099998888"}, event="UNSUBSCRIBE")
        assert Subscription.objects.get(pk=row.pk).status == -2

    def test_an_opt_out_without_an_id_is_kept_without_the_number(self, client):
        nhn(client, {"recipientNo": "01099998888"}, event="UNSUBSCRIBE")
        assert "99998888" not in WebhookInbox.objects.get().event_id

    def test_a_result_may_name_only_our_own_id(self, client):
        kakao = accepted("KakaoTalk", "req")
        nhn(client, {"hookId": "1", "recipientGroupingKey": str(kakao.pk), "resultCode": "1000"})
        assert status_of(kakao) == "received"


def test_a_complaint_suppresses_and_leaves_the_message_alone():
    row = accepted("Email", "m1")
    receive_events("anymail-mailgun", [Event("e1", "m1", None, "complained")], now=NOW)
    assert status_of(row) == "successful"
    assert Subscription.objects.get(pk=row.subscription_id).status == -44
    assert Suppression.objects.get().reason == "complaint"


def test_a_hard_bounce_after_acceptance_fails_and_suppresses():
    row = accepted("Email", "m1")
    answer = rejected("recipient", "550", "hard_bounce", subscription_status=-42, suppress_reason="hard_bounce")
    receive_events("anymail-mailgun", [Event("e1", "m1", None, "failed", "550", answer=answer)], now=NOW)
    assert status_of(row) == "failed"
    assert Subscription.objects.get(pk=row.subscription_id).status == -42
    assert Suppression.objects.get().reason == "hard_bounce"


@pytest.mark.parametrize("status", ["received", "converted"])
def test_a_mail_that_comes_back_after_its_delivery_is_no_step_back_but_suppresses_the_address(status):
    row = message_in(status, subscribe(type="Email"), at=NOW - timedelta(hours=1))
    Message.objects.filter(pk=row.pk).update(provider_message_id="m1")
    answer = rejected("recipient", "550", "hard_bounce", subscription_status=-42, suppress_reason="hard_bounce")
    receive_events("anymail-mailgun", [Event("e1", "m1", None, "failed", "550", answer=answer)], now=NOW)
    assert (status_of(row), inbox()) == (status, [("e1", "applied")])
    assert Subscription.objects.get(pk=row.subscription_id).status == -42
    assert Suppression.objects.get().reason == "hard_bounce"


def test_what_cannot_be_applied_at_this_moment_is_no_error_of_the_providers(client):
    row = accepted()
    with connection.cursor() as cursor:
        cursor.execute("CREATE FUNCTION busy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''not now''; END'")
        cursor.execute("CREATE TRIGGER busy BEFORE UPDATE ON messages EXECUTE FUNCTION busy()")
        answer = twilio(client, MessageSid="SM1", MessageStatus="delivered")
        cursor.execute("DROP TRIGGER busy ON messages")
    assert (answer.status_code, answer.json()) == (200, {"parked": 1})
    assert (status_of(row), inbox()) == ("successful", [("SM1:delivered", "parked")])
    assert run(SWEEP)["counts"] == {"applied": 1}
    assert status_of(row) == "received"


def test_an_event_written_by_hand_needs_provider_and_id_and_is_there_once():
    insert = "INSERT INTO webhook_inbox (provider, event_id) VALUES ('twilio', 'SM9:delivered')"
    with connection.cursor() as cursor:
        cursor.execute(insert)
        with pytest.raises(IntegrityError, match="webhook_inbox_once"), transaction.atomic():
            cursor.execute(insert)
    assert run(SWEEP)["error"] is None
    assert inbox() == [("SM9:delivered", "parked")]


def test_a_parked_event_is_not_written_again_at_every_look(client):
    twilio(client, MessageSid="SM9", MessageStatus="delivered")
    with connection.cursor() as cursor:
        cursor.execute("SELECT ctid FROM webhook_inbox")
        before = cursor.fetchall()
        run(SWEEP)
        cursor.execute("SELECT ctid FROM webhook_inbox")
        assert cursor.fetchall() == before


def test_a_providers_clock_ahead_of_ours_is_no_reason_to_refuse():
    row = accepted()
    ahead = Event("e1", "SM1", None, "delivered", occurred_at=NOW + timedelta(hours=9))
    receive_events("nhn", [ahead], now=NOW)
    assert status_of(row) == "received"


@pytest.mark.parametrize("path", ["nobody", "%00", "console", "smtp"])
def test_an_unknown_provider_is_404(client, path):
    assert client.post(f"/api/v1/webhooks/{path}/", "{}", content_type="application/json").status_code == 404


def test_only_post(client):
    assert client.get("/api/v1/webhooks/twilio/").status_code == 405


@pytest.mark.parametrize("provider", ["solapi", "mailgun", "anymail-sendgrid", "nhn", "twilio"])
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff\x00", b"null", b"[1]"])
def test_unsigned_junk_is_403(client, provider, body):
    answer = client.post(f"/api/v1/webhooks/{provider}/", body, content_type="application/json")
    assert answer.status_code == 403


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b"null", b'{"hooks": [1]}', b'{"hooks": {}}', b'"x"'])
def test_signed_junk_is_a_400(client, body):
    headers = {"x-toast-webhook-signature": "nhn-secret"}
    answer = client.post("/api/v1/webhooks/nhn/", body, content_type="application/json", headers=headers)
    assert answer.status_code == 400
