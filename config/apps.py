from django.apps import AppConfig, apps
from django.db.models.signals import post_migrate

# The groups of the interface. What each may do is declared by the apps: AppConfig.grants = {group: [codename, …]}.
GROUPS = (
    "message-sender",
    "message-client",
    "campaign-manager",
    "device-agent",
    "lock-holder",
    "lock-admin",
    "reminder-client",
    "operator",
    "viewer",
)


class SignalboxConfig(AppConfig):
    name = "config"
    verbose_name = "Signalbox"
    grants = {
        "operator": [
            "config.view_sweeprun",
            "config.view_decision",
            "config.view_bulkaction",
            "config.see_all_tenants",
            "config.view_metrics",
            "config.view_integrity",
            "config.heal_integrity",
            "config.run_sweeps",
        ],
        "viewer": [
            "config.view_sweeprun",
            "config.view_decision",
            "config.view_bulkaction",
            "config.see_all_tenants",
            "config.view_metrics",
            "config.view_integrity",
        ],
    }

    def ready(self) -> None:
        from django_q.signals import post_execute

        from config import statemachine, sweeping  # noqa: F401  registers the system checks
        from config.supervisor import canary
        from config.triggers import ask_cheaply

        post_migrate.connect(sync_groups, dispatch_uid="config.sync_groups")
        post_migrate.connect(ask_cheaply, sender=self, dispatch_uid="config.ask_cheaply")
        post_execute.connect(canary.hear, dispatch_uid="config.canary")


def sync_groups(app_config: AppConfig, **_kwargs: object) -> None:
    """Permissions exist only after an app's post_migrate, so a migration cannot hand them out: the last app does."""
    if app_config is not list(apps.get_app_configs())[-1]:
        return
    from django.contrib.auth.models import Group, Permission

    groups = {name: Group.objects.get_or_create(name=name)[0] for name in GROUPS}
    known = {f"{p.content_type.app_label}.{p.codename}": p for p in Permission.objects.select_related("content_type")}
    wanted: dict[str, set[str]] = {name: set() for name in GROUPS}
    for config in apps.get_app_configs():
        for group, names in getattr(config, "grants", {}).items():
            wanted[group].update(names)
    for name, group in groups.items():
        group.permissions.set([known[permission] for permission in sorted(wanted[name])])
