"""Time-driven verbs. Each finds rows by a predicate of the models and hands them to a service."""

from config.sweeping import Sweep


def send_due_steps(sweep: Sweep) -> None: ...


def follow_message_results(sweep: Sweep) -> None: ...


def resume_paused_enrollments(sweep: Sweep) -> None: ...


def reconcile_sequences(sweep: Sweep) -> None: ...
