"""The dashboard: cards that apps contribute, refreshed by polling one fragment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from croniter import croniter
from django.conf import settings
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.timesince import timesince
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

REFRESH_SECONDS = 10
INTEGRITY_KEPT = 60
CANARY_FRESH = timedelta(seconds=90)


MOST = 10_000


def few(rows: Any) -> str:
    """A count that never reads more than it shows."""
    found = rows.order_by()[: MOST + 1].count()
    return f"{found:,}" if found <= MOST else f"{MOST:,}+"


@dataclass(frozen=True)
class Figure:
    """A number; `link` leads to the rows it counts."""

    label: Any
    value: Any
    link: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Row:
    title: Any
    note: Any = ""
    link: str = ""
    badge: Any = ""
    tone: str = ""
    aside: Any = ""
    figures: tuple[Figure, ...] = ()  # what the note would say in numbers, each with its rows


@dataclass
class Panel:
    figures: list[Figure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    tone: str = ""
    link: str = ""
    empty: Any = ""
    wide: bool = False
    dense: bool = False  # many short rows, side by side
    title: Any = ""
    icon: str = ""


@dataclass(frozen=True)
class _Contribution:
    title: Any
    order: int
    icon: str
    permission: str
    make: Callable[[HttpRequest], Panel | None]


_contributions: dict[str, _Contribution] = {}


def panel(title: Any, order: int = 100, icon: str = "monitoring", permission: str = "") -> Callable[[Any], Any]:
    """Decorates `fn(request) -> Panel | None`. Keep it cheap: it runs every ten seconds for each open dashboard."""

    def keep(make: Callable[[HttpRequest], Panel | None]) -> Callable[[HttpRequest], Panel | None]:
        name = f"{make.__module__}.{make.__qualname__}"
        _contributions[name] = _Contribution(title, order, icon, permission, make)
        return make

    return keep


def panels(request: HttpRequest) -> list[Panel]:
    found = []
    for said in sorted(_contributions.values(), key=lambda said: said.order):
        if said.permission and not request.user.has_perm(said.permission):  # type: ignore[union-attr]
            continue
        made = said.make(request)
        if made is not None:
            made.title, made.icon = made.title or said.title, made.icon or said.icon
            found.append(made)
    return found


def dashboard(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    return {**context, "title": _("Dashboard"), **_frame(request)}


def panels_view(request: HttpRequest) -> HttpResponse:
    return render(request, "admin/console/panels.html", _frame(request))


def _frame(request: HttpRequest) -> dict[str, Any]:
    return {"panels": panels(request), "refreshed_at": timezone.now(), "refresh_seconds": REFRESH_SECONDS}


@panel(gettext_lazy("Integrity"), order=10, icon="verified", permission="config.view_integrity")
def integrity_panel(request: HttpRequest) -> Panel:
    link = reverse("admin:integrity")
    readings = [reading for reading in known_readings() if reading.count]
    if not readings:
        return Panel(tone="success", link=link, empty=_("Every invariant holds."))
    tones = {"error": "danger", "warning": "warning", "info": "info"}
    rows = [
        Row(title=reading.name, badge=reading.count, tone=tones[reading.severity], link=f"{link}#{reading.name}")
        for reading in readings
    ]
    worst = next((tones[level] for level in tones if any(r.severity == level for r in readings)), "info")
    return Panel(rows=rows, tone=worst, link=link)


def known_readings() -> list[Any]:
    """What the sweep measured last: over a million messages that takes seconds, and a dashboard has none to spare.

    What it found broken may be mended by now, so that is measured again, at most once a minute; all of it is only where
    no sweep runs. The integrity page always measures anew.
    """
    from config.integrity import latest, report

    last = latest(timezone.now())
    if last is None:
        return cache.get_or_set("console.integrity", report, INTEGRITY_KEPT) or []
    return [_again(reading) if reading.count else reading for reading in last]


def _again(reading: Any) -> Any:
    from config.integrity import invariants, measure

    name = reading.name
    return cache.get_or_set(f"console.integrity.{name}", lambda: measure(invariants()[name]), INTEGRITY_KEPT)


@panel(gettext_lazy("Worker"), order=20, icon="favorite", permission="config.view_sweeprun")
def worker_panel(request: HttpRequest) -> Panel:
    from config.models import Canary

    now, rows = timezone.now(), []
    for canary in Canary.objects.order_by("host")[:20]:
        answered = canary.answered_at
        fresh = answered is not None and now - answered <= CANARY_FRESH
        note = _("answered %(age)s ago") % {"age": age(answered, now)} if answered else _("never answered")
        word = _("alive") if fresh else _("silent")
        rows.append(Row(title=canary.host, note=note, badge=word, tone="success" if fresh else "danger"))
    tone = "danger" if not rows or any(row.tone == "danger" for row in rows) else "success"
    return Panel(rows=rows, tone=tone, empty=_("No worker has reported yet."))


@panel(gettext_lazy("Sweeps"), order=80, icon="cleaning_services", permission="config.view_sweeprun")
def sweeps_panel(request: HttpRequest) -> Panel:
    link, now = reverse("admin:config_sweeprun_changelist"), timezone.now()
    last = {run.name: run for run in last_runs()}
    found = [_sweep_row(name, plan["cron"], last.get(name), now, link) for name, plan in settings.SWEEPS.items()]
    rows = sorted(found, key=lambda row: (row.tone == "success", row.title))
    late = sum(row.tone in ("warning", "danger") for row in rows)
    figures = [Figure(_("sweeps"), len(rows))]
    if late:
        figures.append(Figure(_("need a look"), late, tone="warning"))
    return Panel(figures=figures, rows=rows, tone="warning" if late else "success", link=link, wide=True, dense=True)


def last_runs() -> Any:
    """The newest run of each sweep. Raw, because the ORM's DISTINCT ON would walk a week of runs."""
    from config.models import SweepRun

    return SweepRun.objects.raw(
        "SELECT run.* FROM unnest(%s::text[]) AS sweep(name) CROSS JOIN LATERAL ("
        "SELECT * FROM sweep_runs WHERE name = sweep.name ORDER BY started_at DESC LIMIT 1) AS run",
        [list(settings.SWEEPS)],
    )


