"""Request bodies: JSON only, nothing PostgreSQL cannot store, nothing we do not know."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import IO, Any, NoReturn
from uuid import UUID

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.utils.translation import gettext_lazy
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ErrorDetail, ParseError, ValidationError
from rest_framework.parsers import BaseParser

MAX_DEPTH = 100
# Enough to find the mistake; a body of a million unknown keys must not become an answer of a million errors.
MAX_UNKNOWN = 20
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# The only ways in: a raw NUL is malformed JSON and a raw surrogate malformed UTF-8.
ESCAPED_UNSTORABLE = re.compile(r"\\u(?:0000|d[89a-f])", re.IGNORECASE)


class StrictJSONParser(BaseParser):
    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise RequestDataTooBig
        if not raw:
            return {}
        try:
            text = raw.decode("utf-8")
            data = json.loads(text, parse_constant=refuse_constant, parse_float=finite)
        except RecursionError:
            raise ParseError(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
        except ValueError as error:
            raise ParseError(f"The body is not JSON: {error}") from None
        if text.count("[") + text.count("{") > MAX_DEPTH:
            refuse_depth(data)
        if ESCAPED_UNSTORABLE.search(text):
            refuse_unstorable(data)
        return data


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def finite(text: str) -> float:
    """1e999 is well-formed, but Python reads it as infinity and PostgreSQL cannot store that in jsonb."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is out of range")
    return number


def children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def refuse_depth(data: Any) -> None:
    level = [data]
    for _depth in range(MAX_DEPTH + 1):
        level = [child for value in level if isinstance(value, dict | list) for child in children(value)]
        if not level:
            return
    raise ParseError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def strings(data: Any) -> Iterator[str]:
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
        stack.extend(children(value))


def unstorable(data: Any) -> bool:
    return any(UNSTORABLE.search(text) for text in strings(data))


def refuse_unstorable(data: Any) -> None:
    message = "NUL characters and lone surrogates cannot be stored."
    for name, value in data.items() if isinstance(data, dict) else ():
        # A name that cannot be encoded cannot be named in the answer either.
        if not UNSTORABLE.search(name) and unstorable(value):
            raise ValidationError({name: [message]})
    if unstorable(data):
        raise ParseError(message)


class KnownFieldsOnly:
    """What a client sends and we would ignore is its mistake or ours: say so."""

    fields: Any

    def to_internal_value(self, data: Any) -> Any:
        surplus = dict(islice(self.surplus(data), MAX_UNKNOWN)) if isinstance(data, Mapping) else {}
        try:
            value = super().to_internal_value(data)  # type: ignore[misc]
        except ValidationError as error:
            raise ValidationError({**error.detail, **surplus}) from None  # type: ignore[dict-item]
        if surplus:
            raise ValidationError(surplus)
        return value

    def surplus(self, data: Mapping[str, Any]) -> Iterator[tuple[str, list[ErrorDetail]]]:
        for name in data:
            field = self.fields.get(name)
            if field is None or isinstance(field, serializers.HiddenField):
                yield name, [ErrorDetail("There is no such field.", "unknown_field")]
            elif field.read_only:
                yield name, [ErrorDetail("This field cannot be written.", "read_only")]


class StrictSerializer(KnownFieldsOnly, serializers.Serializer[Any]):
    pass


class StrictModelSerializer(KnownFieldsOnly, serializers.ModelSerializer[Any]):
    pass


class Text(serializers.CharField):
    """A JSON string: a number is not taken for the text of it."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return str(super().to_internal_value(data))


class Key(serializers.UUIDField):
    """A UUID in a JSON string: a number is not taken for the 128 bits of one."""

    def to_internal_value(self, data: Any) -> UUID:
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return UUID(str(super().to_internal_value(data)))


class Whole(serializers.IntegerField):
    """A JSON number without a fraction: no text, no boolean."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int | float):
            self.fail("invalid")
        return int(super().to_internal_value(data))


class Flag(serializers.BooleanField):
    """JSON's true or false: none of the words that Django takes for them."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


class Moment(serializers.DateTimeField):
    """A time with its zone that can be reckoned with: some days earlier or later it is still a date of the calendar."""

    default_error_messages = {
        "no_zone": gettext_lazy("Expected a time with its zone, such as 2026-11-18T09:00:00Z."),
        "out_of_range": gettext_lazy("Expected a time between the years 1900 and 9000."),
    }

    def enforce_timezone(self, value: datetime) -> datetime:
        if value.tzinfo is None:
            self.fail("no_zone")
        return super().enforce_timezone(value)

    def to_internal_value(self, value: Any) -> datetime:
        moment: datetime = super().to_internal_value(value)
        if not 1900 <= moment.year <= 9000:
            self.fail("out_of_range")
        return moment


@extend_schema_field({})
class BoundedJSON(serializers.JSONField):
    """Any JSON value that PostgreSQL can store, up to a size."""

    default_error_messages = {
        "too_large": "At most {max_bytes} bytes of JSON are allowed.",
        "unstorable": "NUL characters and lone surrogates cannot be stored.",
    }

    def __init__(self, *, max_bytes: int = 65536, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_bytes = max_bytes

    def to_internal_value(self, data: Any) -> Any:
        if unstorable(data):
            self.fail("unstorable")
        try:
            text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError):
            self.fail("invalid")
        if len(text.encode()) > self.max_bytes:
            self.fail("too_large", max_bytes=self.max_bytes)
        return data


@extend_schema_field({"type": "object", "additionalProperties": {}})
class JSONObject(BoundedJSON):
    default_error_messages = {"not_an_object": "Expected an object."}

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            self.fail("not_an_object")
        value: dict[str, Any] = super().to_internal_value(data)
        return value
