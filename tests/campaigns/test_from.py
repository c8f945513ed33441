"""Whom a campaign's messages are from, on the wire, and what becomes of a sender whose address is refused."""

from email import message_from_bytes
from email.policy import default

import pytest
from aiosmtpd.controller import Controller

from campaigns.models import Enrollment, Execution
from campaigns.services import senders, sequences
from campaigns.services.enrolling import enroll_leads
from campaigns.services.reconciling import reconcile_sequence
from config import sweeping
from config.models import Decision
from messaging.models import Message, ProviderCircuit, Subscription, Suppression
from messaging.providers import reset_providers
from tests.campaigns.factories import (
    HOUR,
    MINUTE,
    NOW,
    LeadFactory,
    SenderFactory,
    SequenceFactory,
    StepFactory,
    pool,
    work,
)
from tests.campaigns.test_reconciling import fresh
from tests.messaging.providers.servers import PlainServer, Reply
from tests.messaging.providers.test_smtp import Mailbox, nobody_listens

pytestmark = pytest.mark.django_db


@pytest.fixture
def mailbox(settings):
    found = Mailbox()
    controller = Controller(found, hostname="127.0.0.1", port=nobody_listens())
    controller.start()
    settings.PROVIDERS = {"Email": "smtp"}
    settings.SMTP_URL = {"host": "127.0.0.1", "port": controller.port, "user": "", "password": "", "tls": ""}
    settings.EMAIL_FROM = "no-reply@signalbox.example"
    reset_providers()
    yield found
    controller.stop()


@pytest.fixture
def twilio(settings):
    server = PlainServer()
    settings.PROVIDERS, settings.TWILIO_BASE_URL = {"SMS": "twilio"}, server.url
    settings.TWILIO_ACCOUNT_SID, settings.TWILIO_AUTH_TOKEN, settings.TWILIO_FROM = "AC1", "shh", "+15005550006"
    reset_providers()
    server.replies(Reply(201, {"sid": "SM1", "status": "queued", "error_code": None}))
    yield server
    server.close()


def dispatch(now=NOW):
    assert sweeping.run("messaging.dispatch_due_messages", now=now)["error"] is None


def campaign(*pooled, channel="email"):
    sequence = SequenceFactory()
    StepFactory(sequence=sequence, channel=channel)
    pool(sequence, *pooled)
    return sequence


def enroll(sequence, count=1, **fields):
    leads = LeadFactory.create_batch(count, **fields)
    enroll_leads(sequence.pk, [lead.pk for lead in leads], NOW)
    return list(Enrollment.objects.filter(sequence=sequence).order_by("pk"))


def from_of(envelope):
    [mailbox] = message_from_bytes(envelope.content, policy=default)["From"].addresses
    return mailbox.display_name, mailbox.addr_spec


