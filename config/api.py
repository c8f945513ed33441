"""The house's own endpoints: the integrity report and the metrics; and the answers where no endpoint is."""

from collections.abc import Callable
from typing import Any

from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.middleware.common import CommonMiddleware
from django.urls import path
from django.utils.deprecation import MiddlewareMixin
from django.views import defaults
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import api_view
from rest_framework.exceptions import NotAuthenticated, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from config import integrity, observe
from config.rest.handler import refusal


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


class SlashesForReaders(CommonMiddleware):
    """A redirect to the address with its slash would turn a POST into a GET: of the API, only reads are redirected."""

    def should_redirect_with_slash(self, request: HttpRequest) -> bool:
        reads = request.method in ("GET", "HEAD") or not request.path_info.startswith("/api/")
        return reads and super().should_redirect_with_slash(request)

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """Under DEBUG Django asks no handler404 but shows a page, and clients of the API read JSON."""
        answer = super().process_response(request, response)
        page = answer.status_code == 404 and answer.headers.get("Content-Type", "").startswith("text/html")
        return not_found(request) if page and request.path_info.startswith("/api/") else answer


def outside_views(status: int, code: str, detail: str, page: Callable[..., HttpResponseBase]) -> Any:
    """What never reaches a view of the API is told in the API's form there, as a page elsewhere."""

    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not request.path_info.startswith("/api/"):
            return page(request, *args, **kwargs)
        kind = "server_error" if status >= 500 else "client_error"
        return JsonResponse({"type": kind, "errors": [{"code": code, "detail": detail, "attr": None}]}, status=status)

    return answer


bad_request = outside_views(400, "bad_request", "The request cannot be read.", defaults.bad_request)
not_found = outside_views(404, "not_found", "There is nothing at this address.", defaults.page_not_found)
server_error = outside_views(500, "error", "Something went wrong on our side.", defaults.server_error)


def away_page(_request: HttpRequest) -> HttpResponse:
    return HttpResponse("The database is away. Try again.", status=503, content_type="text/plain")


unavailable = outside_views(503, "unavailable", "The database is away. Try again.", away_page)


class PagesWithoutDatabase(MiddlewareMixin):
    """What config.rest does for the API, for everything else: a dependency that is away is a 503, no fault of ours."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponseBase | None:
        error = refusal(exception) if isinstance(exception, Error) else None
        if error is None or error.status != 503:
            return None
        answer: HttpResponseBase = unavailable(request)
        answer.headers["Retry-After"] = str(error.retry_after)
        return answer


urlpatterns = [path("integrity/", IntegrityView.as_view(), name="integrity")]
