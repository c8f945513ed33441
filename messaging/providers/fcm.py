"""Firebase Cloud Messaging, HTTP v1."""

import asyncio
import json
import time
from typing import Any

from django.conf import settings
from google.auth import crypt, jwt

from messaging.providers.answers import (
    Answer,
    Outgoing,
    accepted,
    config,
    outage,
    rate_limited,
    rejected,
    unknown,
)
from messaging.providers.http import HttpProvider, NoReply, Reply, by_status, never_sent, retry_after, timezone

SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
# A push waits for the device as long as its receipt is waited for.
TIME_TO_LIVE = 72 * 3600


class AccessToken:
    """Google's short-lived token for the service account; one fetch for all who wait."""

    def __init__(self, provider: HttpProvider, account: dict[str, str]) -> None:
        self.provider = provider
        self.account = account
        self.signer = crypt.RSASigner.from_service_account_info(account)  # type: ignore[no-untyped-call]
        self.token = ""
        self.good_until = 0.0
        self.failure: tuple[float, Answer] | None = None
        self.lock = asyncio.Lock()

    async def get(self, stale: str = "") -> str:
        """`stale` is a token just refused: it is fetched anew unless somebody has done so already."""
        async with self.lock:
            if self.failure and time.monotonic() < self.failure[0]:
                raise NoReply(self.failure[1])
            if self.token == stale or time.monotonic() > self.good_until:
                await self._fetch()
            return self.token

    async def _fetch(self) -> None:
        try:
            reply = await self.provider.exchange(
                "POST", self.account["token_uri"], data={"grant_type": GRANT, "assertion": self._assertion()}
            )
        except NoReply as failure:
            raise self._failed(never_sent(failure.answer), failure.raw) from failure
        token, life = reply.body.get("access_token"), reply.body.get("expires_in", 3600)
        if not reply.ok or not isinstance(token, str) or not token or not isinstance(life, int | float):
            raise self._failed(self._refused(reply), reply.text)
        self.token, self.failure = token, None
        self.good_until = time.monotonic() + max(life - 300, life / 2)

    def _refused(self, reply: Reply) -> Answer:
        code = f"token_{reply.body.get('error') or reply.status}"
        if reply.ok:
            return outage("token_malformed")
        if reply.status == 429:
            return rate_limited(code, retry_after(reply.headers, timezone.now()))
        return outage(code) if reply.status >= 500 else config(code)

    def _failed(self, answer: Answer, raw: str) -> NoReply:
        # Everybody of this batch hears the same, instead of waiting for a timeout each.
        self.failure = (time.monotonic() + 5, answer)
        return NoReply(answer, raw)

    def _assertion(self) -> str:
        now = int(time.time())
        claims = {
            "iss": self.account["client_email"],
            "aud": self.account["token_uri"],
            "scope": SCOPE,
            "iat": now,
            "exp": now + 3600,
        }
        return jwt.encode(self.signer, claims).decode()  # type: ignore[no-untyped-call]


class FCM(HttpProvider):
    name = "fcm"
    concurrency = 100
    per_second = 5000.0
    http2 = True
    idempotent = True  # collapse key and tag replace a repeat on the screen

    def __init__(self) -> None:
        super().__init__()
        self.account = settings.FCM_CREDENTIALS
        self.url = f"{settings.FCM_BASE_URL}/v1/projects/{self.account['project_id']}/messages:send"
        self._access: tuple[asyncio.AbstractEventLoop, AccessToken] | None = None

    async def request(self, message: Outgoing) -> Reply:
        access = self._access_token()
        token = await access.get()
        reply = await self._post(message, token)
        if reply.status in (401, 403) and not fcm_code(reply.body):
            reply = await self._post(message, await access.get(stale=token))
        return reply

    async def _post(self, message: Outgoing, token: str) -> Reply:
        return await self.exchange(
            "POST", self.url, json=payload(message), headers={"Authorization": f"Bearer {token}"}
        )

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        if reply.ok:
            name = reply.body.get("name")
            return accepted(name, "200") if isinstance(name, str) and name else unknown("malformed")
        return _refusal(reply)

    def _access_token(self) -> AccessToken:
        loop = asyncio.get_running_loop()
        if self._access is None or self._access[0] is not loop:
            self._access = (loop, AccessToken(self, self.account))
        return self._access[1]


def payload(message: Outgoing) -> dict[str, Any]:
    own_id = str(message.message_id)
    shown = {key: text for key, text in (("title", message.title), ("body", message.body)) if text}
    android: dict[str, Any] = {
        "collapse_key": own_id,
        "ttl": f"{TIME_TO_LIVE}s",
        "priority": "NORMAL" if message.kind == "marketing" else "HIGH",
    }
    content: dict[str, Any] = {
        "token": message.token,
        "data": {**{key: _text(value) for key, value in message.data.items()}, "message_id": own_id},
        "android": android,
        "apns": {"headers": {"apns-collapse-id": own_id}},
    }
    if shown:
        content["notification"] = shown
        android["notification"] = {"tag": own_id}
    return {"message": content}


def _text(value: Any) -> str:
    """FCM takes only strings as data."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def fcm_code(body: dict[str, Any]) -> str:
    """FCM's own error code, beside Google's general status; empty when it gives none."""
    error = body.get("error")
    if not isinstance(error, dict):
        return ""
    for detail in _details(error):
        if str(detail.get("@type", "FcmError")).endswith("FcmError") and isinstance(detail.get("errorCode"), str):
            return str(detail["errorCode"])
    return ""


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []


def _refusal(reply: Reply) -> Answer:
    error = reply.body.get("error")
    error = error if isinstance(error, dict) else {}
    code = fcm_code(reply.body) or str(error.get("status") or f"http_{reply.status}")
    if code == "UNREGISTERED":
        return rejected("recipient", code, "unregistered", subscription_status=-10)
    if code == "SENDER_ID_MISMATCH":
        return rejected("recipient", code, "sender_id_mismatch", subscription_status=-6)
    if code == "THIRD_PARTY_AUTH_ERROR":
        return config(code)
    if code == "INVALID_ARGUMENT" or reply.status == 400:
        if _blames_token(error):
            return rejected("recipient", code, "invalid_token", subscription_status=-10)
        return rejected("message", code, "invalid_argument")
    if code in ("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED"):
        return rate_limited(code, retry_after(reply.headers, timezone.now()))
    if code in ("UNAVAILABLE", "INTERNAL"):
        return outage(code)
    return by_status(reply, code)


def _blames_token(error: dict[str, Any]) -> bool:
    """A malformed payload gives the same status: only a complaint about the token may cost the device its place."""
    fields = [
        str(violation.get("field", ""))
        for detail in _details(error)
        for violation in detail.get("fieldViolations") or []
        if isinstance(violation, dict)
    ]
    if fields:
        return all(field.endswith("message.token") or field == "token" for field in fields)
    return "registration token" in str(error.get("message", "")).lower()
