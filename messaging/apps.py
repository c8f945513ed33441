from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

READ = [
    "messaging.view_application",
    "messaging.view_message",
    "messaging.view_messageevent",
    "messaging.view_messageattempt",
    "messaging.view_subscription",
    "messaging.list_subscription",
    "messaging.view_subscriptionevent",
    "messaging.view_messagetemplate",
    "messaging.view_messagetemplateversion",
    "messaging.view_suppression",
    "messaging.view_providercircuit",
    "messaging.view_quotausage",
    "messaging.view_messagerollup",
    "messaging.view_messagehit",
    "messaging.view_trackedlink",
    "messaging.view_webhookinbox",
    "messaging.view_webhookendpoint",
    "messaging.view_webhookdelivery",
    "messaging.view_webhookattempt",
    "messaging.read_inbox",
]
REGISTER = ["messaging.add_subscription", "messaging.change_subscription", "messaging.view_subscription"]
SEND = [
    *READ,
    *REGISTER,
    "messaging.add_message",
    "messaging.cancel_message",
    "messaging.add_messagetemplate",
    "messaging.change_messagetemplate",
    "messaging.delete_messagetemplate",
    "messaging.add_suppression",
    "messaging.add_webhookendpoint",
    "messaging.change_webhookendpoint",
    "messaging.delete_webhookendpoint",
]
CLIENT = [*REGISTER, "messaging.read_inbox", "messaging.report_receipt"]


class MessagingConfig(AppConfig):
    name = "messaging"
    verbose_name = _("Messaging")
    grants: dict[str, list[str]] = {
        "message-sender": SEND,
        "message-client": CLIENT,
        "viewer": READ,
        "operator": [
            *SEND,
            *CLIENT,
            "messaging.change_application",
            "messaging.retry_message",
            "messaging.resolve_message",
            "messaging.lift_suppression",
            "messaging.resend_webhookdelivery",
        ],
    }
