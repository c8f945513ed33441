"""Every exception as an answer in the form of drf-standardized-errors. None of the known ones is a 500."""

import logging
import math
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.core.exceptions import ValidationError as DjangoValidationError
from django.db import DataError, Error, IntegrityError, InterfaceError, OperationalError
from django.http import UnreadablePostError
from django_fsm import TransitionNotAllowed
from drf_standardized_errors.handler import exception_handler as standard_handler
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.serializers import as_serializer_error
from rest_framework.views import set_rollback

from config.errors import Conflict, DomainError, Invalid, Unavailable

logger = logging.getLogger(__name__)

# Another transaction was in the way: deadlock, serialization failure, lock_timeout, statement_timeout.
IN_THE_WAY = {"40P01", "40001", "55P03", "57014"}
CHECK_VIOLATION, NOT_NULL_VIOLATION = "23514", "23502"


class TooLarge(DomainError):
    status = 413
    code = "too_large"


def exception_handler(exc: Exception, context: Any) -> Response | None:
    if isinstance(exc, DjangoValidationError):
        exc = ValidationError(as_serializer_error(exc))
    error = exc if isinstance(exc, DomainError) else as_domain_error(exc)
    if error is None:
        return named(standard_handler(exc, context))
    if error.status >= 500:
        logger.warning("answered %s: %s", error.status, type(exc).__name__)
    set_rollback()
    return answer(error)


def named(response: Response | None) -> Response | None:
    """What is wrong with a list as a whole is told of the list."""
    for error in (response.data if response is not None else {}).get("errors", []):
        if error["attr"]:
            error["attr"] = error["attr"].removesuffix(".non_field_errors")
    return response


def answer(error: DomainError) -> Response:
    wait = error.retry_after
    headers = {} if wait is None else {"Retry-After": str(max(0, math.ceil(wait)))}
    if error.body is not None:
        return Response(error.body, status=error.status, headers=headers)
    kind = "validation_error" if error.status == 400 else "client_error" if error.status < 500 else "server_error"
    errors = [{"code": error.code, "detail": error.detail, "attr": error.attr}]
    return Response({"type": kind, "errors": errors, **error.extra}, status=error.status, headers=headers)


def as_domain_error(exc: Exception) -> DomainError | None:
    if isinstance(exc, TransitionNotAllowed):
        return Conflict(str(exc) or "This transition is not allowed now.", code="illegal_transition")
    if isinstance(exc, RequestDataTooBig):
        return TooLarge("The request body is too large.")
    if isinstance(exc, SuspiciousOperation | UnreadablePostError):
        return Invalid("The request cannot be read.", code="parse_error")
    return refusal(exc) if isinstance(exc, Error) else None


def refusal(exc: Error) -> DomainError | None:
    """What the database's complaint means to a client."""
    cause: Any = exc.__cause__
    state = getattr(cause, "sqlstate", None) or ""
    if isinstance(exc, IntegrityError):
        return violation(state, getattr(cause, "diag", None))
    # Class 54, program limit exceeded, is an OperationalError of the input's making: a text too long for its index.
    if isinstance(exc, DataError) or state.startswith("54"):
        return Invalid("A value is out of range or cannot be stored.")
    if state in IN_THE_WAY:
        return Unavailable("Another request is in the way. Try again.", code="busy", retry_after=1)
    if isinstance(exc, OperationalError | InterfaceError):
        return Unavailable("The database is away. Try again.", retry_after=5)
    return None


def violation(state: str, diag: Any) -> DomainError | None:
    name = getattr(diag, "constraint_name", None)
    if name and state == CHECK_VIOLATION and name.endswith("_graph"):
        return Conflict(f"This transition is not allowed ({name}).", code="illegal_transition")
    if name:
        return Conflict(f"This contradicts what is stored ({name}).")
    if state == NOT_NULL_VIOLATION:
        return Invalid("A value is missing.", code="null", attr=diag.column_name)
    return None
