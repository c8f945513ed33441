"""Replies: matching, kinds, dates of return, and what they end."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from campaigns.models import Enrollment, Execution, Lead, Reply
from campaigns.services.absence import read_absence
from campaigns.services.classifying import classify
from campaigns.services.enrollments import pause_enrollment, resume_enrollment, stop_enrollment
from campaigns.services.explaining import explain
from campaigns.services.replies import Incoming, record_reply
from config.errors import Invalid, Missing
from config.models import Decision
from messaging.models import Message, Suppression
from tests.campaigns.factories import DAY, HOUR, MINUTE, NOW, SenderFactory, SequenceFactory, StepFactory, work
from tests.campaigns.test_reconciling import LIMIT, SECOND, fresh

pytestmark = pytest.mark.django_db
SEOUL = ZoneInfo("Asia/Seoul")
TUESDAY = datetime(2025, 11, 18, 10, tzinfo=SEOUL)


def reply(now=NOW, **fields):
    return record_reply(Incoming(**fields), Enrollment.objects.all(), now)


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("11월 25일까지 휴가입니다.", "2025-11-26"),
        ("11월 28일까지 부재중입니다 (금)", "2025-12-01"),
        ("11월 26일 복귀 예정입니다", "2025-11-26"),
        ("11월 26일에 복귀합니다", "2025-11-26"),
        ("복귀일: 11월 26일", "2025-11-26"),
        ("11월 20일부터 25일까지 부재중입니다", "2025-11-26"),
        ("11/20~11/25 휴가", "2025-11-26"),
        ("2025.11.25까지", "2025-11-26"),
        ("2025년 11월 25일까지", "2025-11-26"),
        ("11월 21일(금)까지 휴가, 11월 24일(월) 복귀", "2025-11-24"),
        ("다음 주 월요일에 복귀합니다", "2025-11-24"),
        ("25일까지 자리를 비웁니다", "2025-11-26"),
        ("1월 5일까지", "2026-01-06"),
        ("I am back on 25 November", "2025-11-25"),
        ("Back on Saturday, 29 November.", "2025-11-29"),
        ("I am out until 25 November.", "2025-11-26"),
        ("out of office until Friday", "2025-11-24"),
        ("I will return on November 24th, 2025", "2025-11-24"),
        ("away from Nov 20 to Nov 28", "2025-12-01"),
        ("away November 20-25", "2025-11-26"),
        ("away November 20 to 25", "2025-11-26"),
        ("I am out until the 25th", "2025-11-26"),
        ("Back on the 25th", "2025-11-25"),
        ("returning on 2025-12-01", "2025-12-01"),
        ("I will be out starting 11/20/2025 through 11/25/2025", "2025-11-26"),
        ("On leave 20 Nov - 24 Nov and will return 26 Nov", "2025-11-26"),
        ("away until the 25th of November\n> back on 1 December", "2025-11-26"),
        ("back on January 5", "2026-01-05"),
        ("11/20-11/25 부재", "2025-11-26"),
        ("오늘까지 휴가입니다", "2025-11-19"),
        ("back on 17 May 2026", "2026-05-17"),  # 180 days ahead
        ("until 17 May 2026", "2026-05-18"),
        ("11월 26일 수요일까지 휴가입니다", "2025-11-27"),
        ("11월 26일(수) 오후 6시까지 부재중", "2025-11-27"),
        ("11월 25일 오전 9시 복귀", "2025-11-25"),
        ("11월 25일부로 복귀합니다", "2025-11-25"),
        ("12월 1일 이후 복귀 예정", "2025-12-01"),
        ("12월 1일부터 업무를 재개합니다", "2025-12-01"),
        ("12월 1일부터 연락 가능합니다", "2025-12-01"),
        ("2025-11-20 ~ 11-25 부재", "2025-11-26"),
        ("11-25까지 휴가", "2025-11-26"),
        ("25.11.20 ~ 25.11.25 휴가", "2025-11-26"),
        ("25.12.01 복귀", "2025-12-01"),
        ("11/20~25 휴가", "2025-11-26"),
        ("out until 11/25/25", "2025-11-26"),
        ("out until 25/11/25", "2025-11-26"),
        ("until this Friday", "2025-11-24"),
        ("On 25 November I will be back", "2025-11-25"),
        ("Out until 25 November, I will be back later", "2025-11-26"),
        ("Return: 25-Nov-2025", "2025-11-25"),
        ("I will not be available from 20 November to 25 November", "2025-11-26"),
        ("Out of office\nFrom: 20 November\nTo: 25 November", "2025-11-26"),
        ("out of the office starting 11/19/2025 and will not return until 11/25/2025.", "2025-11-25"),
        ("I won't be back in the office until Wednesday, November 26.", "2025-11-26"),
        ("I’ll be back on November 25 – please contact Jane meanwhile.", "2025-11-25"),
        ("I'll be checking mail again from November 26.", "2025-11-26"),
        ("We reopen on Monday 5 January 2026.", "2026-01-05"),
        ("Return date - 26 Nov 2025", "2025-11-26"),
        ("Hello,\n\nI will be back on\nNovember 25.\n", "2025-11-25"),
        ("I am OOO today and tomorrow.", "2025-11-20"),
        ("I am off on Friday", "2025-11-24"),
        ("I am out of the office November 19th & 20th.", "2025-11-21"),
        ("Annual leave: 19NOV2025 - 25NOV2025", "2025-11-26"),
        ("Annual leave 19-Nov-25 to 25-Nov-25", "2025-11-26"),
        ("Away between 11/19 and 11/25", "2025-11-26"),
        ("Out of office until 28-11-2025", "2025-12-01"),
        ("I am OOO through end of day 11/28", "2025-12-01"),
        ("I am out of the office until Tuesday the 25th.", "2025-11-26"),
        ("I am out of the office until Tuesday 25.", "2025-11-26"),
        ("until Monday 24 December", "2025-12-25"),
        ("I am out through Friday, November 28 and will return on Monday.", "2025-12-01"),
        ("오늘 하루 연차입니다.", "2025-11-19"),
        ("금일 연차로 부재중입니다. 명일 복귀합니다.", "2025-11-19"),
        ("11월 19일, 20일 휴가입니다.", "2025-11-21"),
        ("11월 19일(수)~21일(금) 휴가", "2025-11-24"),
        ("11/19(수)~21(금) 연차입니다.", "2025-11-24"),
        ("11/19, 11/20 연차입니다.", "2025-11-21"),
        ("19~24일 휴가입니다", "2025-11-25"),
        ("'25.11.19 ～ '25.11.21 휴가", "2025-11-24"),
        ("20251119 ~ 20251121 휴가", "2025-11-24"),
        ("출근 예정일: 11/24", "2025-11-24"),
        ("2026. 1. 2.(금) 복귀", "2026-01-02"),
        ("12월 1일 복직 예정입니다", "2025-12-01"),
        ("11월 24일(월)에 순차적으로 답변드리겠습니다.", "2025-11-24"),
        ("11월 28일까지 휴가, 월요일에 출근합니다", "2025-12-01"),
    ],
)
def test_the_date_of_return_is_read_at_nine_in_the_leads_zone(text, until):
    found = read_absence(text, TUESDAY, SEOUL)
    assert found.until == datetime.fromisoformat(until).replace(hour=9, tzinfo=SEOUL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I am away.",
        "> back on 25 November",
        "On Mon, 17 Nov 2025 Lee wrote:\nback on 25 November",
        "2025. 11. 17. 오전 10:00, Lee <lee@x.example> 작성:\nback on 25 November",
        "until 30 February",
        "back on 1 December 2027",
        "11월 25일 2024년",
        "back on 18 May 2026",  # 181 days ahead
        "until 18 May 2026",
        "Call 02-1234-5678 or 11.25",
        "Our price is 10.5-12, our server 10.0.0.1",
        "available 9-12",
        "회신에 3~5일 소요될 수 있습니다.",
        "문의는 오늘 중으로 답변드리겠습니다.",
        "I do not work on Fridays.",
        "I am in a meeting all day today.",
    ],
)
def test_without_a_date_that_makes_sense_a_week(text):
    if "2024" in text:
        text = "2024년 11월 25일까지"
    found = read_absence(text, TUESDAY, SEOUL)
    assert (found.until, found.rule) == (TUESDAY + 7 * DAY, "default")


@pytest.mark.parametrize(
    ("subject", "headers", "kind"),
    [
        ("Re: Hello", {}, "human"),
        ("Automatic reply: Hello", {}, "ooo"),
        ("[자동응답] 부재중입니다", {}, "ooo"),
        ("휴가 중입니다", {}, "ooo"),
        ("Re: Hello", {"Auto-Submitted": "auto-replied"}, "ooo"),
        ("Re: Hello", {"auto-submitted": "no"}, "human"),
        ("Re: Hello", {"X-Autoreply": "yes"}, "ooo"),
        ("Undelivered", {"Content-Type": "multipart/report; report-type=delivery-status"}, "bounce"),
        ("Mail delivery failed", {"From": "MAILER-DAEMON@mx.example"}, "bounce"),
        ("Undelivered Mail Returned to Sender", {}, "bounce"),
        ("Away until Monday", {}, "ooo"),
        ("Annual leave", {}, "ooo"),
        ("I'm away", {}, "ooo"),
        ("휴무 안내", {}, "ooo"),
        ("Re: Vacation rentals", {}, "human"),
        ("Re: Hello", {"Auto-Submitted": ["auto-replied"]}, "ooo"),
        ("Re: Hello", {"Auto-Submitted": ["no"]}, "human"),
        ("Re: is your mail delivery failing?", {}, "human"),
        ("Undeliverable: Hello", {}, "bounce"),
        ("Re: 휴가철 문의", {}, "human"),
        ("Read: Hello", {"Content-Type": "multipart/report; report-type=disposition-notification"}, "ooo"),
    ],
)
def test_kinds_are_read_from_headers_and_subject(subject, headers, kind):
    assert classify(subject, "I am on holiday from Monday", headers)[0] == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Unsubscribe.", "unsubscribe"),
        ("Please take me off your mailing list.", "unsubscribe"),
        ("Unsubscribe please\n\nSent from my iPhone", "unsubscribe"),
        ("메일 그만 보내주세요.", "unsubscribe"),
        ("수신거부\n> 안녕하세요", "unsubscribe"),
        ("Remove me please\nOn Mon, 2 Mar 2026 Shop <me@shop.example> wrote:\n> Hi", "unsubscribe"),
        ("Do not stop, how do I unsubscribe from the other list?", "human"),
        ("> unsubscribe", "human"),
    ],
)
def test_who_only_wishes_to_leave_is_unsubscribed(text, kind):
    assert classify("Re: Hello", text, {})[0] == kind


def test_a_delayed_delivery_report_is_no_bounce():
    headers = {"Content-Type": "multipart/report; report-type=delivery-status", "Auto-Submitted": "auto-replied"}
    assert classify("Delayed", "Action: delayed", headers)[0] == "ooo"


def test_a_delayed_delivery_report_is_no_persons_word():
    headers = {"Content-Type": "multipart/report; report-type=delivery-status"}
    assert classify("Delayed", "Action: delayed", headers)[0] == "ooo"
    assert classify("Delayed", "Final-Recipient: rfc822; kim@example.com\nAction: delayed", {})[0] == "ooo"


def test_a_delivery_report_without_its_headers_is_a_bounce():
    report = "Reporting-MTA: dns; mx.example\n\nFinal-Recipient: rfc822; kim@example.com\nAction: failed\nStatus: 5.1.1"
    assert classify("Your message", report, {})[0] == "bounce"
    assert classify("Your message", f"{report}\nAction: delayed", {})[0] == "ooo"


@pytest.mark.parametrize("words", ["until 25 November ", "1일까지 ", "\n", "Action: ", "11월" + " " * 300])
def test_the_longest_text_is_read_in_a_moment(words):
    """The evidence is that this ends: with the whole text read for every date it took half a minute."""
    text = words * (100_000 // len(words))
    assert classify("Re: Hello", text, {})[0] == "human"
    assert read_absence(text, TUESDAY, SEOUL).until > TUESDAY


class TestMatching:
    @pytest.fixture
    def sent(self, sweep):
        row = work(sender=SenderFactory())
        sweep("send_due_steps", NOW)
        return fresh(row)

    @pytest.mark.parametrize("how", ["enrollment_id", "message_id", "in_reply_to", "references"])
    def test_finds_the_enrollment(self, sent, how):
        told = {
            "enrollment_id": sent.enrollment_id,
            "message_id": sent.message_id,
            "in_reply_to": f"<{str(sent.message_id).upper()}@anything.example>",
            "references": f"<other@x> <{sent.message_id}@mail.example>",
        }
        found, created = reply(text="hi", **{how: told[how]})
        assert created
        assert found.enrollment_id == sent.enrollment_id

    def test_our_id_counts_only_as_the_local_part(self, sent):
        with pytest.raises(Missing):
            reply(in_reply_to=f"<a@{sent.message_id}>")

    def test_a_foreign_message_id_is_not_found(self, sent):
        with pytest.raises(Missing):
            reply(in_reply_to=f"<{sent.enrollment_id}@x>")
        with pytest.raises(Missing):
            reply(in_reply_to=f"<prefix-{sent.message_id}@x>")

    def test_an_unknown_enrollment_is_invalid(self, sent):
        with pytest.raises(Invalid):
            reply(enrollment_id=sent.pk)

    def test_from_the_future_is_invalid(self, sent):
        with pytest.raises(Invalid):
            reply(enrollment_id=sent.enrollment_id, received_at=NOW + 5 * MINUTE + SECOND)
        assert reply(enrollment_id=sent.enrollment_id, received_at=NOW + 5 * MINUTE)

    def test_the_same_call_again_without_a_time_is_the_same_reply(self, sent):
        away = {"enrollment_id": sent.enrollment_id, "text": "away", "kind": "ooo"}
        first, _created = reply(**away)
        resume_at = fresh(sent).enrollment.resume_at
        assert reply(now=NOW + MINUTE, **away) == (first, False)
        assert fresh(sent).enrollment.resume_at == resume_at
        assert reply(now=NOW + HOUR, **away)[1]
        assert reply(now=NOW + HOUR + MINUTE, ooo_until=NOW + 30 * DAY, **away)[1]

    def test_the_same_reply_twice_changes_nothing(self, sent):
        first, _new = reply(enrollment_id=sent.enrollment_id, external_id="x1", text="a")
        again, created = reply(enrollment_id=sent.enrollment_id, external_id="x1", text="b")
        assert (again, created) == (first, False)
        told = {"enrollment_id": sent.enrollment_id, "received_at": NOW, "text": "c"}
        one, _new = reply(**told)
        two, created = reply(**told)
        assert (two, created) == (one, False)
        assert Reply.objects.count() == 2


class TestHuman:
    def test_ends_the_enrollment_and_skips_what_is_left(self):
        row = work(due=NOW + DAY)
        reply(enrollment_id=row.enrollment_id, text="tell me more")
        assert fresh(row.enrollment).status == "replied"
        assert fresh(row).skip_reason == "replied"
        sequence = fresh(row.enrollment.sequence)
        assert (sequence.status, sequence.has_pending_work) == ("active", False)  # the harvest holds

    def test_takes_back_a_message_nobody_is_sending(self, sweep):
        row = work(sender=SenderFactory())
        sweep("send_due_steps", NOW)
        reply(enrollment_id=row.enrollment_id, text="stop")
        assert (fresh(row).status, fresh(row).skip_reason) == ("skipped", "replied")
        assert Message.objects.get().error_reason == "cancelled"

    def test_a_leased_message_goes_its_way_and_is_recorded(self, sweep):
        row = work(sender=SenderFactory())
        sweep("send_due_steps", NOW)
        Message.objects.update(lease_id=row.pk, leased_until=NOW + HOUR)
        reply(enrollment_id=row.enrollment_id, text="stop")
        assert fresh(row).status == "processing"
        assert fresh(row.enrollment).status == "replied"
        Message.objects.update(status="successful", sent_at=NOW, lease_id=None, leased_until=None)
        sweep("follow_message_results", NOW)
        assert fresh(row).status == "sent"

    def test_after_the_end_it_is_kept_and_counts_for_the_harvest(self):
        row = work(status="sent", enrollment="completed")
        reply(enrollment_id=row.enrollment_id, text="late")
        assert fresh(row.enrollment).status == "completed"
        assert Reply.objects.get().kind == "human"


@pytest.mark.parametrize(
    ("kind", "end", "reason"), [("bounce", "bounced", "hard_bounce"), ("unsubscribe", "unsubscribed", "unsubscribed")]
)
def test_bounce_and_unsubscribe_end_and_suppress(kind, end, reason):
    row = work(due=NOW + DAY)
    reply(enrollment_id=row.enrollment_id, kind=kind)
    assert fresh(row.enrollment).status == end
    assert fresh(row).skip_reason == end
    assert Suppression.objects.get().reason == reason
    assert fresh(row.enrollment.sequence).status == "completed"


@pytest.mark.parametrize("named", [True, False])
def test_a_bounce_suppresses_the_address_that_was_written_to(sweep, deliver, named):
    row = work(sender=SenderFactory())
    StepFactory(sequence=row.enrollment.sequence, channel="sms", delay_seconds=3600)
    Lead.objects.update(phone="+821012345678")
    sweep("send_due_steps", NOW)
    deliver(NOW)
    sweep("follow_message_results", NOW)
    assert fresh(row.enrollment).current_step.channel == "sms"
    about = {"enrollment_id": row.enrollment_id} if named else {"message_id": fresh(row).message_id}
    reply(kind="bounce", text="no such user", **about)
    assert list(Suppression.objects.values_list("channel_type", flat=True)) == ["email"]


class TestOutOfOffice:
    def test_the_words_of_our_own_subject_do_not_make_an_answer_an_absence(self, sweep):
        row = work(sender=SenderFactory())
        row.step.subject = "여름 휴가 특가"
        row.step.save()
        sweep("send_due_steps", NOW)
        told = {"enrollment_id": row.enrollment_id, "text": "얼마인가요?"}
        assert reply(subject="자동응답: 여름 휴가 특가", external_id="1", **told)[0].kind == "ooo"
        assert reply(subject="Re: 여름 휴가 특가", external_id="2", **told)[0].kind == "human"

    def test_pauses_until_the_date_and_resumes_by_itself(self, sweep):
        row = work(due=NOW + 2 * DAY)
        reply(enrollment_id=row.enrollment_id, kind="ooo", text="back on 10 March")
        paused = fresh(row.enrollment)
        at = datetime(2026, 3, 10, 9, tzinfo=UTC)
        assert (paused.status, paused.resume_at) == ("paused", at)
        assert sweep("resume_paused_enrollments", at - SECOND) == {}
        assert sweep("resume_paused_enrollments", at) == {"resumed": 1}
        active = fresh(row.enrollment)
        assert (active.status, active.resume_at) == ("active", None)
        assert fresh(row).scheduled_at == NOW + 2 * DAY + (at - NOW)

    @pytest.mark.parametrize("due", [NOW - HOUR, NOW + 2 * DAY])
    def test_explain_tells_the_moment_to_which_the_resume_moves_the_step(self, sweep, due):
        row = work(sender=SenderFactory(), due=due)
        reply(enrollment_id=row.enrollment_id, kind="ooo", ooo_until=NOW + 7 * DAY)
        told = explain(fresh(row.enrollment), NOW + HOUR).eta
        sweep("resume_paused_enrollments", NOW + 7 * DAY)
        assert told == fresh(row).scheduled_at == max(NOW + 7 * DAY, due + 7 * DAY)

    def test_what_was_due_during_a_long_absence_is_not_stale_afterwards(self, sweep):
        row = work(sender=SenderFactory(), due=NOW)
        until = NOW + 100 * DAY
        reply(enrollment_id=row.enrollment_id, kind="ooo", ooo_until=until)
        sweep("reconcile_sequences", until - DAY)
        sweep("resume_paused_enrollments", until)
        sweep("reconcile_sequences", until)
        assert (fresh(row).status, fresh(row).scheduled_at) == ("pending", until)

    def test_deferred_rows_move_too_and_never_before_now(self, sweep):
        row = work(status="deferred", due=NOW - DAY)
        Execution.objects.update(deferred_until=NOW - DAY, scheduled_at=NOW - 30 * DAY)
        Enrollment.objects.update(status="paused", resume_at=NOW, paused_at=NOW - HOUR)
        sweep("resume_paused_enrollments", NOW)
        assert fresh(row).deferred_until == NOW

    def test_the_pause_is_a_decision_about_the_enrollment(self):
        row = work()
        found, _created = reply(enrollment_id=row.enrollment_id, text="back on 11 March", kind="ooo")
        decision = Decision.objects.get(rule="reply.ooo")
        assert (decision.object_type, decision.object_id) == ("sequence_enrollments", str(row.enrollment_id))
        assert (decision.before["status"], decision.after["status"]) == ("active", "paused")
        assert decision.inputs["reply_id"] == str(found.pk)

    def test_without_a_date_a_week(self):
        row = work()
        reply(enrollment_id=row.enrollment_id, kind="ooo", text="I am away", received_at=NOW - DAY)
        assert fresh(row.enrollment).resume_at == NOW + 6 * DAY

    def test_the_date_may_stand_in_the_subject_only(self):
        row = work()
        reply(enrollment_id=row.enrollment_id, subject="[부재중] 3/9 복귀", text="감사합니다.")
        assert fresh(row.enrollment).resume_at == datetime(2026, 3, 9, 9, tzinfo=UTC)

    def test_a_later_absence_only_moves_it_forward(self):
        row = work()
        reply(enrollment_id=row.enrollment_id, kind="ooo", ooo_until=NOW + 5 * DAY, text="1")
        reply(enrollment_id=row.enrollment_id, kind="ooo", ooo_until=NOW + 2 * DAY, text="2")
        assert fresh(row.enrollment).resume_at == NOW + 5 * DAY
        reply(enrollment_id=row.enrollment_id, kind="ooo", ooo_until=NOW + 9 * DAY, text="3")
        assert fresh(row.enrollment).resume_at == NOW + 9 * DAY

    def test_in_the_leads_zone(self):
        row = work()
        row.enrollment.lead.time_zone = "Asia/Seoul"
        row.enrollment.lead.save()
        reply(enrollment_id=row.enrollment_id, kind="ooo", text="3월 10일까지 휴가")
        assert fresh(row.enrollment).resume_at == datetime(2026, 3, 11, 9, tzinfo=SEOUL)


class TestByHand:
    def test_resuming_does_not_shift(self):
        row = work(due=NOW - DAY)
        pause_enrollment(row.enrollment_id, NOW - HOUR, resume_at=None)
        resume_enrollment(row.enrollment_id, NOW)
        assert fresh(row).scheduled_at == NOW - DAY
        assert fresh(row.enrollment).status == "active"

    def test_resuming_skips_what_is_stale_at_once(self):
        row = work(due=NOW - LIMIT - SECOND)
        pause_enrollment(row.enrollment_id, NOW, resume_at=None)
        assert resume_enrollment(row.enrollment_id, NOW).status == "stopped"
        assert fresh(row).skip_reason == "stale"

    def test_stopping_skips_what_is_queued_and_leaves_what_waits_for_the_lead(self):
        row = work(due=NOW + DAY)
        waiting = work(row.enrollment.sequence, status="awaiting_enrichment")
        for one in (row, waiting):
            assert stop_enrollment(one.enrollment_id, NOW).status == "stopped"
        assert fresh(row).skip_reason == "stopped"
        assert fresh(waiting).status == "awaiting_enrichment"

    def test_a_date_of_return_in_the_past_is_refused(self):
        with pytest.raises(Invalid):
            pause_enrollment(work().enrollment_id, NOW, resume_at=NOW)


def test_two_steps_in_one_sequence_have_places():
    sequence = SequenceFactory()
    assert [StepFactory(sequence=sequence).position for _n in range(2)] == [1, 2]
