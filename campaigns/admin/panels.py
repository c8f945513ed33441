from django.db.models import Count
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from campaigns.models import Execution, Sender, Sequence
from config.console import Figure, Panel, Row, panel


@panel(_("Campaigns"), order=20, icon="campaign", permission="campaigns.view_sequence")
def campaigns_panel(request: HttpRequest) -> Panel:
    link = reverse("admin:campaigns_sequence_changelist")
    counts = dict(Sequence.objects.order_by().values_list("status").annotate(n=Count("pk")))
    due = Execution.objects.due(timezone.now()).count()
    figures = [
        Figure(_now("running"), counts.get("active", 0), f"{link}?status__exact=active", "success"),
        Figure(_now("paused"), counts.get("paused", 0), f"{link}?status__exact=paused", "warning"),
        Figure(_now("steps due"), due, tone="info" if due else ""),
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