class TestOnTheWire:
    @pytest.mark.parametrize("name", ["김영희", 'Kim "Young" Hee, Inc.', "a\r\nBcc: everybody@x.example", ""])
    def test_a_mail_is_from_its_sender(self, sweep, mailbox, name):
        enroll(campaign(SenderFactory(address="kim@shop.example", display_name=name)))
        sweep("send_due_steps", NOW)
        dispatch()
        [envelope], message = mailbox.mails, Message.objects.get()
        assert (envelope.mail_from, message.status) == ("kim@shop.example", "successful")
        assert from_of(envelope) == (" ".join(name.split()), "kim@shop.example")
        mail = message_from_bytes(envelope.content)
        assert mail["Message-ID"] == f"<{message.pk}@shop.example>"
        assert mail["Bcc"] is None

    def test_each_lead_hears_from_its_own(self, sweep, mailbox):
        first, second = SenderFactory(display_name="하나"), SenderFactory(display_name="둘")
        rows = enroll(campaign(first, second), 4)
        sweep("send_due_steps", NOW)
        dispatch()
        told = {envelope.rcpt_tos[0]: envelope.mail_from for envelope in mailbox.mails}
        assert told == {row.lead.email: row.sender.address for row in rows}
        assert set(told.values()) == {first.address, second.address}

    def test_a_text_is_from_its_senders_number(self, sweep, twilio):
        enroll(campaign(SenderFactory(channel="sms", address="+15005550009", display_name="Kim"), channel="sms"),
               phone="+821012345678")  # fmt: skip
        sweep("send_due_steps", NOW)
        dispatch()
        assert [request.form["From"] for request in twilio.requests] == ["+15005550009"]

    def test_a_profile_is_no_from(self, sweep):
        sender = SenderFactory(channel="kakao_talk", address="@shop")
        row = work(campaign(sender), sender=sender)
        sweep("send_due_steps", NOW)
        assert fresh(row).message.from_address == ""

    def test_a_test_is_from_a_sender_of_the_pool(self, mailbox):
        sequence = campaign(SenderFactory(status="suspended"), SenderFactory(address="kim@shop.example"))
        sequences.send_test(sequence.pk, LeadFactory(), None, NOW)
        dispatch()
        assert [envelope.mail_from for envelope in mailbox.mails] == ["kim@shop.example"]


def refuse(address):
    return lambda said: "553 5.1.8 sender not registered" if said == address else None


