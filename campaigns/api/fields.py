"""What the endpoints of campaigns share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django.contrib.auth.models import AnonymousUser, User
from django.db import models
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request

from campaigns.services import sequences
from config.errors import Invalid
from config.rest import SEE_ALL_TENANTS, StrictModelSerializer, Text, Whole
from messaging.models import Application

METHODS = ["get", "post", "patch", "delete", "head", "options"]
INTEGER = 2**31 - 1


def applications_of(user: User | AnonymousUser) -> Any:
    return Application.objects.all() if user.has_perm(SEE_ALL_TENANTS) else Application.objects.filter(members=user.pk)


def application_for(request: Request, slug: str | None) -> Application:
    """The one named; left out, the client's only one."""
    rows = applications_of(request.user)
    if slug is not None:
        found = rows.filter(slug=slug).first()
        if found is None:
            raise Invalid(_("There is no such application."), code="does_not_exist", attr="application")
        return found
    own = list(Application.objects.filter(members=request.user.pk)[:2]) or list(rows[:2])
    if len(own) != 1:
        raise Invalid(_("Name the application."), code="required", attr="application")
    return own[0]


class ApplicationSlug(serializers.SlugRelatedField[Application]):
    """Shown as its slug; written only when the row is created."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(slug_field="slug", **{"read_only": True, **kwargs})


def integer(**kwargs: Any) -> Whole:
    return Whole(**{"min_value": 0, "max_value": INTEGER, **kwargs})


class RowSerializer(StrictModelSerializer):
    """A row whose texts are JSON strings."""

    serializer_field_mapping = {
        **StrictModelSerializer.serializer_field_mapping,
        models.CharField: Text,
        models.TextField: Text,
    }


def refuse_changes(data: Any, *names: str) -> None:
    """Fields that are given once."""
    if isinstance(data, dict) and (fixed := [name for name in names if name in data]):
        raise ValidationError(
            {name: serializers.ErrorDetail(_("This cannot be changed."), "read_only") for name in fixed}
        )


@contextmanager
def behind_gate(sequence_id: UUID, shown: sequences.Pass, *, always: bool = False) -> Iterator[None]:
    """Around the judging of a body: a write that the gate refuses is refused by the gate, whatever it says."""
    try:
        yield
    except ValidationError:
        sequences.ask_gate(sequence_id, shown, always=always)
        raise


def flat_errors(detail: Any, attr: str | None = None) -> list[dict[str, Any]]:
    """DRF's nested errors as the standard list."""
    if isinstance(detail, dict):
        return [
            error
            for name, inner in detail.items()
            for error in flat_errors(inner, name if attr is None else f"{attr}.{name}")
        ]
    if isinstance(detail, list):
        return [error for inner in detail for error in flat_errors(inner, attr)]
    own = None if attr == "non_field_errors" else attr
    return [{"code": getattr(detail, "code", "invalid"), "detail": str(detail), "attr": own}]
