"""The house's own rules: what a reader may rely on without looking."""

import ast
import re
from importlib import import_module
from io import StringIO
from pathlib import Path

import polib
import pytest
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.utils.module_loading import import_string
from django.utils.translation import gettext, ngettext, override, pgettext
from django.utils.translation.template import templatize

from config.apps import GROUPS

ROOT = settings.BASE_DIR
APPS = ["locks", "messaging", "campaigns", "reminders", "devices"]
ROOMS = {
    "__init__", "apps", "models", "services", "sweeps", "api", "admin", "triggers", "providers", "client", "integrity",
    "retention", "demo", "management", "migrations", "locale", "README",
}  # fmt: skip


@pytest.mark.parametrize("app", APPS)
def test_an_app_has_only_the_rooms_of_the_house(app):
    found = {path.stem for path in (ROOT / app).iterdir() if not path.name.startswith("__pycache__")}
    assert found - {"templates", "static"} <= ROOMS
    assert {"models", "services", "sweeps", "api", "admin"} <= found


def test_every_sweep_is_a_function_of_its_apps_sweeps_room():
    for name in settings.SWEEPS:
        app, function = name.split(".")
        assert import_module(import_string(f"{app}.sweeps.{function}").__module__).__name__.startswith(f"{app}.sweeps")


@pytest.mark.django_db
def test_migrations_are_current():
    call_command("makemigrations", "--check", "--dry-run", stdout=StringIO())


def test_migrations_know_states_as_text():
    """An FSMField looks for transitions in every class that migrating makes: that doubled the time of a first start."""
    for path in ROOT.glob("*/migrations/*.py"):
        assert "django_fsm" not in path.read_text(), path


def test_grants_name_known_groups():
    for config in apps.get_app_configs():
        assert set(getattr(config, "grants", {})) <= set(GROUPS)


def test_dotted_paths_of_other_apps_go_down_only():
    """String references escape import-linter: a lower app must not name an upper one in quotes either."""
    above = {
        "locks": ["messaging", "campaigns", "reminders", "devices"],
        "messaging": ["campaigns", "reminders", "devices"],
    }
    for app, forbidden in above.items():
        for path in (ROOT / app).rglob("*.py"):
            found = re.findall(rf"""["']({"|".join(forbidden)})\.\w""", path.read_text())
            assert not found, f"{path} names {found}"


def test_no_sleep_in_tests():
    pattern = re.compile(r"\btime\.sleep\(|\bfrom time import .*sleep")
    polling = {"test_embedded.py", "test_up.py"}  # bounded polling of other processes
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in polling | {"test_house.py"}:
            assert not pattern.search(path.read_text()), path


def catalogues():
    return sorted(path for path in ROOT.glob("*/locale/ko/LC_MESSAGES/django.po"))


@pytest.mark.parametrize("path", catalogues(), ids=lambda path: path.parts[-5])
def test_the_korean_catalogue_is_complete_and_compiled(path: Path):
    source = polib.pofile(str(path))
    assert [entry.msgid for entry in source if not entry.obsolete and not entry.translated()] == []
    compiled = polib.mofile(str(path.with_suffix(".mo")))
    assert spoken(source) == spoken(compiled)


def spoken(entries):
    """By context too: one word may stand for two things."""
    return {(e.msgctxt, e.msgid): e.msgstr_plural or e.msgstr for e in entries if not e.obsolete}


def translations():
    for path in catalogues():
        for entry in polib.pofile(str(path)):
            yield entry, entry.msgstr_plural[0] if entry.msgid_plural else entry.msgstr


def test_korean_fills_in_the_same_places():
    """A place that is lost or misspelt shows as a hole, or as an error instead of the page."""
    place = re.compile(r"%\(\w+\)[a-z]|%[sd]|\{\{?\w+\}?\}")
    wrong = [
        entry.msgid
        for entry, korean in translations()
        if sorted(place.findall(entry.msgid_plural or entry.msgid)) != sorted(place.findall(korean))
        or ("%(" in entry.msgid and "python-format" not in entry.flags)
    ]
    assert wrong == []


def test_korean_shown_is_the_korean_written():
    """Catalogues share one name space: a word of an earlier app, or of Django, would win unseen."""
    with override("ko"):
        for entry, korean in translations():
            if entry.msgid_plural:
                shown = ngettext(entry.msgid, entry.msgid_plural, 2)
            else:
                shown = pgettext(entry.msgctxt, entry.msgid) if entry.msgctxt else gettext(entry.msgid)
            assert shown == korean, entry.msgid


MARKS = {"_", "_now", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy", "pgettext", "pgettext_lazy"}


def marked_in_code(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MARKS and node.args:
            *context, first = node.args[:2] if node.func.id.startswith("pgettext") else node.args[:1]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield context[0].value if context else None, first.value


def marked_in_template(path: Path):
    for literal in re.findall(
        r"""\bn?gettext\((u?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))""", templatize(path.read_text())
    ):
        yield None, ast.literal_eval(literal)


@pytest.mark.parametrize("app", ["config", "locks", "messaging", "campaigns", "reminders", "devices", "templates"])
def test_every_marked_string_has_its_korean(app):
    written = (entry for path in catalogues() for entry in polib.pofile(str(path)) if entry.translated())
    known = {(entry.msgctxt, entry.msgid) for entry in written}
    code = [path for path in (ROOT / app).rglob("*.py") if "migrations" not in path.parts]
    marked = {text for path in code for text in marked_in_code(path)}
    marked |= {text for path in (ROOT / app).rglob("*.html") for text in marked_in_template(path)}
    assert sorted(marked - known, key=str) == []
