"""SMS by Twilio."""

from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

from django.conf import settings

from messaging.providers.answers import (
    Answer,
    Outgoing,
    accepted,
    begun_after,
    blamed,
    config,
    final,
    network,
    outage,
    rate_limited,
    rejected,
)
from messaging.providers.http import HttpProvider, NoReply, Reply, by_status, http_date, retry_after, run, timezone

RECIPIENT = {
    "21211": ("invalid_number", -50),
    "21214": ("invalid_number", -50),
    "21217": ("invalid_number", -50),
    "21265": ("invalid_number", -50),
    "21407": ("not_a_mobile_number", -50),
    "21614": ("not_a_mobile_number", -50),
    "21635": ("not_a_mobile_number", -50),
    "30004": ("blocked", -54),
    "30005": ("unknown_number", -52),
    "30006": ("not_a_mobile_number", -50),
}
SET_UP = {
    "10001", "20003", "20005", "20006", "20404", "21212", "21603", "21606", "21607", "21609", "21659", "21660",
    "21701", "21703", "30002",
}  # fmt: skip
OUR_NUMBER = {"21212", "21603", "21606", "21607", "21659", "21660"}
# Set up for other destinations, but not for this one: a country not enabled, a number not verified, no route.
NOT_FOR_THIS_ONE = {"21408", "21608", "21612"}
BUSY = {"20429", "21611", "30001"}
SOFT = {"21730", "30003", "30008", "30009", "30017"}
SENDER = {"30007", "30034"}


def verdict(code: str) -> Answer | None:
    """What one of Twilio's codes says, in an answer or in a callback."""
    if code in RECIPIENT:
        reason, status = RECIPIENT[code]
        return rejected("recipient", code, reason, subscription_status=status)
    if code == "21610":
        return rejected("recipient", code, "unsubscribed", subscription_status=-2, suppress_reason="unsubscribed")
    if code in SET_UP:
        return config(code)
    if code in NOT_FOR_THIS_ONE:
        return config(code, "message")
    if code in BUSY:
        return rate_limited(code)
    if code in SOFT:
        return outage(code, "recipient")
    if code in SENDER:
        return rejected("sender", code, "filtered")
    return None


class Twilio(HttpProvider):
    name = "twilio"
    concurrency = 32
    per_second = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.base_url = settings.TWILIO_BASE_URL
        self.url = f"/2010-04-01/Accounts/{quote(settings.TWILIO_ACCOUNT_SID, safe='')}/Messages.json"
        self.auth = (settings.TWILIO_ACCOUNT_SID, settings.TWILIO_AUTH_TOKEN)

    async def request(self, message: Outgoing) -> Reply:
        return await self.exchange("POST", self.url, data=form(message), auth=self.auth)

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        code = str(reply.body.get("code") or "")
        if not reply.ok:
            found = verdict(code)
            if reply.status == 429 or (found and found.outcome == "rate_limited"):
                return rate_limited(code or "http_429", retry_after(reply.headers, timezone.now()))
            if reply.status >= 500:
                return by_status(reply, code)
            return blamed(found, message, OUR_NUMBER) if found else by_status(reply, code)
        return _taken(reply.body) or by_status(reply)

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        """By its SID; else the newest to that number with the same words since the message was made.

        Not only since the attempt began: an earlier one may have been heard, and their clock may be behind ours.
        """
        if not provider_message_id and message is None:
            return None
        return run(self._query(provider_message_id, started_at, message))

    async def _query(self, sid: str, started_at: datetime, message: Outgoing | None) -> Answer | None:
        try:
            if sid:
                url = self.url.replace(".json", f"/{quote(sid, safe='')}.json")
                reply = await self.exchange("GET", url, auth=self.auth)
                return _taken(reply.body) if reply.ok else None
            assert message is not None
            params = {"To": message.token, "PageSize": "100"}
            reply = await self.exchange("GET", self.url, params=params, auth=self.auth)
        except NoReply:
            return None
        listed = reply.body.get("messages")
        if not reply.ok or not isinstance(listed, list):
            return None
        for item in listed:
            if isinstance(item, dict) and _is_ours(item, message, started_at):
                return _taken(item)
        return network("not_found")


def form(message: Outgoing) -> dict[str, str]:
    sender = message.from_ or settings.TWILIO_FROM
    fields = {"To": message.token, "Body": message.body}
    fields["MessagingServiceSid" if sender.startswith("MG") else "From"] = sender
    if _reachable():
        fields["StatusCallback"] = f"{settings.PUBLIC_URL}/api/v1/webhooks/twilio/"
    return fields


def _reachable() -> bool:
    """Twilio refuses a message whose callback points to localhost, unless it is there itself."""
    local = ("localhost", "127.0.0.1", "::1")
    return urlsplit(settings.PUBLIC_URL).hostname not in local or urlsplit(settings.TWILIO_BASE_URL).hostname in local


def _taken(item: dict[str, Any]) -> Answer | None:
    sid, status = item.get("sid"), item.get("status")
    if not isinstance(sid, str) or not sid or not isinstance(status, str):
        return None
    if status in ("failed", "undelivered", "canceled"):
        code = str(item.get("error_code") or status)
        return final(verdict(code) or rejected("message", code, "undelivered"))
    return accepted(sid, status)


def _is_ours(item: dict[str, Any], message: Outgoing, started_at: datetime) -> bool:
    """An item without a date counts as ours: a message is rather called sent than sent twice."""
    created = http_date(str(item.get("date_created") or ""))
    # A trial account puts its own words before ours.
    same_words = str(item.get("body") or "").endswith(message.body)
    recent = created is None or created >= begun_after(message, started_at) - timedelta(minutes=1)
    incoming = str(item.get("direction") or "").startswith("inbound")
    new = item.get("sid") not in message.others
    return item.get("to") == message.token and same_words and recent and new and not incoming
