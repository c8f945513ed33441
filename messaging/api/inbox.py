from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.viewsets import GenericViewSet

from config.rest import TenantQuerysetMixin
from messaging.api.messages import MessageSerializer
from messaging.models import Message


class InboxFilters(filters.FilterSet):
    subscription_id = filters.UUIDFilter(required=True)


@extend_schema_view(list=extend_schema(description="Delivered and unexpired in-app messages, newest first."))
class InboxViewSet(TenantQuerysetMixin, mixins.ListModelMixin, GenericViewSet):
    queryset = Message.objects.select_related("application")
    serializer_class = MessageSerializer
    filterset_class = InboxFilters
    ordering = "-created_at"
    required_permissions = {"list": "messaging.read_inbox"}

    def get_queryset(self) -> QuerySet[Any]:
        rows: Any = super().get_queryset()
        return rows.inbox(timezone.now())
