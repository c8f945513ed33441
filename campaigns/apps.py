from django.apps import AppConfig


class CampaignsConfig(AppConfig):
    name = "campaigns"
    grants: dict[str, list[str]] = {}
