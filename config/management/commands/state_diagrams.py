from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from config.statemachine import Graph, graphs


def section(graph: Graph) -> tuple[str, str]:
    mark = f"<!-- graph {graph.name} -->"
    return mark, f"{mark}\n```mermaid\n{graph.mermaid()}\n```\n<!-- end -->"


def written(text: str, graph: Graph) -> str:
    """The README's text with this graph's diagram as the code has it."""
    mark, diagram = section(graph)
    if mark not in text:
        return f"{text.rstrip()}\n\n{diagram}\n"
    before, _mark, rest = text.partition(mark)
    return before + diagram + rest.partition("<!-- end -->")[2]


class Command(BaseCommand):
    help = "Write each app's state diagrams into its README; --check only compares."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        for graph in graphs():
            path = Path(settings.BASE_DIR, apps.get_app_config(graph.model._meta.app_label).name, "README.md")
            text = path.read_text() if path.exists() else ""
            if written(text, graph) == text:
                continue
            if options["check"]:
                raise CommandError(f"{path.name} of {graph.name} is out of date: run manage.py state_diagrams")
            path.write_text(written(text, graph))
            self.stdout.write(f"wrote {graph.name}")
