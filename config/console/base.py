"""ConsoleAdmin: what all our admin pages share."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from django.contrib import admin
from django.contrib.admin import ShowFacets
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import connections, models
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.defaultfilters import date as date_filter
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from unfold.admin import ModelAdmin

from config.console import audit
from config.console.liveness import owner, state_fields

EXACT_UP_TO = 10_000
TIMELINE = 50


@dataclass(frozen=True)
class Entry:
    """A line of an object's timeline. `kind` is a Material icon's name."""

    at: datetime
    kind: str
    title: Any
    body: Any = ""
    tone: str = ""
    link: str = ""


class Estimate(int):
    """A count that tells it is a guess."""

    def __str__(self) -> str:
        return f"≈ {int(self):,}"


class EstimatingPaginator(Paginator):
    """Counts exactly up to 10,000 rows; beyond, the table's statistics or the planner's guess will do."""

    @cached_property
    def count(self) -> int:
        rows = self.object_list
        if not isinstance(rows, models.QuerySet):
            return len(rows)
        if not rows.query.where and (guess := _table_size(rows)) > EXACT_UP_TO:
            return Estimate(guess)
        exact = rows.order_by()[: EXACT_UP_TO + 1].count()
        if exact <= EXACT_UP_TO:
            return exact
        return Estimate(max(_planned(rows), EXACT_UP_TO + 1))


def _table_size(rows: models.QuerySet[Any]) -> int:
    with connections[rows.db].cursor() as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE oid = to_regclass(%s)", [rows.model._meta.db_table])
        found = cursor.fetchone()
    return int(found[0]) if found else 0


def _planned(rows: models.QuerySet[Any]) -> int:
    import json

    plan = rows.order_by().explain(format="json")
    return int(json.loads(plan)[0]["Plan"]["Plan Rows"])


class ConsoleAdmin(ModelAdmin):
    """Lists that stay quick on big tables, pages that tell an object's story. `read_only` closes all forms."""

    icon = "table_rows"
    read_only = False
    state_colours: dict[str, str] = {}
    rule_words: dict[str, Any] = {}  # what a decision's rule means, by its name or the part before the first dot
    empty_value_display = "–"
    paginator = EstimatingPaginator
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_per_page = 50
    list_filter_submit = True
    list_filter_sheet = True
    list_fullwidth = True
    warn_unsaved_form = True
    change_form_outer_before_template: str | None = "admin/console/above.html"
    change_form_outer_after_template: str | None = "admin/console/timeline.html"

    def has_add_permission(self, request: HttpRequest) -> bool:
        return not self.read_only and super().has_add_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return not self.read_only and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return not self.read_only and super().has_delete_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """A state changes by a service, never by a form."""
        return [*super().get_readonly_fields(request, obj), *state_fields(self.model)]

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        return {
            name: action
            for name, action in super().get_actions(request).items()
            if request.user.has_perms(getattr(action[0], "needs", ()))  # type: ignore[union-attr]
        }

    def acts_for(self, obj: Any) -> Iterable[str]:
        """Names of the actions that make sense for this row as it is: they are buttons on its page."""
        return [action.__name__ for action in self.actions or () if getattr(action, "when", _never)(obj)]  # type: ignore[union-attr]

    def links_for(self, request: HttpRequest, obj: Any) -> list[dict[str, Any]]:
        """Further buttons: {"title", "url"}."""
        return []

    def timeline_entries(self, obj: Any) -> Iterable[Entry]:
        """An app's own events of the object."""
        return ()

    def timeline(self, obj: Any) -> list[Entry]:
        """Decisions, people's acts and the app's events in one column, newest first."""
        entries = [*_decisions(obj, self.rule_words), *_acts(obj), *self.timeline_entries(obj)]
        return sorted(entries, key=lambda entry: entry.at, reverse=True)[: 3 * TIMELINE]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        obj = kwargs.get("obj")
        if obj is not None and obj.pk is not None and not kwargs.get("add"):
            owners = [owner(obj, name) for name in state_fields(self.model)]
            allowed = self.get_actions(request)
            acts = [{"name": name, "title": allowed[name][2]} for name in self.acts_for(obj) if name in allowed]
            context.update(timeline=self.timeline(obj), owners=owners, timeline_limit=TIMELINE)
            context.update(acts=acts, acts_url=list_url(self.model), links=self.links_for(request, obj))
        return super().render_change_form(request, context, *args, **kwargs)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The timeline holds the history already."""
        meta = self.model._meta
        url = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[object_id])
        return HttpResponseRedirect(f"{url}#timeline")


def _never(obj: Any) -> bool:
    return False


def moment(field: str, description: Any) -> Any:
    """A column for a time, short and in one line."""

    def show(self: Any, obj: Any) -> str:
        at = getattr(obj, field)
        shown = date_filter(localtime(at), "Y-m-d H:i:s") if at else "–"
        return format_html('<span class="whitespace-nowrap">{}</span>', shown)

    show.short_description = description  # type: ignore[attr-defined]
    return show


def list_url(model: type[models.Model]) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


def _decisions(obj: models.Model, words: dict[str, Any]) -> Iterable[Entry]:
    from config.models import Decision

    found = Decision.objects.filter(object_type=obj._meta.db_table, object_id=str(obj.pk)).order_by("-id")[:TIMELINE]
    for decision in found:
        yield Entry(
            at=decision.created_at,
            kind="smart_toy",
            title=decision.rule,
            body=story(decision, words),
            tone="info" if decision.won else "",
            link=reverse("admin:config_decision_change", args=[decision.pk]),
        )


def story(decision: Any, words: dict[str, Any]) -> str:
    """What the rule means, how many rows it touched, and what became of them."""
    meaning = words.get(decision.rule) or words.get(decision.rule.split(".")[0], "")
    return " · ".join(str(part) for part in (meaning, _rows(decision), change_text(decision)) if part)


def told(decisions: Iterable[Any]) -> list[tuple[Any, str, str]]:
    """Each decision with its object's name and its story: a query per table, however many they are."""
    found, pages = list(decisions), {model._meta.db_table: page for model, page in admin.site._registry.items()}
    names: dict[tuple[str, str], str] = {}
    for table in {decision.object_type for decision in found} & pages.keys():
        keys = _keys(pages[table].model, [one.object_id for one in found if one.object_type == table])
        rows = pages[table].model._default_manager.filter(pk__in=list(keys))
        if isinstance(related := pages[table].list_select_related, tuple | list):
            rows = rows.select_related(*related)
        names |= {(table, str(row.pk)): str(row) for row in rows}
    return [
        (
            one,
            names.get((one.object_type, one.object_id), f"{one.object_type} {one.object_id}"),
            story(one, getattr(pages.get(one.object_type), "rule_words", {})),
        )
        for one in found
    ]


