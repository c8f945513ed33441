"""Small bars for lists and pages."""

from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString

from devices.models import Task


def bar(value: int, top: int, tone: str = "open", title: Any = "") -> SafeString:
    share = round(100 * min(value, top) / max(top, 1), 1)
    return format_html(
        '<span class="dv-bar" title="{}"><span class="dv-progress" role="img" aria-label="{value} / {top}">'
        '<i class="dv-{tone}" style="width:{share}%"></i></span><b>{value}</b> / {top}</span>',
        title,
        value=value,
        top=top,
        tone=tone,
        share=share,
    )


def progress(task: Task) -> SafeString:
    """Done and failed of the devices wanted."""
    top = max(task.device_count, 1)
    return format_html(
        '<span class="dv-progress" role="img" aria-label="{done} / {top}">'
        '<i class="dv-done" style="width:{done_share}%"></i><i class="dv-failed" style="width:{failed_share}%"></i>'
        '<i class="dv-open" style="width:{open_share}%"></i></span> <b>{done}</b> / {top}',
        done=task.devices_done,
        top=task.device_count,
        done_share=round(100 * task.devices_done / top, 1),
        failed_share=round(100 * task.devices_failed / top, 1),
        open_share=round(100 * task.open_rows / top, 1),
    )
