"""Small pictures drawn on the server: they need no script and follow light and dark by currentcolor."""

from collections.abc import Sequence

from django.utils.html import format_html
from django.utils.safestring import SafeString

WIDTH, HEIGHT = 120, 28


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
