import os
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

PAGES = {
    "dashboard": "/admin/",
    "integrity": "/admin/integrity/",
    "sweeps": "/admin/config/sweeprun/",
    "sequences": "/admin/campaigns/sequence/",
    "messages": "/admin/messaging/message/",
    "pcs": "/admin/devices/pc/",
    "locks": "/admin/locks/branchlock/",
    "alarms": "/admin/reminders/alarm/",
}


class Command(BaseCommand):
    help = "Take the documentation's pictures of a running server, by Chromium, in one language and scheme."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--url", default=f"http://localhost:{settings.PORT}")
        parser.add_argument("--user", default="admin")
        parser.add_argument("--password", default=os.environ.get("ADMIN_PASSWORD", ""), help="or ADMIN_PASSWORD")
        parser.add_argument("--out", type=Path, default=Path(settings.BASE_DIR, "docs", "images"))
        parser.add_argument("--language", choices=["en", "ko"], default="en")
        parser.add_argument("--dark", action="store_true")
        parser.add_argument("pages", nargs="*", help="names, or name=/admin/… for others; all names if none")

    def handle(self, *args: Any, **options: Any) -> None:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if chromium is None:
            raise CommandError("no Chromium on the PATH")
        from playwright.sync_api import sync_playwright

        options["out"].mkdir(parents=True, exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(
                locale={"en": "en-GB", "ko": "ko-KR"}[options["language"]],
                color_scheme="dark" if options["dark"] else "light",
                viewport={"width": 1280, "height": 900},
            )
            page.goto(f"{options['url']}/admin/", wait_until="networkidle")
            page.fill("#id_username", options["user"])
            page.fill("#id_password", options["password"])
            page.click("button[type=submit]")
            page.wait_for_url("**/admin/")
            for name in options["pages"] or PAGES:
                self.shoot(page, name, options)
            browser.close()

    def shoot(self, page: Any, name: str, options: dict[str, Any]) -> None:
        name, _, path = name.partition("=")
        path = path or PAGES.get(name, "")
        if not path.startswith("/"):
            raise CommandError(f"{name}: not one of {', '.join(PAGES)}; say {name}=/admin/…")
        suffix = ("-ko" if options["language"] == "ko" else "") + ("-dark" if options["dark"] else "")
        target = options["out"] / f"{name}{suffix}.png"
        answer = page.goto(options["url"] + path, wait_until="networkidle")
        if answer is None or not answer.ok:
            raise CommandError(f"{path}: {answer.status if answer else 'no answer'}")
        page.screenshot(path=str(target))
        self.stdout.write(str(target))
