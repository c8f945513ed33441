import re
from datetime import UTC, datetime, timedelta
from typing import Any

from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from config.rest import StrictSerializer
from messaging.api.messages import UNQUOTED_ZONE
from messaging.api.tenancy import applications_of
from messaging.services import analytics

DATE = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
DEFAULT_DAYS = 30


class Moment(serializers.DateTimeField):
    """A time, or a date as its first moment; UTC where no zone is given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(default_timezone=UTC, **kwargs)

    def to_internal_value(self, value: Any) -> datetime:
        text = UNQUOTED_ZONE.sub(r"+\1", str(value).strip())
        return super().to_internal_value(f"{text}T00:00:00Z" if DATE.match(text) else text)  # type: ignore[arg-type]


class FiguresQuery(StrictSerializer):
    to = Moment(required=False)
    group_by = serializers.ChoiceField(analytics.GROUPS, default="day")
    tag = serializers.CharField(required=False, max_length=255, help_text="Only with group_by=tag: the tag's name.")

    def get_fields(self) -> dict[str, Any]:
        return {"from": Moment(required=False), **super().get_fields()}

    def validate(self, query: dict[str, Any]) -> dict[str, Any]:
        midnight = timezone.now().astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        query.setdefault("to", max(midnight + timedelta(days=1), query.get("from", midnight)))
        query.setdefault("from", max(query["to"], analytics.FIRST + timedelta(DEFAULT_DAYS)) - timedelta(DEFAULT_DAYS))
        if query["from"] > query["to"]:
            raise serializers.ValidationError({"from": ["The range ends before it begins."]})
        if (query["group_by"] == "tag") != ("tag" in query):
            text = "Expected the tag's name." if "tag" not in query else "Only with group_by=tag."
            raise serializers.ValidationError({"tag": [text]})
        return query


class LatencySerializer(serializers.Serializer[Any]):
    count = serializers.IntegerField()
    p50 = serializers.FloatField(allow_null=True)
    p95 = serializers.FloatField(allow_null=True)
    mean = serializers.FloatField(allow_null=True)


class LatenciesSerializer(serializers.Serializer[Any]):
    send = LatencySerializer()
    receive = LatencySerializer()
    convert = LatencySerializer()
    total = LatencySerializer()


class RetryEffectSerializer(serializers.Serializer[Any]):
    retried = serializers.IntegerField()
    sent = serializers.IntegerField()
    rate = serializers.FloatField(allow_null=True)


class RetryEffectivenessSerializer(serializers.Serializer[Any]):
    network = RetryEffectSerializer()
    outage = RetryEffectSerializer()
    rate_limited = RetryEffectSerializer()


class FiguresRowSerializer(serializers.Serializer[Any]):
    created = serializers.IntegerField()
    sent = serializers.IntegerField()
    received = serializers.IntegerField()
    converted = serializers.IntegerField()
    failed = serializers.IntegerField()
    errored = serializers.IntegerField()
    pending = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    failed_after_send = serializers.IntegerField()
    send_rate = serializers.FloatField(allow_null=True)
    reach_rate = serializers.FloatField(allow_null=True)
    conversion_rate = serializers.FloatField(allow_null=True)
    overall_conversion_rate = serializers.FloatField(allow_null=True)
    latencies = LatenciesSerializer()
    retry_effectiveness = RetryEffectivenessSerializer()


class FiguresResultSerializer(FiguresRowSerializer):
    key = serializers.CharField(allow_null=True)


class FiguresSerializer(serializers.Serializer[Any]):
    to = serializers.DateTimeField()
    group_by = serializers.ChoiceField(analytics.GROUPS)
    totals = FiguresRowSerializer()
    results = FiguresResultSerializer(many=True)

    def get_fields(self) -> dict[str, Any]:
        return {"from": serializers.DateTimeField(), **super().get_fields()}


class MessageFiguresView(APIView):
    """Counts, rates and latencies of the messages created in a range of time."""

    required_permissions = {"get": "messaging.view_messagerollup"}

    @extend_schema(parameters=[FiguresQuery], responses=FiguresSerializer)
    def get(self, request: Request) -> Response:
        serializer = FiguresQuery(data=request.query_params.dict())
        serializer.is_valid(raise_exception=True)
        query = serializer.validated_data
        keys = list(applications_of(request.user).values_list("pk", flat=True))
        found = analytics.message_figures(keys, query["from"], query["to"], query["group_by"], query.get("tag", ""))
        head = {name: query[name] for name in ("from", "to", "group_by")}
        return Response({**head, **found})


urlpatterns = [path("analytics/messages/", MessageFiguresView.as_view(), name="message-figures")]
