"""A real Chromium against pytest-django's live server."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("browser tests need a Chromium on the PATH")
    from playwright.sync_api import sync_playwright

    # Playwright keeps an event loop in this thread, which makes django refuse the ORM. Per module, so that the loop is
    # gone before other tests run.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
    if before is None:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@dataclass
class Visit:
    """A page that keeps what went wrong on it."""

    page: Any
    base: str
    problems: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def go(self, path: str, until: str = "load") -> Any:
        self.page.goto(self.base + path, wait_until=until)
        return self.page

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def login(self, username: str) -> None:
        self.go("/admin/")
        self.page.fill("#id_username", username)
        self.page.fill("#id_password", PASSWORD)
        self.page.click("button[type=submit]")
        self.page.wait_for_url("**/admin/")


@pytest.fixture
def visit(chromium: Any, live_server: Any) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def make(locale: str = "en-GB", scheme: str = "light") -> Visit:
        context = chromium.new_context(
            locale=locale, color_scheme=scheme, viewport={"width": 1280, "height": 900}, service_workers="block"
        )
        context.set_default_timeout(60_000)
        contexts.append(context)
        seen = Visit(context.new_page(), live_server.url)
        seen.page.on("console", lambda line: seen.problems.append(line.text) if line.type == "error" else None)
        seen.page.on("pageerror", lambda error: seen.problems.append(str(error)))
        host = urlsplit(live_server.url).netloc

        def guard(route: Any) -> None:
            if urlsplit(route.request.url).netloc in (host, ""):
                route.continue_()
            else:
                seen.strangers.append(route.request.url)
                route.abort()

        context.route("**/*", guard)
        return seen

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def boss(transactional_db: None) -> User:
    return User.objects.create_superuser("boss", password=PASSWORD)


@pytest.fixture
def demo(boss: User) -> None:
    """The world of `make run`, without the people and PCs that move it."""
    for app in ("locks", "messaging", "campaigns", "reminders", "devices"):
        import_module(f"{app}.demo").seed(1, lambda line: None)
