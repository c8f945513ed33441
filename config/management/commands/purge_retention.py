from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand
from django.utils import timezone


class Command(BaseCommand):
    help = (
        "Delete what its retention has run out for; each app brings its part as <app>/retention.py:purge(now, dry_run)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        now = timezone.now()
        for config in apps.get_app_configs():
            if find_spec(f"{config.name}.retention"):
                for name, count in import_module(f"{config.name}.retention").purge(now, options["dry_run"]).items():
                    self.stdout.write(f"{'would delete' if options['dry_run'] else 'deleted'} {count} {name}")
