from typing import Any

from django.core.management.base import BaseCommand

from messaging.services.addresses import reencrypt_addresses


class Command(BaseCommand):
    help = (
        "Encrypt and hash every stored address with the present SECRET_KEY. Run it after a rotation, with the old key"
        " in SECRET_KEY_FALLBACKS; it can be stopped and run again."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        for name, count in reencrypt_addresses(self.stderr.write).items():
            self.stdout.write(f"{count} {name}")