class TestRefused:
    @pytest.fixture
    def refused(self, sweep, mailbox):
        """Of two senders the first is not known to the mail server; half of its leads are written to later."""
        bad, good = SenderFactory(address="bad@shop.example"), SenderFactory(address="good@shop.example")
        mailbox.mail = refuse(bad.address)
        sequence = campaign(bad, good)
        rows = enroll(sequence, 8)
        late = [row.pk for row in rows if row.sender_id == bad.pk][2:]
        Execution.objects.filter(enrollment__in=late).update(scheduled_at=NOW + HOUR)
        sweep("send_due_steps", NOW)
        dispatch()
        return sequence, bad, good, late

    def test_only_its_own_messages_fail(self, refused, mailbox):
        _sequence, bad, good, _late = refused
        assert ProviderCircuit.objects.count() == 0
        assert {envelope.mail_from for envelope in mailbox.mails} == {good.address}
        for row in Message.objects.filter(status="failed"):
            assert (row.error_reason, row.failure_type, row.from_address) == (
                "sender_rejected", "permanent", bad.address,
            )  # fmt: skip
            assert row.error_details == {"code": "553 5.1.8", "scope": "sender"}
        assert Message.objects.filter(status="failed").count() == 2
        assert not Suppression.objects.exists()
        assert set(Subscription.objects.values_list("status", flat=True)) == {1}

    def test_the_sender_is_in_error_and_the_rest_goes_to_another(self, refused, mailbox, sweep):
        sequence, bad, good, late = refused
        assert sweep("follow_message_results", NOW + MINUTE) == {"sent": 4, "failed": 2}
        assert (fresh(bad).status, fresh(bad).last_error) == ("error", "sender_rejected 553 5.1.8")
        assert fresh(good).status == "active"
        decision = Decision.objects.get(rule="sender.rejected")
        assert (decision.object_type, decision.object_id) == ("senders", str(bad.pk))
        assert (decision.before, decision.after) == ({"status": "active"}, {"status": "error"})
        assert (decision.inputs["code"], decision.inputs["messages"]) == ("553 5.1.8", 2)
        assert Message.objects.get(pk=decision.inputs["message_id"]).status == "failed"
        assert set(Enrollment.objects.filter(sender=bad).values_list("status", flat=True)) == {"failed", "active"}
        assert sweep("send_due_steps", NOW + HOUR) == {}
        sweep("reconcile_sequences", NOW + HOUR + 9 * MINUTE)
        assert Enrollment.objects.filter(pk__in=late, sender=bad).count() == 2
        sweep("reconcile_sequences", NOW + HOUR + 10 * MINUTE)
        assert Enrollment.objects.filter(pk__in=late, sender=good).count() == 2
        sweep("send_due_steps", NOW + HOUR + 11 * MINUTE)
        dispatch(NOW + HOUR + 11 * MINUTE)
        assert len(mailbox.mails) == 6
        sweep("follow_message_results", NOW + 2 * HOUR)
        assert fresh(sequence).counters["sent"] == 6
        assert Decision.objects.filter(rule="sender.rejected").count() == 1

    def test_without_another_the_rest_is_skipped(self, sweep, mailbox):
        sender = SenderFactory()
        mailbox.mail = refuse(sender.address)
        enroll(campaign(sender), 2)
        Execution.objects.filter(pk=Execution.objects.first().pk).update(scheduled_at=NOW + MINUTE)
        sweep("send_due_steps", NOW)
        dispatch()
        sweep("follow_message_results", NOW)
        sweep("reconcile_sequences", NOW + HOUR)
        assert set(Execution.objects.values_list("status", "skip_reason")) == {
            ("failed", None), ("skipped", "stranded_no_sender"),
        }  # fmt: skip

    def test_a_text_refused_for_its_number(self, sweep, twilio):
        sender = SenderFactory(channel="sms", address="+15005550009")
        twilio.replies(Reply(400, {"code": 21606, "message": "not yours"}))
        enroll(campaign(sender, channel="sms"), phone="+821012345678")
        sweep("send_due_steps", NOW)
        dispatch()
        sweep("follow_message_results", NOW)
        assert (fresh(sender).status, fresh(sender).last_error) == ("error", "sender_rejected 21606")
        assert ProviderCircuit.objects.count() == 0

    @pytest.mark.parametrize("status", ["suspended", "inactive", "error"])
    def test_who_is_out_of_service_already_stays_as_it_is(self, refused, sweep, status):
        _sequence, bad, _good, _late = refused
        type(bad).objects.filter(pk=bad.pk).update(status=status, last_error="before")
        assert sweep("follow_message_results", NOW)["failed"] == 2
        assert (fresh(bad).status, fresh(bad).last_error) == (status, "before")
        assert not Decision.objects.filter(rule="sender.rejected").exists()

    def test_an_address_that_was_mended_is_not_blamed_for_the_old_one(self, refused, sweep):
        _sequence, bad, _good, _late = refused
        senders.change_sender(bad.pk, {"address": "mended@shop.example"})
        assert sweep("follow_message_results", NOW)["failed"] == 2
        assert fresh(bad).status == "active"

    def test_what_got_stuck_is_told_the_same(self, refused):
        sequence, bad, _good, _late = refused
        reconcile_sequence(sequence.pk, NOW + 31 * MINUTE)
        assert (fresh(bad).status, Decision.objects.filter(rule="sender.rejected").count()) == ("error", 1)

    @pytest.mark.parametrize(
        ("reason", "scope"), [("policy", "sender"), ("retries_exhausted", "sender"), ("rejected", "message")]
    )
    def test_no_other_failure_is_its_address(self, sweep, deliver, reason, scope):
        sender = SenderFactory()
        enroll(campaign(sender))
        sweep("send_due_steps", NOW)
        deliver(NOW, reason, scope)
        assert sweep("follow_message_results", NOW) == {"failed": 1}
        assert fresh(sender).status == "active"

    def test_however_many_messages_the_queries_are_the_same(self, sweep, mailbox, django_assert_max_num_queries):
        sender = SenderFactory()
        mailbox.mail = refuse(sender.address)
        enroll(campaign(sender), 60)
        sweep("send_due_steps", NOW)
        dispatch()
        with django_assert_max_num_queries(45):
            sweep("follow_message_results", NOW)
        assert Execution.objects.filter(status="failed").count() == 60
        assert Decision.objects.get(rule="sender.rejected").inputs["messages"] == 60
