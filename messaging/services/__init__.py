from messaging.services.applications import join_application
from messaging.services.composing import MessageRequest, Sender, create_messages
from messaging.services.creating import Draft, Outcome, as_inserted, enqueue_messages
from messaging.services.ending import cancel_messages
from messaging.services.operating import cancel_message, raise_refusal, retry_message
from messaging.services.receipts import record_conversion, record_receipt
from messaging.services.recording import fail_accepted
from messaging.services.resolving import resolve_message
from messaging.services.subscriptions import (
    SubscriptionSpec,
    change_subscription,
    disable_subscription,
    enable_subscription,
    register_subscriptions,
    unsubscribe,
    upsert_subscriptions,
)
from messaging.services.suppressions import add_suppression, lift_suppression, suppress
from messaging.services.templates import (
    Hold,
    MissingVariables,
    Rendered,
    change_template,
    create_template,
    delete_template,
    pass_gate,
    render,
    render_texts,
)

__all__ = [
    "Draft",
    "Hold",
    "MessageRequest",
    "MissingVariables",
    "Outcome",
    "Rendered",
    "Sender",
    "SubscriptionSpec",
    "add_suppression",
    "as_inserted",
    "cancel_message",
    "cancel_messages",
    "change_subscription",
    "change_template",
    "create_messages",
    "create_template",
    "delete_template",
    "disable_subscription",
    "enable_subscription",
    "enqueue_messages",
    "fail_accepted",
    "join_application",
    "lift_suppression",
    "pass_gate",
    "raise_refusal",
    "record_conversion",
    "record_receipt",
    "register_subscriptions",
    "render",
    "render_texts",
    "resolve_message",
    "retry_message",
    "suppress",
    "unsubscribe",
    "upsert_subscriptions",
]
