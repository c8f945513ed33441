from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

READ = ["locks.view_branch", "locks.view_branchlock", "locks.view_lockevent", "locks.view_lockwaiter"]


class LocksConfig(AppConfig):
    name = "locks"
    verbose_name = _("Locks")
    grants: dict[str, list[str]] = {
        "lock-holder": [*READ, "locks.hold_locks"],
        "lock-admin": [*READ, "locks.hold_locks", "locks.administer_locks"],
        "operator": READ,
        "viewer": READ,
    }
