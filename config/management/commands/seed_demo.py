from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

# Where the demo's messages go unless PROVIDERS says otherwise.
CONSOLE = dict.fromkeys(("iOSPush", "AndroidPush", "Email", "SMS", "KakaoTalk"), "console")


class Command(BaseCommand):
    help = "Build the demo world; each app brings its part as <app>/demo.py:seed(scale, say)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--scale", type=int, default=1, metavar="N")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["scale"] <= 10_000:
            raise CommandError("--scale: from 1 to 10000")
        settings.PROVIDERS = settings.PROVIDERS or CONSOLE
        for config in apps.get_app_configs():
            if find_spec(f"{config.name}.demo"):
                import_module(f"{config.name}.demo").seed(options["scale"], self.stderr.write)
