"""Addresses at rest: encrypted to be sent to, and a keyed hash to be found by.

Both keys are derived from SECRET_KEY. To rotate it, put the old one into SECRET_KEY_FALLBACKS and run
`manage.py reencrypt_addresses`, which encrypts and hashes everything anew; then the old one may go.
"""

import base64
import hashlib
import hmac
from functools import lru_cache

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

__all__ = ["InvalidToken", "address_hash", "decrypt", "encrypt", "hint", "normal"]


def _key(secret: str, purpose: str) -> bytes:
    return hashlib.sha256(f"signalbox.messaging.{purpose}:{secret}".encode()).digest()


@lru_cache(maxsize=4)
def _boxes(secrets: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(base64.urlsafe_b64encode(_key(secret, "encrypt"))) for secret in secrets])


def _box() -> MultiFernet:
    return _boxes((settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS))


def normal(channel: str, address: str) -> str:
    """The form two spellings of one address share: e-mail is compared without case."""
    return address.strip().lower() if channel == "email" else address.strip()


def address_hash(channel: str, address: str) -> str:
    key = _key(settings.SECRET_KEY, "hash")
    return hmac.new(key, f"{channel}:{normal(channel, address)}".encode(), hashlib.sha256).hexdigest()


def encrypt(text: str) -> str:
    return _box().encrypt(text.encode()).decode()


def decrypt(text: str) -> str:
    return _box().decrypt(text.encode()).decode()


def hint(channel: str, address: str) -> str:
    """Enough to recognise one's own address, too little to use it."""
    if channel == "email":
        local, _at, domain = address.rpartition("@")
        return f"{local[:1]}***@{domain}"[:64]
    return f"…{address[-4:]}" if len(address) >= 8 else "…"
