"""Rows of campaigns for tests; `world()` is a sequence with steps, a sender and leads, ready to run."""

from datetime import UTC, datetime, timedelta

import factory

from campaigns.models import Enrollment, Execution, Lead, Reply, Sender, Sequence, SequenceSender, Step
from messaging.models import Application

NOW = datetime(2026, 3, 4, 10, 0, tzinfo=UTC)  # a Wednesday
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class ApplicationFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Application
        django_get_or_create = ("slug",)

    slug = "shop"


class SenderFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Sender

    application = factory.SubFactory(ApplicationFactory)
    channel = "email"
    address = factory.Sequence(lambda n: f"sender{n}@shop.example")


class LeadFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Lead

    application = factory.SubFactory(ApplicationFactory)
    name = factory.Sequence(lambda n: f"Lead {n}")
    email = factory.Sequence(lambda n: f"lead{n}@example.com")


class SequenceFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Sequence

    application = factory.SubFactory(ApplicationFactory)
    name = factory.Sequence(lambda n: f"Sequence {n}")
    status = "active"
    activated_at = NOW - 30 * DAY
    completed_at = factory.LazyAttribute(lambda row: NOW - DAY if row.status == "completed" else None)


class StepFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Step

    sequence = factory.SubFactory(SequenceFactory)
    position = factory.LazyAttribute(lambda row: row.sequence.steps.count() + 1)
    channel = "email"
    subject = "Hello"
    body = "Dear {{name}}"
    delay_seconds = 0


class EnrollmentFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Enrollment

    sequence = factory.SubFactory(SequenceFactory)
    lead = factory.SubFactory(LeadFactory, application=factory.SelfAttribute("..sequence.application"))
    sender = None


class ExecutionFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Execution

    enrollment = factory.SubFactory(EnrollmentFactory)
    step = factory.LazyAttribute(
        lambda row: row.enrollment.sequence.steps.first() or StepFactory(sequence=row.enrollment.sequence)
    )
    status = "pending"
    scheduled_at = NOW
    deferred_until = factory.LazyAttribute(lambda row: row.scheduled_at if row.status == "deferred" else None)
    processing_started_at = factory.LazyAttribute(lambda row: row.scheduled_at if row.status == "processing" else None)
    executed_at = factory.LazyAttribute(lambda row: row.scheduled_at if row.status in ("sent", "failed") else None)
    skip_reason = factory.LazyAttribute(lambda row: "stopped" if row.status == "skipped" else None)


class ReplyFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = Reply

    enrollment = factory.SubFactory(EnrollmentFactory)
    kind = "human"
    received_at = NOW


def pool(sequence, *senders):
    for place, sender in enumerate(senders, 1):
        SequenceSender.objects.create(sequence=sequence, sender=sender, position=place)


def work(sequence=None, *, sender=None, status="pending", due=NOW, enrollment="active", **fields):
    """One lead with one execution of the sequence's first step."""
    sequence = sequence or SequenceFactory()
    row = EnrollmentFactory(sequence=sequence, sender=sender, status=enrollment)
    return ExecutionFactory(enrollment=row, status=status, scheduled_at=due, **fields)
