from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

READ = [f"reminders.view_{name}" for name in ("alarm", "page", "userinfo", "alarmdelivery", "deletedalarm")]
WRITE = ["reminders.add_alarm", "reminders.delete_alarm", "reminders.add_page"]


class RemindersConfig(AppConfig):
    name = "reminders"
    verbose_name = _("Reminders")
    grants: dict[str, list[str]] = {
        "reminder-client": ["reminders.view_alarm", *WRITE],
        "operator": [
            *READ,
            *WRITE,
            "reminders.view_schedule",
            "reminders.run_batch",
            "reminders.release_alarm",
            "reminders.change_userinfo",
        ],
        "viewer": [*READ, "reminders.view_schedule"],
    }
