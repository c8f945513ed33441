from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

MODELS = ("sender", "lead", "sequence", "sequencesender", "step", "enrollment", "execution", "reply")
READ = [f"campaigns.view_{model}" for model in MODELS]
WRITE = [*READ, *(f"campaigns.{verb}_{model}" for verb in ("add", "change", "delete") for model in MODELS)]


class CampaignsConfig(AppConfig):
    name = "campaigns"
    verbose_name = _("Campaigns")
    grants = {
        "campaign-manager": WRITE,
        "operator": [*WRITE, "campaigns.complete_sequence", "campaigns.reactivate_sequence"],
        "viewer": READ,
    }
