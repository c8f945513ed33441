"""Badge, API field, filter and reconciler agree, on generated data."""

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.models import DisplayState, Enrollment, Execution, Reply, Sequence
from campaigns.services.completion import display_until, judge
from campaigns.services.reconciling import reconcile_sequence
from tests.campaigns.factories import (
    DAY,
    HOUR,
    MINUTE,
    NOW,
    EnrollmentFactory,
    ExecutionFactory,
    ReplyFactory,
    SequenceFactory,
    work,
)

pytestmark = pytest.mark.django_db

one_enrollment = st.fixed_dictionaries(
    {
        "status": st.sampled_from(["active", "paused", "completed", "replied", "stopped"]),
        "resume_at": st.sampled_from([None, NOW + DAY, NOW + 5 * DAY]),
        "execution": st.sampled_from([None, "pending", "processing", "deferred", "awaiting_enrichment", "sent"]),
        "reply": st.sampled_from([None, ("human", 1), ("human", 3), ("human", 4), ("ooo", 1)]),
    }
)
one_sequence = st.fixed_dictionaries(
    {
        "status": st.sampled_from(Sequence.Status.values),
        "activated": st.sampled_from([HOUR, 24 * HOUR, 9 * DAY]),
        "enrollments": st.lists(one_enrollment, max_size=3),
    }
)


def build(plan):
    sequence = SequenceFactory(status=plan["status"], activated_at=NOW - plan["activated"])
    for entry in plan["enrollments"]:
        paused = entry["status"] == "paused"
        row = EnrollmentFactory(
            sequence=sequence, status=entry["status"], resume_at=entry["resume_at"] if paused else None
        )
        if entry["execution"]:
            ExecutionFactory(enrollment=row, status=entry["execution"], scheduled_at=NOW)
        if entry["reply"]:
            ReplyFactory(enrollment=row, kind=entry["reply"][0], received_at=NOW - entry["reply"][1] * DAY)
    return sequence


def said_in_words(sequence):
    """The specification's sentence, over plain rows."""
    if sequence.status != "active":
        return sequence.status
    rows = list(Execution.objects.filter(enrollment__sequence=sequence).select_related("enrollment"))
    work_of = [x.enrollment.status for x in rows if x.status in ("pending", "processing", "deferred")]
    pending = any(status in ("active", "paused") for status in work_of)
    replies = Reply.objects.filter(enrollment__sequence=sequence, kind="human")
    if not pending and any(reply.received_at + 3 * DAY > NOW for reply in replies):
        return "reply_harvest"
    enrollments = list(Enrollment.objects.filter(sequence=sequence))
    if any(e.status == "paused" and e.resume_at for e in enrollments) and "active" not in work_of:
        return "partially_paused"
    fresh = not enrollments and NOW - sequence.activated_at < DAY
    return "finalizing" if not pending and not fresh else "active"


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans=st.lists(one_sequence, min_size=1, max_size=4))
def test_badge_filter_and_reconciler_agree(plans):
    with transaction.atomic():
        for plan in plans:
            row = build(plan)
            shown = Sequence.objects.with_display(NOW).get(pk=row.pk)
            assert shown.display_state == said_in_words(row)
            mine = Sequence.objects.with_display(NOW).filter(pk=row.pk)
            assert mine.filter(display_state=shown.display_state).exists()
            assert not mine.exclude(display_state=shown.display_state).exists()
            assert shown.display_state in DisplayState.values
            verdict = judge(shown, NOW)
            if shown.status == "active":
                assert (shown.display_state == "reply_harvest") == (verdict.guard == "reply_harvest")
                assert (verdict.verdict == "completed") == Sequence.objects.completable(NOW).filter(pk=row.pk).exists()
                if shown.display_state == "finalizing":
                    assert verdict.verdict == "completed"
                    assert reconcile_sequence(row.pk, NOW).verdict.verdict == "completed"
                if shown.display_state == "reply_harvest":
                    assert display_until(shown, NOW) == verdict.until
        transaction.set_rollback(True)


def test_each_badge_says_until_when():
    harvest = work(status="sent", enrollment="replied")
    ReplyFactory(enrollment=harvest.enrollment, received_at=NOW - DAY)
    paused = work(status="pending", enrollment="paused")
    Enrollment.objects.filter(pk=paused.enrollment_id).update(resume_at=NOW + DAY)
    ending = work(status="sent", enrollment="completed")
    states = {
        row.pk: (row.display_state, display_until(row, NOW + MINUTE)) for row in Sequence.objects.with_display(NOW)
    }
    assert states[harvest.enrollment.sequence_id] == ("reply_harvest", NOW + 2 * DAY)
    assert states[paused.enrollment.sequence_id] == ("partially_paused", NOW + DAY)
    assert states[ending.enrollment.sequence_id] == ("finalizing", NOW + 5 * MINUTE)
