"""Apple Push Notification service: HTTP/2 with provider tokens."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import jwt
from django.conf import settings
from django.utils import timezone

from messaging.providers.answers import Answer, Outgoing, accepted, config, outage, rate_limited, rejected
from messaging.providers.http import HttpProvider, Reply, by_status, retry_after

# Apple refuses a token older than an hour, and more than one new token in 20 minutes.
RENEW_AFTER = 50 * 60
RENEW_AT_MOST_EVERY = 20 * 60
TIME_TO_LIVE = timedelta(hours=72)
# So many tokens Apple does not know are no dead devices but sandbox tokens at the production host, or the reverse.
MIXED_UP_SHARE, MIXED_UP_COUNT = 0.2, 10

DEAD = {"BadDeviceToken": -10, "Unregistered": -10, "ExpiredToken": -10, "DeviceTokenNotForTopic": -14}
SET_UP = {
    "BadCertificate", "BadCertificateEnvironment", "BadPath", "BadTopic", "ExpiredProviderToken", "Forbidden",
    "InvalidProviderToken", "MethodNotAllowed", "MissingProviderToken", "MissingTopic", "TooManyProviderTokenUpdates",
    "TopicDisallowed", "UnrelatedKeyIdInToken", "BadEnvironmentKeyIdInToken",
}  # fmt: skip
DOWN = {"InternalServerError", "ServiceUnavailable", "Shutdown", "IdleTimeout"}


class ProviderToken:
    """Signed once and reused; renewed by age, or when Apple calls it expired (our clock may be wrong)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.token = ""
        self.made = 0.0
        self.forced = float("-inf")

    def get(self) -> str:
        with self.lock:
            if not self.token or time.monotonic() - self.made > RENEW_AFTER:
                self._sign()
            return self.token

    def renewed(self, expired: str) -> str | None:
        """A token newer than the expired one; None when renewing again so soon would be refused as well."""
        with self.lock:
            if self.token != expired:
                return self.token
            if time.monotonic() - self.forced < RENEW_AT_MOST_EVERY:
                return None
            self.forced = time.monotonic()
            self._sign()
            return self.token

    def _sign(self) -> None:
        claims = {"iss": settings.APNS_TEAM_ID, "iat": int(time.time())}
        self.token = jwt.encode(claims, settings.APNS_KEY, "ES256", headers={"kid": settings.APNS_KEY_ID})
        self.made = time.monotonic()


class APNs(HttpProvider):
    name = "apns"
    concurrency = 100
    per_second = 5000.0
    http2 = True
    idempotent = True  # the same apns-id and collapse id replace a repeat on the screen

    def __init__(self) -> None:
        super().__init__()
        self.base_url = settings.APNS_BASE_URL
        self.provider_token = ProviderToken()

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        return _without_mix_up(super().send(batch))

    async def request(self, message: Outgoing) -> Reply:
        token = self.provider_token.get()
        reply = await self._post(message, token)
        if reply.status == 403 and reply.body.get("reason") == "ExpiredProviderToken":
            newer = self.provider_token.renewed(token)
            if newer:
                reply = await self._post(message, newer)
        return reply

    async def _post(self, message: Outgoing, token: str) -> Reply:
        shown = bool(message.title or message.body)
        own_id = str(message.message_id)
        headers = {
            "authorization": f"bearer {token}",
            "apns-topic": settings.APNS_TOPIC,
            "apns-push-type": "alert" if shown else "background",
            "apns-id": own_id,
            "apns-collapse-id": own_id,
            "apns-priority": "10" if shown and message.kind != "marketing" else "5",
            # From now on: what was scheduled days ahead would else be past before it leaves and never wait for a device
            "apns-expiration": str(int((timezone.now() + TIME_TO_LIVE).timestamp())),
        }
        url = f"/3/device/{quote(message.token, safe='')}"
        return await self.exchange("POST", url, json=payload(message), headers=headers)

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        if reply.status == 200:
            return accepted(reply.headers.get("apns-id", str(message.message_id)), "200")
        return _refusal(reply)


def payload(message: Outgoing) -> dict[str, Any]:
    own_id = str(message.message_id)
    data = dict(message.data)
    # Badge, sound and the like travel in data.aps.
    extra = data.pop("aps", None)
    aps: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    shown = {key: text for key, text in (("title", message.title), ("body", message.body)) if text}
    if shown:
        aps["alert"] = shown
    else:
        aps["content-available"] = 1
    return {"aps": aps, "data": {**data, "message_id": own_id}, "message_id": own_id}


def _refusal(reply: Reply) -> Answer:
    reason = str(reply.body.get("reason") or "")
    code = reason or f"http_{reply.status}"
    if reason in DEAD or reply.status == 410:
        gone = rejected("recipient", code, "unregistered", subscription_status=DEAD.get(reason, -10))
        return replace(gone, since=_since(reply.body.get("timestamp")))
    if reason in SET_UP:
        return config(code)
    if reply.status == 429:
        # Too many for this one device: no reason to slow down for others.
        return rate_limited(code, retry_after(reply.headers, timezone.now()), "recipient")
    if reason in DOWN:
        return outage(code)
    return by_status(reply, code)


def _since(milliseconds: Any) -> datetime | None:
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int) or not 0 < milliseconds < 10**14:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _without_mix_up(answers: list[Answer]) -> list[Answer]:
    strange = sum(answer.code == "BadDeviceToken" for answer in answers)
    if strange < MIXED_UP_COUNT or strange <= MIXED_UP_SHARE * len(answers):
        return answers
    return [
        replace(config("BadDeviceToken", "sender"), raw=answer.raw, latency_ms=answer.latency_ms)
        if answer.code == "BadDeviceToken"
        else answer
        for answer in answers
    ]
