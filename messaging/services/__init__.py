from messaging.services.applications import join_application
from messaging.services.creating import Draft, Outcome, enqueue_messages
from messaging.services.ending import cancel_messages
from messaging.services.subscriptions import SubscriptionSpec, register_subscriptions, upsert_subscriptions
from messaging.services.suppressions import add_suppression, lift_suppression, suppress

__all__ = [
    "Draft",
    "Outcome",
    "SubscriptionSpec",
    "add_suppression",
    "cancel_messages",
    "enqueue_messages",
    "join_application",
    "lift_suppression",
    "register_subscriptions",
    "suppress",
    "upsert_subscriptions",
]
