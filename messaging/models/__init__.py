from messaging.models.applications import Application, QuotaUsage
from messaging.models.circuits import ProviderCircuit, ProviderFailure
from messaging.models.messages import (
    CONTENT_CLEARED,
    FailureType,
    HoldReason,
    Kind,
    Message,
    MessageAttempt,
    MessageEvent,
)
from messaging.models.rollups import MessageRollup, MessageRollupDelta, MessageSegment
from messaging.models.subscriptions import CHANNEL_OF, Channel, Subscription, SubscriptionEvent
from messaging.models.suppressions import Suppression
from messaging.models.templates import MessageTemplate, MessageTemplateVersion
from messaging.models.tracking import MessageHit, TrackedLink
from messaging.models.webhooks import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookInbox

__all__ = [
    "CHANNEL_OF",
    "CONTENT_CLEARED",
    "Application",
    "Channel",
    "FailureType",
    "HoldReason",
    "Kind",
    "Message",
    "MessageAttempt",
    "MessageEvent",
    "MessageHit",
    "MessageRollup",
    "MessageRollupDelta",
    "MessageSegment",
    "MessageTemplate",
    "MessageTemplateVersion",
    "ProviderCircuit",
    "ProviderFailure",
    "QuotaUsage",
    "Subscription",
    "SubscriptionEvent",
    "Suppression",
    "TrackedLink",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookInbox",
]
