from django.apps import AppConfig


class LocksConfig(AppConfig):
    name = "locks"
    grants: dict[str, list[str]] = {}
