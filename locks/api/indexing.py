"""Indexing start under an Idempotency-Key: it may be refused with events to keep, and its locks may die."""

from collections.abc import Callable
from typing import Any

from django.db import transaction
from rest_framework.request import Request
from rest_framework.response import Response

from config.models import IdempotencyKey
from config.rest.idempotency import claim_key, fingerprint, remember, replay
from locks.models import BranchLock
from locks.services import LockConflict, LockGone

Start = Callable[[], dict[str, Any] | LockConflict]


def answer_start(request: Request, key: str | None, start: Start) -> Response:
    answer = start() if key is None else _once(request, key, start)
    if isinstance(answer, LockConflict):
        raise answer
    return answer if isinstance(answer, Response) else Response(answer, status=201)


def _once(request: Request, key: str, start: Start) -> Response | LockConflict:
    """Like config.rest's `idempotent`, but a refusal commits its events and a dead lock is never shown again."""
    scope, mark = f"{request.method} {request.path}", fingerprint(request.data)
    while True:
        with transaction.atomic():
            row_id = claim_key(request.user.pk, scope, key, mark)
            if row_id is not None:
                answer = start()
                if isinstance(answer, LockConflict):
                    IdempotencyKey.objects.filter(pk=row_id).delete()
                    return answer
                return remember(row_id, Response(answer, status=201))
            first = IdempotencyKey.objects.filter(user=int(str(request.user.pk)), scope=scope, key=key).first()
        if first is not None:
            return _again(replay(first, mark))


def _again(answer: Response) -> Response:
    ids = [lock["lock_id"] for lock in answer.data["locks"]]
    if any(lock.dead for lock in BranchLock.objects.clocked().filter(pk__in=ids)):
        raise LockGone
    return answer
