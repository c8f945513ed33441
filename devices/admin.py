from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from config.console import ConsoleAdmin, badge
from devices.models import PC


@admin.register(PC)
class PCAdmin(ConsoleAdmin):
    icon = "computer"
    state_colours = {"online": "success", "offline": ""}
    list_display = ["pc_number", "state", "agent", "max_slots", "last_heartbeat_at"]
    search_fields = ["pc_number"]
    list_filter = ["status"]
    readonly_fields = ["status", "agent_version", "system", "last_heartbeat_at"]
    state = badge("status", state_colours, description=_("status"))