def _keys(model: type[models.Model], texts: Iterable[str]) -> Iterable[Any]:
    for text in texts:
        with suppress(ValidationError):  # a decision written by hand may name anything
            yield model._meta.pk.to_python(text)


def _rows(decision: Any) -> str:
    """A decision about many rows says how many."""
    return _("%(count)s rows") % {"count": f"{decision.affected:,}"} if decision.affected > 1 else ""


def change_text(decision: Any) -> str:
    """'status: sending → error', or that it came too late."""
    before, after, words = decision.before, decision.after, _words()
    moves = [
        f"{words.get((key, ''), key)}: {_said(words, key, before.get(key))} → {_said(words, key, after.get(key))}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    ]
    return " · ".join(moves if decision.won else [*moves, _("did not take effect: something else was quicker")])


def _said(words: dict[tuple[str, str], Any], key: str, value: Any) -> str:
    """A stored value as people read it: states in their language, times in their zone."""
    if value in (None, ""):
        return "–"
    if isinstance(value, str) and (at := _moment(value)):
        return date_filter(at, "Y-m-d H:i:s")
    return str(words.get((key, str(value)), value))


def _moment(text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if "T" in text else None
        return localtime(at) if at and at.tzinfo else None
    except (ValueError, OverflowError):  # of the year 9999, another zone's clock may have no date
        return None


@cache
def _words() -> dict[tuple[str, str], Any]:
    """What the forms call a field, by (its name, ""), and a choice of it, by (its name, the choice's value).

    A decision on a sequence may tell of its enrollments or executions, so all models are looked through.
    """
    words: dict[tuple[str, str], Any] = {}
    for field in (field for model in admin.site._registry for field in model._meta.concrete_fields):
        words.setdefault((field.name, ""), field.verbose_name)
        for value, label in field.flatchoices:
            words.setdefault((field.name, str(value)), label)
    return words


def _acts(obj: models.Model) -> Iterable[Entry]:
    content_type = ContentType.objects.get_for_model(obj)
    entries = LogEntry.objects.filter(content_type=content_type, object_id=str(obj.pk)).select_related("user")
    for entry in entries.order_by("-action_time")[:TIMELINE]:
        what, why = audit.read(entry)
        yield Entry(entry.action_time, "person", f"{entry.user.get_username()}: {what}", why, "primary")
