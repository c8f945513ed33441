from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from campaigns.models import Execution, Sender, Sequence
from config.console import Figure, Panel, Row, few, panel


@panel(_("Campaigns"), order=20, icon="campaign", permission="campaigns.view_sequence")
def campaigns_panel(request: HttpRequest) -> Panel:
    link = reverse("admin:campaigns_sequence_changelist")
    due = few(Execution.objects.due(timezone.now()))
    figures = [
        Figure(
            _now("running"), few(Sequence.objects.filter(status="active")), f"{link}?status__exact=active", "success"
        ),
        Figure(
            _now("paused"), few(Sequence.objects.filter(status="paused")), f"{link}?status__exact=paused", "warning"
        ),
        Figure(_now("steps due"), due, tone="info" if due != "0" else ""),
    ]
    sick = Sender.objects.filter(deleted_at=None).exclude(status="active").order_by("status", "address")[:5]
    rows = [
        Row(
            title=str(sender),
            note=sender.last_error,
            badge=sender.get_status_display(),
            tone="danger" if sender.status == "error" else "warning",
            link=reverse("admin:campaigns_sender_change", args=[sender.pk]),
        )
        for sender in sick
    ]
    return Panel(figures=figures, rows=rows, link=link, tone="warning" if rows else "success")
