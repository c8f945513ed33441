"""Admin actions over services that take one row: each row is its own attempt, refusals are counted by their code."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django_fsm import TransitionNotAllowed

from config.errors import DomainError


def each(act: Callable[[Any, Any], Any], done: str) -> Callable[[list[Any], Any, str], Counter[str]]:
    """`act(pk, user)`; what it does not allow for one row does not stop the others."""

    def run(ids: list[Any], user: Any, reason: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for pk in ids:
            try:
                with transaction.atomic():
                    act(pk, user)
                counts[done] += 1
            except TransitionNotAllowed:
                counts["illegal_transition"] += 1
            except DomainError as refusal:
                counts[refusal.code] += 1
        return counts

    return run