def _sweep_row(name: str, cron: str, run: Any, now: datetime, link: str) -> Row:
    link = f"{link}?sweep={name}"
    due = croniter(cron, timezone.localtime(now)).get_next(datetime)
    aside = _("next in %(time)s") % {"time": age(now, due)}
    if run is None:
        return Row(title=name, note=_("never ran"), link=link, badge=_("late"), tone="warning", aside=aside)
    note = _("%(age)s ago") % {"age": age(run.started_at, now)} + " · " + counts_text(run.counts)
    word, tone = outcome(run)
    if is_late(cron, run.started_at, now):
        word, tone = _("late"), "warning"
    return Row(title=name, note=note, link=link, badge=word, tone=tone, aside=aside)


def is_late(cron: str, started_at: datetime, now: datetime) -> bool:
    """Two ticks have passed without a run: one may be skipped while the previous run still works."""
    ticks = croniter(cron, timezone.localtime(started_at))
    ticks.get_next(datetime)
    return now > ticks.get_next(datetime) + settings.SWEEP_BUDGET


def outcome(run: Any) -> tuple[str, str]:
    if run.error:
        return _("error"), "danger"
    if run.ended_at is None:
        return _("running"), "info"
    return _("done"), "success"


def counts_text(counts: dict[str, int]) -> str:
    """What was counted, in the reader's language where the catalogue knows the word."""
    words = (f"{word} {count:,}" for word, count in counted(counts))
    return ", ".join(words) or _("nothing to do")


def counted(counts: dict[str, int]) -> list[tuple[str, int]]:
    return [(pgettext("count", name), count) for name, count in sorted(counts.items())]


def age(then: datetime, now: datetime) -> str:
    seconds = max(0, int((now - then).total_seconds()))
    if seconds < 60:
        return ngettext("%(n)d second", "%(n)d seconds", seconds) % {"n": seconds}
    return timesince(then, now, depth=1)


@panel(gettext_lazy("Recent automatic decisions"), order=90, icon="smart_toy", permission="config.view_decision")
def decisions_panel(request: HttpRequest) -> Panel:
    from config.console.base import told
    from config.models import Decision

    now = timezone.now()
    rows = [
        Row(
            title=f"{name} · {decision.rule}",
            note=story,
            link=reverse("admin:config_decision_change", args=[decision.pk]),
            badge="" if decision.won else _("too late"),
            aside=_("%(age)s ago") % {"age": age(decision.created_at, now)},
        )
        for decision, name, story in told(Decision.objects.order_by("-id")[:8])
    ]
    link = reverse("admin:config_decision_changelist")
    return Panel(rows=rows, link=link, wide=True, empty=_("Nothing has been decided automatically yet."))
