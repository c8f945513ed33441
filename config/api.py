"""The house's own endpoints: the integrity report and the metrics."""

from django.http import HttpResponse
from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import api_view
from rest_framework.exceptions import NotAuthenticated, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from config import integrity, observe


class ReadingSerializer(serializers.Serializer[integrity.Reading]):
    name = serializers.CharField()
    severity = serializers.ChoiceField(choices=["error", "warning", "info"])
    count = serializers.IntegerField()
    samples = serializers.ListField(child=serializers.CharField())
    healer = serializers.CharField(allow_null=True)


class IntegrityView(APIView):
    required_permissions = {"get": "config.view_integrity"}

    @extend_schema(responses=ReadingSerializer(many=True))
    def get(self, _request: Request) -> Response:
        return Response([reading.as_json() for reading in integrity.report()])


@extend_schema(exclude=True)
@api_view(["GET"])
def metrics(request: Request) -> HttpResponse:
    if not request.user.is_authenticated:
        raise NotAuthenticated
    if not request.user.has_perm("config.view_metrics"):
        raise PermissionDenied
    return observe.metrics(request._request)


urlpatterns = [path("integrity/", IntegrityView.as_view(), name="integrity")]
