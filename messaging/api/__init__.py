from django.urls import include, path
from rest_framework.routers import SimpleRouter

from messaging.api import analytics, tracking, webhooks
from messaging.api.inbox import InboxViewSet
from messaging.api.messages import MessageViewSet
from messaging.api.subscriptions import SubscriptionViewSet
from messaging.api.suppressions import SuppressionViewSet
from messaging.api.templates import TemplateViewSet

router = SimpleRouter()
router.register("messages", MessageViewSet)
router.register("subscriptions", SubscriptionViewSet)
router.register("templates", TemplateViewSet)
router.register("suppressions", SuppressionViewSet)
router.register("inbox", InboxViewSet, basename="inbox")

router.register("webhook-endpoints", webhooks.WebhookEndpointViewSet)

urlpatterns = [
    path("api/v1/", include([*router.urls, *analytics.urlpatterns, *webhooks.urlpatterns])),
    *tracking.urlpatterns,
]
