"""What both halves of the API share: labels, status words, whose rows."""

from typing import Any

from django.db.models import Q, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema_field

from config.rest import SEE_ALL_TENANTS, JSONObject

ACT_AS_AGENT = "devices.act_as_agent"
# Words of older programs, understood in filters, never stored or said.
ALIASES = {"completed": "success", "done": "success", "canceled": "cancelled", "queued": "pending"}


@extend_schema_field({"type": "object", "additionalProperties": {"type": "string"}})
class Labels(JSONObject):
    default_error_messages = {"not_text": "Expected text as the value of {name}."}

    def to_internal_value(self, data: Any) -> dict[str, str]:
        labels = super().to_internal_value(data)
        for name, value in labels.items():
            if not isinstance(value, str):
                self.fail("not_text", name=name)
        return labels


class StatusFilter(filters.ChoiceFilter):
    """A status or one of its aliases; an unknown one is an error."""

    def __init__(self, states: Any, *derived: str, **kwargs: Any) -> None:
        words = [*states.values, *ALIASES, *derived]
        super().__init__(choices=[(word, word) for word in words], **kwargs)

    def filter(self, qs: QuerySet[Any], value: Any) -> QuerySet[Any]:
        if value == "retrying":
            return qs.retrying()  # type: ignore[attr-defined]
        return super().filter(qs, ALIASES.get(value, value))


class OwnRows:
    """Whoever sees all tenants reads everything; an agent reads what is on its own PCs, reached over `agent_path`."""

    agent_path = "agent"
    request: Any

    def get_queryset(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset()  # type: ignore[misc]
        if getattr(self, "swagger_fake_view", False):
            return rows.none()
        return rows if self.request.user.has_perm(SEE_ALL_TENANTS) else rows.filter(self.own())

    def own(self) -> Q:
        return Q(**{self.agent_path: self.request.user})
