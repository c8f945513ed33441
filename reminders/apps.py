from django.apps import AppConfig


class RemindersConfig(AppConfig):
    name = "reminders"
    grants: dict[str, list[str]] = {}
