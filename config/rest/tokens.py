"""Knox's tokens, for headers of any bytes."""

from typing import Any

from knox import auth
from rest_framework.exceptions import AuthenticationFailed


class TokenAuthentication(auth.TokenAuthentication):
    def authenticate_credentials(self, token: bytes) -> Any:
        """Tokens are ASCII. Knox would fail to decode some other bytes, and PostgreSQL refuses to look for NUL."""
        if not token.isalnum():
            raise AuthenticationFailed("Invalid token.")
        return super().authenticate_credentials(token)
