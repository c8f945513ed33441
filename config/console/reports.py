"""The integrity report: what is wrong, what it means, and the button that mends it."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.db import models, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from config import integrity
from config.console import audit
from config.console.audit import record_human_action
from config.console.charts import sparkline
from config.console.panels import counts_text

SHOWN = 20
HEALS = 10
TONES = {"error": "danger", "warning": "warning", "info": "info"}
HEAL = "config.heal_integrity"


def integrity_view(request: HttpRequest) -> HttpResponse:
    _require(request, "config.view_integrity")
    now = timezone.now()
    courses = integrity.trends(now)
    found = [
        _finding(invariant, course=courses.get(invariant.name, [])) for invariant in integrity.invariants().values()
    ]
    context = {
        "title": _("Integrity"),
        "findings": sorted(
            found, key=lambda finding: (not finding["reading"].count, list(TONES.values()).index(finding["tone"]))
        ),
        # What is only worth knowing is not broken.
        "broken": sum(bool(finding["reading"].count and finding["tone"] != "info") for finding in found),
        "measured_at": now,
        "heals": _heals(),
        "may_heal": request.user.has_perm(HEAL),  # type: ignore[union-attr]
    }
    return _page(request, "admin/console/integrity.html", context)


def heal_view(request: HttpRequest, name: str) -> HttpResponse:
    """GET shows what will be touched; POST does it."""
    _require(request, HEAL)
    invariant = integrity.invariants().get(name)
    if invariant is None or invariant.healer is None:
        raise Http404
    if request.method == "POST":
        return _heal(request, invariant)
    return _page(request, "admin/console/heal.html", {"title": _("Heal"), "finding": _finding(invariant, SHOWN)})


def _heal(request: HttpRequest, invariant: Any) -> HttpResponse:
    model = invariant.violations(timezone.now()).model
    with transaction.atomic():
        done = integrity.heal(invariant.name)
        record_human_action(request.user, model, f"heal {invariant.name}", details=dict(done))
    integrity.keep_reading(invariant.name, timezone.now())
    cache.delete_many(["console.integrity", f"console.integrity.{invariant.name}"])
    text = _("%(name)s: %(counts)s") % {"name": invariant.name, "counts": counts_text(done)}
    messages.success(request, text)
    return redirect("admin:integrity")


def _heals() -> list[dict[str, Any]]:
    """The latest heals, newest first."""
    entries = LogEntry.objects.filter(change_message__startswith='{"action": "heal ').select_related("user")
    return [
        {"at": entry.action_time, "who": entry.user.get_username(), "what": what, "why": why}
        for entry in entries.order_by("-action_time")[:HEALS]
        for what, why in [audit.read(entry)]
    ]


def _finding(invariant: Any, shown: int = 0, course: list[int] | None = None) -> dict[str, Any]:
    reading, now = integrity.measure(invariant), timezone.now()
    rows = invariant.violations(now)
    keys = rows.order_by("pk").values_list("pk", flat=True)[:shown] if shown else reading.samples
    return {
        "invariant": invariant,
        "reading": reading,
        "tone": TONES[invariant.severity],
        "trend": sparkline(course or [], TONES[invariant.severity] if reading.count else "success", _("Last 24 hours")),
        "since": integrity.broken_since(invariant, now) if reading.count else None,
        "outlook": invariant.outlook(now) if reading.count and invariant.outlook else [],
        "table": rows.model._meta.verbose_name_plural,
        "samples": [{"key": key, "link": object_link(rows.model, key)} for key in keys],
        "more": max(0, reading.count - shown) if shown else 0,
    }


def object_link(model: type[models.Model], key: Any) -> str:
    try:
        return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[key])
    except NoReverseMatch:
        return ""


def _require(request: HttpRequest, permission: str) -> None:
    if not request.user.has_perm(permission):  # type: ignore[union-attr]
        raise PermissionDenied


def _page(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    request.current_app = admin.site.name  # type: ignore[attr-defined]
    return TemplateResponse(request, template, {**admin.site.each_context(request), **context})
