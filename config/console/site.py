"""The sidebar and the pages that belong to no model."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import URLPattern, get_script_prefix, path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

DOMAINS = {
    "campaigns": _("Campaigns"),
    "messaging": _("Messaging"),
    "devices": _("Devices"),
    "locks": _("Locks"),
    "reminders": _("Reminders"),
}
OVERVIEW, ACCESS = ("config", "django_q"), ("auth", "knox", "axes")


def urls() -> list[URLPattern]:
    """Handed to unfold's site as `extra_urls`."""
    from config.console import bulk, panels, reports

    site = admin.site
    return [
        path("panels/", site.admin_view(panels.panels_view), name="panels"),
        path("bulk/<uuid:pk>/", site.admin_view(bulk.progress_view), name="bulk_progress"),
        path("integrity/", site.admin_view(reports.integrity_view), name="integrity"),
        path("integrity/<str:name>/heal/", site.admin_view(reports.heal_view), name="integrity_heal"),
    ]


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """By domain, from the registered models this person may see."""
    groups = [
        {"title": _("Overview"), "items": [*_overview(request), *_models(request, OVERVIEW), _api_docs()]},
        *({"title": title, "items": _models(request, (label,))} for label, title in DOMAINS.items()),
        {"title": _("Access"), "items": _models(request, ACCESS)},
    ]
    return [{**group, "separator": index > 0} for index, group in enumerate(g for g in groups if g["items"])]


def _overview(request: HttpRequest) -> list[dict[str, Any]]:
    items = [{"title": _("Dashboard"), "icon": "space_dashboard", "link": reverse("admin:index")}]
    if request.user.has_perm("config.view_integrity"):  # type: ignore[union-attr]
        items.append({"title": _("Integrity"), "icon": "verified", "link": reverse("admin:integrity")})
    return items


def _api_docs() -> dict[str, Any]:
    return {"title": _("API docs"), "icon": "api", "link": f"{get_script_prefix()}api/docs/"}


def _models(request: HttpRequest, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for model, model_admin in admin.site._registry.items():
        meta = model._meta
        if meta.app_label in labels and model_admin.has_view_or_change_permission(request):
            found.append(
                {
                    "title": capfirst(str(getattr(model_admin, "menu_title", meta.verbose_name_plural))),
                    "icon": getattr(model_admin, "icon", "table_rows"),
                    "link": reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist"),
                    "order": getattr(model_admin, "menu_order", 100),
                    "place": labels.index(meta.app_label),
                }
            )
    return sorted(found, key=lambda item: (item["place"], item["order"]))
