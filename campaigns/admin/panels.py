from collections import Counter
from datetime import datetime

from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from campaigns.admin.sequences import COLOURS
from campaigns.models import DisplayState, Execution, Sender, Sequence
from config.console import Figure, Panel, Row, few, panel
from config.console.panels import age

SHOWN = 5
JUDGED = 500  # the badge of a sequence takes a few look-ups, so no more than this many are told apart


@panel(_("Campaigns"), order=20, icon="campaign", permission="campaigns.view_sequence")
def campaigns_panel(request: HttpRequest) -> Panel:
    now, link = timezone.now(), reverse("admin:campaigns_sequence_changelist")
    rows = [_steps_row(now), *_senders()]
    tone = "warning" if len(rows) > 1 else "success"
    return Panel(figures=_sequences(now, link), rows=rows, link=link, tone=tone)


def _sequences(now: datetime, link: str) -> list[Figure]:
    live = list(Sequence.objects.filter(status="active").values_list("pk", flat=True)[: JUDGED + 1])
    paused = Figure(
        _now("paused"), few(Sequence.objects.filter(status="paused")), f"{link}?status__exact=paused", "warning"
    )
    if len(live) > JUDGED:
        running = few(Sequence.objects.filter(status="active"))
        return [Figure(_now("running"), running, f"{link}?status__exact=active", "success"), paused]
    found = Sequence.objects.filter(pk__in=live).with_display(now).order_by()
    counts = Counter(found.values_list("display_state", flat=True))
    words = dict(DisplayState.choices)
    shown = [
        Figure(words[state], counts[state], f"{link}?display_state={state}", COLOURS[state])
        for state in ("active", "finalizing", "reply_harvest", "partially_paused")
        if counts[state] or state == "active"
    ]
    return [*shown, paused]


def _steps_row(now: datetime) -> Row:
    due = Execution.objects.due(now)
    count = few(due)
    first = due.order_by("effective_due").values_list("effective_due", flat=True).first() if count != "0" else None
    note = _now("the oldest since %(age)s") % {"age": age(first, now)} if first else _now("nothing waits")
    link = f"{reverse('admin:campaigns_execution_changelist')}?due=now"
    return Row(title=_now("steps due"), note=note, link=link, badge=count, tone="info")


def _senders() -> list[Row]:
    sick = Sender.objects.filter(deleted_at=None).exclude(status="active").order_by("status", "address")
    rows = [
        Row(
            title=str(sender),
            note=sender.last_error,
            badge=sender.get_status_display(),
            tone="danger" if sender.status == "error" else "warning",
            link=reverse("admin:campaigns_sender_change", args=[sender.pk]),
        )
        for sender in sick[: SHOWN + 1]
    ]
    if len(rows) <= SHOWN:
        return rows
    every = Row(title=_now("senders that need care"), link=reverse("admin:campaigns_sender_changelist"),
                badge=few(sick), tone="warning")  # fmt: skip
    return [*rows[:SHOWN], every]
