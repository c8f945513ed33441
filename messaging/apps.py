from django.apps import AppConfig


class MessagingConfig(AppConfig):
    name = "messaging"
    grants: dict[str, list[str]] = {}
