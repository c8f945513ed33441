"""A campaign in every state, with leads in the middle of things; built by the services themselves."""

from collections.abc import Callable
from datetime import datetime, time, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from campaigns.models import Enrollment, Execution, Lead, Sender, Sequence
from campaigns.services import enrollments, leads, replies, senders, sequences
from campaigns.services.enrolling import enroll_leads
from campaigns.services.following import record_results
from campaigns.services.sending import send_due
from messaging.models import Application, Message

ZONES = ["Asia/Seoul", "Europe/Berlin", "America/New_York", "UTC"]
STEPS: list[dict[str, Any]] = [
    {"channel": "email", "subject": "Hello {{name}}", "body": "<p>Dear {{name}}, have a look.</p>"},
    {
        "channel": "email",
        "subject": "A second look",
        "body": "<p>{{name}}, did you see it?</p>",
        "delay_seconds": 172800,
    },
    {"channel": "sms", "subject": "", "body": "{{name}}, one last word.", "delay_seconds": 259200},
]
NAMES = ["Profhilo buyers", "Spring outreach", "Clinics in Busan", "Newsletter welcome", "Reactivation", "Draft ideas"]
# Minutes instead of days, so that a newcomer sees it move.
QUICK: list[dict[str, Any]] = [
    {**STEPS[0]},
    {**STEPS[1], "delay_seconds": 60},
    {"channel": "email", "subject": "One last word", "body": "<p>Bye, {{name}}.</p>", "delay_seconds": 120},
]
FAMILY = ["김", "이", "박", "최", "정", "Miller", "Novak", "Rossi", "Weber", "Dubois"]
GIVEN = ["민지", "서준", "하윤", "도현", "지우", "Anna", "Luca", "Emma", "Jonas", "Chloé"]


def seed(scale: int, say: Callable[[str], Any]) -> None:
    application, _new = Application.objects.get_or_create(slug="demo", defaults={"name": "Demo shop"})
    if Sequence.objects.filter(application=application).exists():
        say("campaigns: the demo campaigns are there already")
        return
    now = timezone.now()
    with transaction.atomic():
        pool = _senders(application)
        people = _leads(application, 40 * scale, now)
        rows = [_sequence(application, name, pool) for name in NAMES]
        _run(rows, people, now)
        _harvest(application, people, now)
        _live(application, people, now)
        _stuck(application, people, now)
    say(f"campaigns: {len(rows) + 3} sequences, {len(people)} leads, {Execution.objects.count()} executions")


def _senders(application: Application) -> list[Sender]:
    window = {"window_from": time(9), "window_to": time(18), "window_days": [1, 2, 3, 4, 5]}
    made: list[dict[str, Any]] = [
        {"channel": "email", "address": "mina@shop.example.com", "display_name": "Mina", "daily_limit": 30, **window},
        {"channel": "email", "address": "jun@shop.example.com", "display_name": "Jun", "daily_limit": 200},
        {"channel": "sms", "address": "+8215880000", "display_name": "Shop", "hourly_limit": 50},
        {"channel": "email", "address": "old@shop.example.com", "display_name": "Old mailbox"},
    ]
    return [senders.create_sender(application, fields) for fields in made]


def _leads(application: Application, count: int, now: datetime) -> list[Lead]:
    entries = [
        {
            "name": _name(n),
            "email": f"lead{n}@customer{n % 7}.example.com",
            "phone": f"+8210{n:08}" if n % 3 else None,
            "company_domain": f"customer{n % 7}.example.com",
            "time_zone": ZONES[n % len(ZONES)],
        }
        for n in range(count)
    ]
    return [lead for lead, _new in leads.create_leads(application, entries, now)]


