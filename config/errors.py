"""What a service raises when it refuses. config.rest makes it an HTTP answer; admin and commands show `detail`."""

from typing import Any


class DomainError(Exception):
    status = 409
    code = "conflict"
    # When set, the answer is this body alone instead of the standard error form (423 tells who holds the lock).
    body: dict[str, Any] | None = None

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        attr: str | None = None,
        extra: dict[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or type(self).code
        self.attr = attr
        self.extra = extra or {}
        self.retry_after = retry_after


class Invalid(DomainError):
    status = 400
    code = "invalid"


class Forbidden(DomainError):
    status = 403
    code = "permission_denied"


class Missing(DomainError):
    status = 404
    code = "not_found"


class Conflict(DomainError):
    status = 409
    code = "conflict"


class Gone(DomainError):
    status = 410
    code = "gone"


class TooMany(DomainError):
    status = 429
    code = "throttled"


class Unavailable(DomainError):
    status = 503
    code = "unavailable"
