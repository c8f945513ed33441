"""gunicorn's own lines, in the form of all the others and redacted like them."""

from typing import Any

from django.conf import settings
from gunicorn.glogging import Logger

from config.observe import configure_logging


class Lines(Logger):
    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        configure_logging(settings.LOGGING)
