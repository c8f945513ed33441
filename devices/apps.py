from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

READ = ["devices.view_pc", "devices.view_device", "devices.view_taskdevice"]


class DevicesConfig(AppConfig):
    name = "devices"
    verbose_name = _("Devices")
    grants: dict[str, list[str]] = {
        "device-agent": [*READ, "devices.act_as_agent"],
        "viewer": [*READ, "devices.view_task"],
        "operator": [
            *READ,
            "devices.view_task",
            "devices.add_pc",
            "devices.change_pc",
            "devices.change_device",
            "devices.add_task",
            "devices.change_task",
        ],
    }
