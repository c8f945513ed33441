from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import transaction
from django_q.models import Schedule


class Command(BaseCommand):
    help = "Make django-q2's schedules equal to settings.SWEEPS."

    @transaction.atomic
    def handle(self, *args: Any, **options: Any) -> None:
        # One malformed schedule row would stop them all, so only what the settings say may stand.
        removed, _ = Schedule.objects.exclude(name__in=settings.SWEEPS).delete()
        for name, plan in settings.SWEEPS.items():
            wanted = {
                "func": "config.sweeping.tick",
                "args": repr((name,)),
                "kwargs": None,
                "hook": None,
                "schedule_type": Schedule.CRON,
                "cron": plan["cron"],
                "repeats": -1,
                "cluster": None,
            }
            rows = Schedule.objects.filter(name=name).order_by("id")
            keep = rows.first()
            if keep is None:
                Schedule.objects.create(name=name, **wanted)
                continue
            rows.exclude(pk=keep.pk).delete()
            if any(getattr(keep, key) != value for key, value in wanted.items()):
                rows.filter(pk=keep.pk).update(**wanted)
        self.stdout.write(f"{len(settings.SWEEPS)} schedules in step, {removed} removed")
