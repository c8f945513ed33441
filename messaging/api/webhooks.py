from typing import Any

from django.conf import settings
from django.http import Http404
from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.parsers import BaseParser
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from config.errors import Forbidden, Invalid
from config.rest import IdempotentMixin, StrictModelSerializer, StrictSerializer, TenantQuerysetMixin, UUIDLookup
from messaging.api.messages import validated
from messaging.api.tenancy import chosen_application
from messaging.models import WebhookEndpoint, addresses
from messaging.providers.webhooks import PROVIDERS, BadPayload, BadSignature, parse, verify
from messaging.services import incoming, webhooks


class Untouched(BaseParser):
    """Signatures are made over the bytes: nothing may read them before."""

    media_type = "*/*"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        return bytes(stream.read())


class ProviderEventsView(APIView):
    """Where providers report what became of messages. Their signature is the only key."""

    authentication_classes: list[Any] = []
    permission_classes = [AllowAny]
    throttle_classes: list[Any] = []
    parser_classes = [Untouched]

    @extend_schema(
        request={"application/json": {}, "application/x-www-form-urlencoded": {}},
        responses={200: OpenApiResponse({"type": "object"}, description="Counts of what became of the events.")},
    )
    def post(self, request: Request, provider: str) -> Response:
        name = provider if provider in PROVIDERS else f"anymail-{provider}"
        if name not in PROVIDERS:
            raise Http404
        # As the provider was told to call us, whatever stands between.
        url = f"{settings.PUBLIC_URL}{request._request.get_full_path()}"
        body, now = request._request.body, timezone.now()
        try:
            verify(name, url, request.headers, body, now)
        except BadSignature:
            raise Forbidden("The signature does not match.", code="bad_signature") from None
        try:
            events = parse(name, request.headers, body)
        except BadPayload as error:
            raise Invalid(f"Not an event we know: {error}", code="parse_error") from None
        return Response(incoming.receive_events(name, events, now=now))


class EndpointSerializer(StrictModelSerializer):
    application: Any = serializers.SlugRelatedField("slug", read_only=True)

    class Meta:
        model = WebhookEndpoint
        fields = ["id", "application", "url", "active", "disabled_reason", "created_at"]
        read_only_fields = ["disabled_reason", "created_at"]


class EndpointCreateSerializer(StrictSerializer):
    application = serializers.CharField(required=False, max_length=64)
    url = serializers.CharField(max_length=2000, trim_whitespace=False)


class EndpointCreatedSerializer(EndpointSerializer):
    secret = serializers.CharField(read_only=True, help_text="Shown this once.")

    class Meta(EndpointSerializer.Meta):
        fields = [*EndpointSerializer.Meta.fields, "secret"]


class EndpointChangeSerializer(StrictSerializer):
    url = serializers.CharField(required=False, max_length=2000, trim_whitespace=False)
    active = serializers.BooleanField(required=False)


class WebhookEndpointViewSet(
    IdempotentMixin,
    TenantQuerysetMixin,
    UUIDLookup,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    mixins.DestroyModelMixin,
    GenericViewSet,
):
    queryset = WebhookEndpoint.objects.select_related("application")
    serializer_class = EndpointSerializer
    ordering_fields = ["created_at"]
    seal = addresses  # the answer to a POST has the secret in it

    @extend_schema(request=EndpointCreateSerializer, responses={201: EndpointCreatedSerializer})
    def create(self, request: Request) -> Response:
        wanted = validated(EndpointCreateSerializer, request.data)
        application = chosen_application(request.user, wanted.get("application"))
        endpoint, secret = webhooks.create_endpoint(application, wanted["url"])
        return Response({**EndpointSerializer(endpoint).data, "secret": secret}, status=status.HTTP_201_CREATED)

    @extend_schema(request=EndpointChangeSerializer, responses=EndpointSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:
        row, wanted = self.get_object(), validated(EndpointChangeSerializer, request.data)
        return Response(EndpointSerializer(webhooks.change_endpoint(row, **wanted)).data)

    def perform_destroy(self, instance: WebhookEndpoint) -> None:
        webhooks.delete_endpoint(instance)


urlpatterns = [path("webhooks/<str:provider>/", ProviderEventsView.as_view(), name="provider-events")]
