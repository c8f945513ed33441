"""Small pictures drawn on the server: they need no script and follow light and dark by currentcolor."""

from collections.abc import Sequence

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

WIDTH, HEIGHT = 120, 28
WIDE, TALL, LABEL, MARGIN = 960, 150, 22, 20


def sparkline(values: Sequence[float], tone: str = "", title: str = "") -> SafeString | str:
    """The course of a number; its last point is marked. Nothing for fewer than two points."""
    if len(values) < 2:
        return ""
    top, step = max(max(values), 1), (WIDTH - 6) / (len(values) - 1)
    points = [(3 + index * step, HEIGHT - 4 - (HEIGHT - 8) * value / top) for index, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return format_html(
        '<svg class="sb-spark sb-tone-{}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">'
        '<polyline points="{}" fill="none" stroke="currentcolor" stroke-width="1.5" stroke-linejoin="round"/>'
        '<circle cx="{}" cy="{}" r="2.2" fill="currentcolor"/></svg>',
        tone or "none",
        WIDTH,
        HEIGHT,
        WIDTH,
        HEIGHT,
        title,
        path,
        f"{points[-1][0]:.1f}",
        f"{points[-1][1]:.1f}",
    )


def columns(bars: Sequence[tuple[str, float, str]], top: float, title: str, every: int = 3) -> SafeString:
    """A column for each (label, value, what it says when one rests on it); every third is labelled."""
    step = (WIDE - 2 * MARGIN) / max(len(bars), 1)
    drawn = (
        (
            f"{MARGIN + place * step + step * 0.15:.1f}",
            f"{TALL - LABEL - _height(value, top):.1f}",
            f"{step * 0.7:.1f}",
            f"{_height(value, top):.1f}",
            said,
        )
        for place, (_label, value, said) in enumerate(bars)
    )
    named = (
        (f"{MARGIN + (place + 0.5) * step:.1f}", TALL - 5, label)
        for place, (label, _value, _said) in enumerate(bars)
        if place % every == 0
    )
    return format_html(
        '<svg class="sb-chart sb-columns" viewBox="0 0 {} {}" role="img" aria-label="{}">'
        '<line class="sb-grid-line" x1="0" x2="{}" y1="{}" y2="{}"/>{}{}</svg>',
        *(WIDE, TALL, title, WIDE, TALL - LABEL, TALL - LABEL),
        format_html_join(
            "", '<rect class="sb-s0 sb-bar" x="{}" y="{}" width="{}" height="{}" rx="2"><title>{}</title></rect>', drawn
        ),
        format_html_join("", '<text x="{}" y="{}" text-anchor="middle">{}</text>', named),
    )


def _height(value: float, top: float) -> float:
    return max(2.0, (TALL - LABEL - 8) * min(value, top) / top) if value and top else 0.0


def stacked(parts: Sequence[tuple[str, int, str]]) -> SafeString:
    """Parts of a whole side by side: (word, count, tone)."""
    whole = max(sum(count for _word, count, _tone in parts), 1)
    said = ", ".join(f"{word} {count:,}" for word, count, _tone in parts)
    inner = format_html_join(
        "",
        '<i class="sb-fill-{}" style="width:{}%"></i>',
        ((tone, round(100 * count / whole, 1)) for _word, count, tone in parts if count),
    )
    return format_html('<span class="sb-stackbar" role="img" aria-label="{}" title="{}">{}</span>', said, said, inner)
