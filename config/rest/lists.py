"""Lists: keyset pages and strict filters."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError as DjangoValidationError
from django.db.models import F, Field, Model, Q, QuerySet
from django.forms import NullBooleanField
from django_filters.rest_framework import DjangoFilterBackend
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.pagination import CursorPagination
from rest_framework.utils.urls import replace_query_param


class CursorPages(CursorPagination):
    """Keyset pages over one column and the primary key.

    Not DRF's own walk: that remembers the column alone and counts ties, at most 1000, then repeats itself. A view's
    `ordering_fields` are names of columns of its model; NULLs come last ascending and first descending, with
    `nulls_first` the other way round.
    """

    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 500
    ordering = "-id"
    ordering_query_param = "ordering"
    nulls_first = False

    def paginate_queryset(self, queryset: Any, request: Any, view: Any = None) -> list[Any]:
        size = self.get_page_size(request)
        self.base_url = request.build_absolute_uri()
        self.order = self.get_ordering(request, queryset, view)[0]
        position = self.position(request, queryset.model)
        back = bool(position and position[0])
        descending = self.order.startswith("-") != back
        name = self.order.lstrip("-")
        if position:
            queryset = queryset.filter(beyond(queryset.model, name, descending, *position[1:], self.nulls_first))
        sign = "-" if descending else ""
        first: Any = sign + name
        # A column without NULLs is ordered plainly: an index serves only the order it was made for, and its reverse.
        if self.nulls_first and column(queryset.model, name).null:
            first = F(name).desc(nulls_last=True) if descending else F(name).asc(nulls_first=True)
        rows = list(queryset.order_by(first, sign + "pk")[: size + 1])
        more = len(rows) > size
        self.page = rows[:size][::-1] if back else rows[:size]
        self.has_next = back or more
        self.has_previous = more if back else position is not None
        return self.page

    def get_page_size(self, request: Any) -> int:
        text = request.query_params.get(self.page_size_query_param)
        if text is None:
            return self.page_size
        digits = text.lstrip("0")
        if not digits or not text.isascii() or not text.isdigit():
            raise ValidationError({"page_size": ["Expected a positive whole number."]})
        return self.max_page_size if len(digits) > 4 else min(int(digits), self.max_page_size)

    def get_ordering(self, request: Any, queryset: QuerySet[Any], view: Any) -> tuple[str, ...]:
        wanted = request.query_params.get(self.ordering_query_param)
        if wanted is None:
            return (getattr(view, "ordering", None) or self.ordering,)
        fields = getattr(view, "ordering_fields", ())
        if wanted.removeprefix("-") not in fields:
            raise ValidationError({"ordering": [f"Expected one of: {', '.join(fields) or 'nothing'}."]})
        return (wanted,)

    def position(self, request: Any, model: type[Model]) -> tuple[bool, Any, Any] | None:
        """(backwards, the column's value, the primary key) of the row the page starts beyond."""
        encoded = request.query_params.get(self.cursor_query_param)
        if encoded is None:
            return None
        try:
            order, back, value, pk = json.loads(urlsafe_b64decode(encoded.encode("ascii")))
            if order != self.order or not isinstance(back, bool) or not isinstance(pk, str):
                raise ValueError
            if not isinstance(value, str | None) or "\x00" in pk + (value or ""):
                raise ValueError
            field = column(model, order.lstrip("-"))
            return back, None if value is None else field.to_python(value), model._meta.pk.to_python(pk)
        except (ValueError, TypeError, RecursionError, OverflowError, DjangoValidationError):
            raise ValidationError({"cursor": ["This cursor is not valid here."]}) from None

    def link(self, row: Model | None, back: bool) -> str | None:
        if row is None:
            return None
        field = column(type(row), self.order.lstrip("-"))
        value = None if getattr(row, field.attname) is None else field.value_to_string(row)
        text = json.dumps([self.order, back, value, str(row.pk)])
        return replace_query_param(
            str(self.base_url), self.cursor_query_param, urlsafe_b64encode(text.encode()).decode()
        )

    def get_next_link(self) -> str | None:
        return self.link(self.page[-1] if self.page and self.has_next else None, False)

    def get_previous_link(self) -> str | None:
        return self.link(self.page[0] if self.page and self.has_previous else None, True)

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        parameters = super().get_schema_operation_parameters(view)
        names = [sign + name for name in getattr(view, "ordering_fields", ()) for sign in ("", "-")]
        if names:
            schema = {"type": "string", "enum": names}
            parameters.append({"name": self.ordering_query_param, "required": False, "in": "query", "schema": schema})
        return parameters


def column(model: type[Model], name: str) -> "Field[Any, Any]":
    field = model._meta.pk if name == "pk" else model._meta.get_field(name)
    assert isinstance(field, Field), f"{name} is not a column of {model.__name__}"
    return field


def beyond(model: type[Model], name: str, descending: bool, value: Any, pk: Any, nulls_first: bool = False) -> Q:
    """The rows after (value, pk) in an order where NULL stands above everything, or with `nulls_first` below."""
    compare = "lt" if descending else "gt"
    tied = Q(**{f"pk__{compare}": pk})
    field = column(model, name)
    if field.primary_key:
        return tied
    nulls_follow = descending == nulls_first
    if value is None:
        rest = Q() if nulls_follow else Q(**{f"{name}__isnull": False})
        return Q(**{f"{name}__isnull": True}) & tied | rest
    # The plain bound beside the OR is what lets PostgreSQL enter the index at the right place.
    after = Q(**{f"{name}__{compare}e": value}) & (Q(**{f"{name}__{compare}": value}) | tied)
    return after | Q(**{f"{name}__isnull": True}) if field.null and nulls_follow else after


FLAGS = ("", "true", "false", "1", "0")


class StrictFilterBackend(DjangoFilterBackend):
    """A misspelt filter must not answer with everything. Views may add names with `extra_query_params`."""

    def filter_queryset(self, request: Any, queryset: QuerySet[Any], view: Any) -> QuerySet[Any]:
        filterset = self.get_filterset(request, queryset, view)
        fields = filterset.form.fields if filterset else {}
        known = self.known(fields, view)
        errors: dict[str, list[ErrorDetail]] = {}
        for name, values in request.query_params.lists():
            if name not in known:
                errors[name] = [ErrorDetail("There is no such query parameter.", "unknown_parameter")]
            elif any("\x00" in value for value in values):
                errors[name] = [ErrorDetail("NUL characters are not allowed.", "invalid")]
            # Django takes any other word for no answer, and the list would not be filtered.
            elif isinstance(fields.get(name), NullBooleanField) and values[-1].lower() not in FLAGS:
                errors[name] = [ErrorDetail("Expected true or false.", "invalid")]
        if errors:
            raise ValidationError(errors)
        return super().filter_queryset(request, queryset, view)

    def known(self, fields: Mapping[str, Any], view: Any) -> set[str]:
        known = {"format", *getattr(view, "extra_query_params", ())}
        if getattr(view, "paginator", None) is not None:
            known |= {"cursor", "page_size", "ordering"}
        for name, field in fields.items():
            suffixes = getattr(field.widget, "suffixes", None)
            known |= {f"{name}_{suffix}" if suffix else name for suffix in suffixes} if suffixes else {name}
        return known
