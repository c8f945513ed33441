"""Moving every stored address to a new SECRET_KEY."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.db import transaction

from messaging.models import Subscription, Suppression, WebhookEndpoint, addresses

PAGE = 1000


def reencrypt_addresses(say: Callable[[str], Any]) -> dict[str, int]:
    return {
        "subscriptions": _walk(Subscription, "token", say),
        "suppressions": _walk(Suppression, "address", say),
        "webhook secrets": _secrets(),
    }


@transaction.atomic
def _secrets() -> int:
    """Few, and not looked for by a hash."""
    rows = list(WebhookEndpoint.objects.select_for_update(of=("self",)).order_by("pk"))
    for row in rows:
        row.secret_encrypted = addresses.encrypt(row.secret)
    return WebhookEndpoint.objects.bulk_update(rows, ["secret_encrypted"])


def _walk(model: Any, name: str, say: Callable[[str], Any]) -> int:
    done, after = 0, UUID(int=0)
    while True:
        with transaction.atomic():
            rows = list(model.objects.filter(pk__gt=after).order_by("pk").select_for_update(of=("self",))[:PAGE])
            for row in rows:
                address = addresses.decrypt(getattr(row, f"{name}_encrypted"))
                setattr(row, f"{name}_encrypted", addresses.encrypt(address))
                setattr(row, f"{name}_hash", addresses.address_hash(row.channel_type, address))
            model.objects.bulk_update(rows, [f"{name}_encrypted", f"{name}_hash"])
        if not rows:
            return done
        done, after = done + len(rows), rows[-1].pk
        say(f"{model._meta.verbose_name_plural}: {done}")
