"""Idempotency-Key: the same request again gets the first answer again."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

from django.conf import settings
from django.db import connection, transaction
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from config.errors import Conflict, Invalid
from config.models import IdempotencyKey

VISIBLE_ASCII = re.compile(r"[\x21-\x7e]{1,255}")

Handler = Callable[..., Response]


class Seal(Protocol):
    """A view's `seal` encrypts the answers that are kept to be given again: a secret in them is nobody's to read."""

    def encrypt(self, text: str) -> str: ...

    def decrypt(self, text: str) -> str: ...


def idempotent(handler: Handler) -> Handler:
    """Honour the header on this handler of a view. Below @action, above the function."""

    @wraps(handler)
    def wrapped(view: Any, request: Request, *args: Any, **kwargs: Any) -> Response:
        # An override that calls super() is wrapped twice; the outer one has done it all.
        if getattr(request, "answered_once", False):
            return handler(view, request, *args, **kwargs)
        request.answered_once = True  # type: ignore[attr-defined]
        seal = getattr(view, "seal", None)
        return answer_once(request, lambda: handler(view, request, *args, **kwargs), seal)

    wrapped.idempotent = True  # type: ignore[attr-defined]
    return wrapped


class IdempotentMixin:
    """Makes `create` (or the `post` of a plain APIView) idempotent, inherited or its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("create", "post"):
            handler = getattr(cls, name, None)
            if handler is not None and not getattr(handler, "idempotent", False):
                setattr(cls, name, idempotent(handler))


def answer_once(request: Request, run: Callable[[], Response], seal: Seal | None = None) -> Response:
    key = request.headers.get("Idempotency-Key")
    if key is not None:
        check_key(key)
    if key is None or not request.user.is_authenticated:
        with transaction.atomic():
            return successful(run())
    scope, mark = f"{request.method} {request.path}", fingerprint(request.data)
    while True:
        with transaction.atomic():
            row_id = claim_key(request.user.pk, scope, key, mark)
            if row_id is not None:
                return remember(row_id, successful(run()), seal)
            first = IdempotencyKey.objects.filter(user=request.user, scope=scope, key=key).first()
        if first is not None:
            return replay(first, mark, seal)
        # Purged between the two statements: the key is free again.


def check_key(key: str, attr: str = "Idempotency-Key") -> None:
    if not VISIBLE_ASCII.fullmatch(key):
        raise Invalid("Expected 1 to 255 visible ASCII characters.", attr=attr)
    if key.startswith(settings.RESERVED_KEYS):
        raise Invalid("Keys that begin like this are made by the system itself.", attr=attr)


def claim_key(user_id: Any, scope: str, key: str, mark: str) -> int | None:
    """The row's id when the key is ours, None when it is taken.

    ON CONFLICT … DO UPDATE … WHERE is beyond bulk_create: it takes over a row older than the window in the same
    statement, and a concurrent twin waits in it until the first has committed or rolled back.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO idempotency_keys AS old (user_id, scope, key, fingerprint, created_at)
            VALUES (%s, %s, %s, %s, clock_timestamp())
            ON CONFLICT (user_id, scope, key) DO UPDATE
               SET fingerprint = EXCLUDED.fingerprint, status = NULL, body = NULL, created_at = EXCLUDED.created_at
             WHERE old.created_at <= EXCLUDED.created_at - make_interval(secs => %s)
            RETURNING id
            """,
            [user_id, scope, key, mark, settings.IDEMPOTENCY_WINDOW.total_seconds()],
        )
        row = cursor.fetchone()
    return row[0] if row else None


def successful(response: Response) -> Response:
    """Only a 2xx commits; any other answer leaves nothing behind, not even the key."""
    if not 200 <= response.status_code < 300:
        transaction.set_rollback(True)
    return response


def remember(row_id: int, response: Response, seal: Seal | None = None) -> Response:
    if 200 <= response.status_code < 300:
        text = None if response.data is None else JSONRenderer().render(response.data).decode()
        # As a text: of an object jsonb would not keep the order, and the first answer is given again as it was.
        body = text if text is None or seal is None else {"sealed": seal.encrypt(text)}
        IdempotencyKey.objects.filter(pk=row_id).update(status=response.status_code, body=body)
    return response


def replay(first: IdempotencyKey, mark: str, seal: Seal | None = None) -> Response:
    if first.fingerprint != mark:
        raise Conflict("This key was used with another body.", code="idempotency_conflict", attr="Idempotency-Key")
    text = first.body if seal is None or first.body is None else seal.decrypt(first.body["sealed"])
    return Response(
        json.loads(text) if isinstance(text, str) else text, status=first.status, headers={"Idempotent-Replay": "true"}
    )


def fingerprint(data: Any) -> str:
    return hashlib.sha256(json.dumps(canonical(data), sort_keys=True).encode()).hexdigest()


def canonical(value: Any) -> Any:
    """1.0 and 1 are the same JSON number; the parser bounds the depth."""
    if isinstance(value, Mapping):
        return {name: canonical(child) for name, child in value.items()}
    if isinstance(value, list):
        return [canonical(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