def _name(n: int) -> str:
    family, given = FAMILY[n % 10], GIVEN[n % 10 // 5 * 5 + n // 10 % 5]
    return f"{family}{given}" if n % 10 < 5 else f"{given} {family}"


def _live(application: Application, people: list[Lead], now: datetime) -> None:
    """Goes on by itself under `make run`: sends, is answered, completes."""
    made = {"channel": "email", "address": "hello@shop.example.com", "display_name": "Hello"}
    sender = senders.create_sender(application, made)
    row = sequences.create_sequence(application, {"name": "Live follow-up"}, sender_ids=[sender.pk], steps=QUICK)
    sequences.activate_sequence(row.pk, sequences.Pass(), now)
    enroll_leads(row.pk, [lead.pk for lead in people], now)


def _harvest(application: Application, people: list[Lead], now: datetime) -> None:
    """All is sent and somebody has answered: it stays open for a few days, for more answers."""
    sender = senders.create_sender(application, {"channel": "email", "address": "thanks@shop.example.com"})
    row = sequences.create_sequence(application, {"name": "Trade show thanks"}, sender_ids=[sender.pk], steps=STEPS[:1])
    sequences.activate_sequence(row.pk, sequences.Pass(), now)
    enroll_leads(row.pk, [lead.pk for lead in people[8:14]], now)
    send_due([sender.pk], now)
    # Before the provider's answers: those complete the sequence when nobody has replied yet.
    for place, text in ((1, "네, 다음 주에 통화 가능합니다."), (3, "Thanks! Could you send the price list?")):
        enrollment = row.enrollments.order_by("pk")[place]
        incoming = replies.Incoming(enrollment_id=enrollment.pk, kind="human", text=text)
        replies.record_reply(incoming, Enrollment.objects.all(), now)
    _answer_messages(now)


def _stuck(application: Application, people: list[Lead], now: datetime) -> None:
    """What the product is for: called complete weeks ago while people were never sent to. The first batch mends it."""
    then = now - timedelta(days=49)
    sender = senders.create_sender(application, {"channel": "email", "address": "fair@shop.example.com"})
    row = sequences.create_sequence(application, {"name": "Autumn fair"}, sender_ids=[sender.pk], steps=STEPS[:1])
    sequences.activate_sequence(row.pk, sequences.Pass(), then)
    enroll_leads(row.pk, [lead.pk for lead in people[:21]], then)
    Sequence.objects.filter(pk=row.pk).update(status="completed", completed_at=then + timedelta(days=1))


def _sequence(application: Application, name: str, pool: list[Sender]) -> Sequence:
    ids = [sender.pk for sender in pool]
    return sequences.create_sequence(application, {"name": name}, sender_ids=ids, steps=STEPS)


def _run(rows: list[Sequence], people: list[Lead], now: datetime) -> None:
    *running, _draft = rows
    share = max(1, len(people) // len(running))
    for place, row in enumerate(running):
        sequences.activate_sequence(row.pk, sequences.Pass(), now)
        group = people[place * share : (place + 1) * share]
        enroll_leads(row.pk, [lead.pk for lead in group], now)
    for sender in Sender.objects.healthy():
        send_due([sender.pk], now)
    _answer_messages(now)
    _stories(running, now)


def _answer_messages(now: datetime) -> None:
    """As if the provider had answered: most accepted, a few bounced."""
    mine = Message.objects.filter(idempotency_key__startswith="step-execution:", status="pending")
    bounced = list(mine.order_by("pk").values_list("pk", flat=True)[::9])
    details = {"scope": "recipient", "code": "5.1.1"}
    mine.filter(pk__in=bounced).update(
        status="failed", failed_at=now, error_reason="hard_bounce", error_details=details
    )
    mine.filter(status="pending").update(status="successful", sent_at=now)
    record_results(list(Execution.objects.answered().values_list("pk", flat=True)), now)


def _stories(rows: list[Sequence], now: datetime) -> None:
    """Replies, an absence, a pause, a completed sequence, and a mailbox that stopped working."""
    live = list(Enrollment.objects.filter(sequence=rows[0], status="active").order_by("pk")[:4])
    told = [
        {"kind": "human", "text": "Interesting, please call me."},
        {"subject": "자동응답: 부재중", "text": "11월 25일까지 휴가입니다."},
        {"kind": "unsubscribe", "text": "Please stop."},
    ]
    for row, fields in zip(live, told, strict=False):
        incoming = replies.Incoming(enrollment_id=row.pk, **fields)  # type: ignore[arg-type]
        replies.record_reply(incoming, Enrollment.objects.all(), now)
    if len(live) > 3:
        enrollments.pause_enrollment(live[3].pk, now, resume_at=now + timedelta(days=3), reason="asked for a break")
    sequences.pause_sequence(rows[2].pk)
    sequences.complete_sequence(rows[3].pk, now)
    old = Sender.objects.get(address="old@shop.example.com")
    old.report_error("535 5.7.8 authentication failed")
    old.save(update_fields=["status", "last_error"])
