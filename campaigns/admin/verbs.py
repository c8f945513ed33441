"""Admin actions over services that take one row: each row is its own attempt, refusals are counted by their code.

Of a single row the refusal is told in its own words: who holds the lock, say.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _
from django_fsm import TransitionNotAllowed

from config.errors import Conflict, DomainError


def each(act: Callable[[Any, Any], Any], done: str) -> Callable[[list[Any], Any, str], Counter[str]]:
    """`act(pk, user)`; what it does not allow for one row does not stop the others. A row alone is told why."""

    def run(ids: list[Any], user: Any, reason: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for pk in ids:
            try:
                with transaction.atomic():
                    act(pk, user)
                counts[done] += 1
            except TransitionNotAllowed:
                if len(ids) == 1:
                    raise Conflict(_("Its state does not allow it."), code="illegal_transition") from None
                counts["illegal_transition"] += 1
            except DomainError as refusal:
                if len(ids) == 1:
                    raise
                counts[refusal.code] += 1
        return counts

    return run
