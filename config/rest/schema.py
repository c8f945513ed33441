"""The OpenAPI description: every endpoint with its error answers and, where honoured, Idempotency-Key."""

from typing import Any

from django.db.models import TextChoices
from drf_spectacular.contrib.knox_auth_token import KnoxTokenScheme
from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from drf_standardized_errors.openapi import AutoSchema
from rest_framework import serializers


class ErrorSerializer(serializers.Serializer[Any]):
    code = serializers.CharField()
    detail = serializers.CharField()
    attr = serializers.CharField(allow_null=True)


class ErrorType(TextChoices):
    VALIDATION = "validation_error", "validation_error"
    CLIENT = "client_error", "client_error"
    SERVER = "server_error", "server_error"


class ErrorResponseSerializer(serializers.Serializer[Any]):
    type = serializers.ChoiceField(choices=ErrorType.choices)
    errors = ErrorSerializer(many=True)  # type: ignore[assignment]


IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    OpenApiParameter.HEADER,
    description="The same key with the same body within 24 hours gets the first answer again; another body gets 409.",
)


class TokenScheme(KnoxTokenScheme):
    target_class = "config.rest.tokens.TokenAuthentication"


class LocalTime(OpenApiSerializerFieldExtension):
    """`format: time` would demand an offset, and a time of day in somebody's zone has none."""

    target_class = "rest_framework.serializers.TimeField"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?$"}


# Only a request with a body can be too large or of a wrong kind.
OF_BODIES = {"413", "415"}


class Schema(AutoSchema):
    def get_override_parameters(self) -> list[Any]:
        handler = getattr(self.view, getattr(self.view, "action", None) or self.method.lower(), None)
        own = list(super().get_override_parameters())
        return [*own, IDEMPOTENCY_KEY] if getattr(handler, "idempotent", False) else own

    def _should_add_error_response(self, responses: dict[str, Any], status_code: str) -> bool:
        if status_code == "401":
            return status_code not in responses and self._should_add_http401_error_response()
        if status_code in OF_BODIES and self.method not in ("POST", "PUT", "PATCH"):
            return False
        return status_code not in responses

    def _get_error_response_serializer(self, status_code: str) -> Any:
        # One form for all: the package lists the codes it knows per field, and ours (unknown_field, …) are not there.
        return ErrorResponseSerializer


def transition_responses(serializer: Any) -> dict[int, Any]:
    """For @extend_schema on POST …/{id}/<transition>/: the row, or why it cannot go there."""
    conflict = OpenApiResponse(ErrorResponseSerializer, description="The row is not in a state that allows this.")
    return {200: serializer, 409: conflict}
