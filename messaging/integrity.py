from datetime import datetime

from django.db import models
from django.utils.translation import gettext_lazy as _

from config.integrity import Invariant
from messaging.models import Application
from messaging.services.analytics import drifted_applications, heal_drift


def drifted(now: datetime) -> models.QuerySet[Application]:
    return Application.objects.filter(pk__in=drifted_applications(now))


INVARIANTS = [
    Invariant(
        "messaging.rollup_drift",
        "warning",
        _("The roll-ups behind the analytics say the same as the messages."),
        drifted,
        heal_drift,
        _("counts again and adds the difference"),
    ),
]
