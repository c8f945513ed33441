"""The figures as pictures: SVG made here, no script, no foreign host."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from messaging.admin.base import ReadOnlyAdmin
from messaging.models import Application, Channel, Kind, MessageRollup
from messaging.services.analytics import message_figures

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 250, 74, 28, 12
RANGES = (7, 30, 90)
GROUPS = (("channel", _("Channel")), ("kind", _("Kind")), ("campaign", _("Campaign")), ("retry", _("Retries")))
MOST_ROWS = 50

Series = Sequence[tuple[Any, Sequence[float | None]]]


def line_chart(days: Sequence[str], series: Series, top: float, unit: str) -> SafeString:
    """One line per series; a day without a value is a gap."""
    parts = [_grid(top, unit), _days(days)]
    for index, (label, values) in enumerate(series):
        points = [
            (_x(place, len(days)), _y(value, top), value) for place, value in enumerate(values) if value is not None
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _value in points)
        parts.append(format_html('<polyline class="sb-s{}" style="fill:none" points="{}"/>', index, line))
        parts.append(
            format_html_join(
                "",
                '<circle class="sb-s{}" cx="{}" cy="{}" r="2.5"><title>{}: {}</title></circle>',
                ((index, f"{x:.1f}", f"{y:.1f}", label, shown(value, unit)) for x, y, value in points),
            )
        )
    return _svg(parts, ", ".join(str(label) for label, _values in series))


def funnel(steps: Sequence[tuple[Any, int]]) -> SafeString:
    """How many of the created came how far."""
    most, parts, row = max([n for _label, n in steps] + [1]), [], 44
    for index, (label, n) in enumerate(steps):
        width = max(2.0, (WIDTH - 320) * n / most) if n else 0
        share = f"{n / steps[0][1]:.1%}" if steps[0][1] else "–"
        parts.append(
            format_html(
                '<text x="0" y="{}">{}</text><rect class="sb-s{} sb-bar" x="170" y="{}" width="{}" height="26" rx="4"/>'
                '<text class="sb-value" x="{}" y="{}">{} <tspan>· {}</tspan></text>',
                *(index * row + 24, label, index, index * row + 6, f"{width:.1f}"),
                *(f"{178 + width:.1f}", index * row + 24, f"{n:,}", share),
            )
        )
    return _svg(parts, gettext("Funnel"), len(steps) * row)


def _svg(parts: Sequence[SafeString], label: str, height: int = HEIGHT) -> SafeString:
    inner = format_html_join("", "{}", ((part,) for part in parts))
    return format_html(
        '<svg class="sb-chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>', WIDTH, height, label, inner
    )


def _x(place: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - 10) * (place / (count - 1) if count > 1 else 0.5)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, top) / top)


def _grid(top: float, unit: str) -> SafeString:
    marks = [top * share for share in (0, 0.25, 0.5, 0.75, 1)]
    return format_html_join(
        "",
        '<line class="sb-grid-line" x1="{}" x2="{}" y1="{}" y2="{}"/><text x="{}" y="{}" text-anchor="end">{}</text>',
        (
            (LEFT, WIDTH, y, y, LEFT - 6, f"{float(y) + 4:.1f}", shown(mark, unit))
            for mark, y in ((mark, f"{_y(mark, top):.1f}") for mark in marks)
        ),
    )


def _days(days: Sequence[str]) -> SafeString:
    step = max(1, len(days) // 6)
    places = range(0, len(days), step)
    return format_html_join(
        "",
        '<text x="{}" y="{}" text-anchor="middle">{}</text>',
        ((f"{_x(place, len(days)):.1f}", HEIGHT - 6, days[place][5:]) for place in places),
    )


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.0%}"
    if value < 1:
        return f"{value * 1000:.0f} ms" if value else "0"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def nice(values: Sequence[float]) -> float:
    """A round upper end for the axis."""
    most = max([value for value in values if value is not None] + [0.001])
    step = 10.0 ** (len(f"{int(most)}") - 1) if most >= 1 else 0.1
    return next((step * factor for factor in (1, 2, 3, 4, 5, 6, 8, 10) if step * factor >= most), most)


@admin.register(MessageRollup)
class AnalyticsAdmin(ReadOnlyAdmin):
    """No list of cells: the page shows what they add up to."""

    icon, menu_order = "monitoring", 50
    menu_title = _("Analytics")

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen = Choice.of(request)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Analytics"),
            "opts": self.model._meta,
            "choice": chosen,
            "ranges": RANGES,
            "groups": GROUPS,
            "applications": Application.objects.order_by("slug"),
            **pictures(chosen),
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        return TemplateResponse(request, "admin/messaging/analytics.html", context)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        raise PermissionDenied


class Choice:
    """What the page was asked to show; anything odd is the default."""

    def __init__(self, days: int, group: str, application: str, now: datetime) -> None:
        self.days, self.group, self.application = days, group, application
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        self.end = midnight + timedelta(days=1)
        self.start = self.end - timedelta(days=days)

    @classmethod
    def of(cls, request: HttpRequest) -> "Choice":
        days, group = request.GET.get("days", ""), request.GET.get("group", "")
        return cls(
            int(days) if days in map(str, RANGES) else 30,
            group if group in dict(GROUPS) else "channel",
            request.GET.get("application", "").replace("\x00", ""),
            timezone.now(),
        )

    def applications(self) -> list[Any]:
        rows = Application.objects.all()
        return list((rows.filter(slug=self.application) if self.application else rows).values_list("pk", flat=True))

    def calendar(self) -> list[str]:
        first: date = self.start.date()
        return [f"{first + timedelta(days=n):%Y-%m-%d}" for n in range(self.days)]


def pictures(chosen: Choice) -> dict[str, Any]:
    keys = chosen.applications()
    daily = message_figures(keys, chosen.start, chosen.end, "day")
    grouped = message_figures(keys, chosen.start, chosen.end, chosen.group)
    days, by_day, totals = chosen.calendar(), {row["key"]: row for row in daily["results"]}, daily["totals"]
    rates = [
        (word, [by_day[day][name] if day in by_day else None for day in days])
        for name, word in (
            ("send_rate", gettext("Send rate")),
            ("reach_rate", gettext("Reach")),
            ("conversion_rate", gettext("Conversion")),
        )
    ]
    delays = [
        (word, [by_day[day]["latencies"][name][part] if day in by_day else None for day in days])
        for name, part, word in (
            ("send", "p50", gettext("Accepted, p50")),
            ("send", "p95", gettext("Accepted, p95")),
            ("receive", "p50", gettext("Delivered, p50")),
            ("receive", "p95", gettext("Delivered, p95")),
        )
    ]
    top = nice([value for _word, values in delays for value in values if value is not None])
    steps = [
        (gettext("Created"), totals["created"]),
        (gettext("Accepted by provider"), totals["sent"]),
        (gettext("Delivered"), totals["received"]),
        (gettext("Converted"), totals["converted"]),
    ]
    return {
        "tiles": tiles(totals),
        "funnel": funnel(steps),
        "rates": line_chart(days, rates, 1.0, "%"),
        "rates_legend": [word for word, _values in rates],
        "delays": line_chart(days, delays, top, "s"),
        "delays_legend": [word for word, _values in delays],
        "rows": [table_row(row, chosen.group) for row in grouped["results"][:MOST_ROWS]],
        "left_out": max(0, len(grouped["results"]) - MOST_ROWS),
        "retries": [
            (word, effect["retried"], effect["sent"], shown(effect["rate"], "%"))
            for word, effect in zip(
                (gettext("Network"), gettext("Outage"), gettext("Rate limit")),
                totals["retry_effectiveness"].values(),
                strict=True,
            )
        ],
    }


def tiles(totals: dict[str, Any]) -> list[tuple[Any, str]]:
    counts = [
        (gettext("Created"), "created"), (gettext("Pending"), "pending"), (gettext("Accepted by provider"), "sent"),
        (gettext("Delivered"), "received"), (gettext("Converted"), "converted"), (gettext("Errored"), "errored"),
        (gettext("Failed, never accepted"), "failed"), (gettext("Failed after acceptance"), "failed_after_send"),
        (gettext("Cancelled"), "cancelled"),
    ]  # fmt: skip
    return [(word, f"{totals[name]:,}") for word, name in counts]


def table_row(row: dict[str, Any], group: str) -> dict[str, Any]:
    words = {"channel": dict(Channel.choices), "kind": dict(Kind.choices)}.get(group, {})
    name = "–" if row["key"] is None else words.get(row["key"], row["key"])
    rates = ("send_rate", "reach_rate", "conversion_rate", "overall_conversion_rate")
    return {
        "name": name,
        "counts": [f"{row[key]:,}" for key in ("created", "sent", "received", "converted", "failed")],
        "rates": [shown(row[key], "%") for key in rates],
        "delays": [shown(row["latencies"][key][part], "s") for key in ("send", "receive") for part in ("p50", "p95")],
    }
