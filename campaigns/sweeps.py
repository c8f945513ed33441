"""Time-driven verbs. Each finds rows by a predicate of the models and hands them to a service."""

from functools import partial
from uuid import UUID

from campaigns.models import Enrollment, Execution
from campaigns.services import enrollments, following, reconciling, sending
from config.sweeping import Sweep


def send_due_steps(sweep: Sweep) -> None:
    skip = partial(sending.skip_suppressed, now=sweep.now, run_id=sweep.run_id)
    sweep.pages(sending.pending_sequences(sweep.now), skip, label="suppressed", size=50)
    send = partial(sending.send_due, now=sweep.now, run_id=sweep.run_id)

    def spoiled(sender: UUID, _error: Exception) -> None:
        """One of its steps spoils the others: they go on in ever smaller pages, until it stands alone."""
        rows = sending.due_of(sender, sweep.now)
        sweep.pages(rows, lambda keys: send([sender], only=keys), label=f"steps of {sender}")

    before = -1
    # A sender takes a batch at a time; the round goes on while somebody still found something to send.
    while sweep.has_time() and before != (taken := sum(sweep.counts[kind] for kind in sending.TAKEN)):
        before = taken
        sweep.pages(sending.with_due_steps(sweep.now), send, label="senders", size=20, failed=spoiled)


def follow_message_results(sweep: Sweep) -> None:
    handle = partial(following.record_results, now=sweep.now, run_id=sweep.run_id)
    sweep.pages(Execution.objects.answered(), handle)


def resume_paused_enrollments(sweep: Sweep) -> None:
    handle = partial(enrollments.resume_due, now=sweep.now, run_id=sweep.run_id)
    sweep.pages(Enrollment.objects.resumable(sweep.now), handle)


def reconcile_sequences(sweep: Sweep) -> None:
    """Rule after rule over all sequences. When the time is up, the next run goes on behind the last page of each."""
    for rule in reconciling.RULES:
        handle = reconciling.handler(rule, sweep.now, sweep.run_id)
        sweep.pages(rule.candidates(sweep.now), handle, label=rule.name, size=rule.page)
