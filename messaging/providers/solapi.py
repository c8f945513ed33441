"""KakaoTalk Alimtalk and SMS by Solapi."""

import hashlib
import hmac
import re
import secrets
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils import timezone

from messaging.providers.answers import (
    Answer,
    Outgoing,
    accepted,
    begun_after,
    blamed,
    config,
    domestic,
    final,
    network,
    outage,
    rejected,
    unknown,
)
from messaging.providers.http import HttpProvider, NoReply, Reply, by_status, run
from messaging.providers.korea import is_long, subject

SEND = "/messages/v4/send-many/detail"
LIST = "/messages/v4/list"
PAGES = 10
# E.164: one digit for North America and Russia, two for the older zones, three elsewhere.
CALLING_CODE = re.compile(r"\+(1|7|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]|\d{3})(\d+)\Z")
# Balance, sender number, channel: ours to mend.
SET_UP = {"1030", "2230", "1062", "2062", "3101", "3106"}
OUR_NUMBER = {"1062", "2062"}
# Told with 400 as well as with 401 and 403.
OUR_LOGIN = {
    "duplicatedsignature", "forbidden", "invalidapikey", "requesttimetooskewed", "signaturedoesnotmatch",
    "unauthorized",
}  # fmt: skip
OPTED_OUT = {"1061", "2061"}
NO_KAKAO = {"3104": ("not_kakao_user", -60), "3107": ("kakao_blocked", -61), "3102": ("not_reachable", None)}
BAD_NUMBER = {"1011", "1012", "2104", "3015", "3031"}


def verdict(code: str, provider_message_id: str = "") -> Answer:
    """What a status code says: 2xxx taken, 3000 with the carrier, 4000 delivered, the rest failures."""
    if code in ("2000", "3000", "4000"):
        return accepted(provider_message_id, code)
    if code in SET_UP:
        return config(code, "sender")
    if code in OPTED_OUT:
        return rejected("recipient", code, "unsubscribed", subscription_status=-2, suppress_reason="unsubscribed")
    if code in NO_KAKAO:
        reason, status = NO_KAKAO[code]
        return replace(rejected("recipient", code, reason, subscription_status=status), failover=True)
    if code in BAD_NUMBER:
        return rejected("recipient", code, "invalid_number", subscription_status=-50)
    return rejected("message", code, "rejected")


class Solapi(HttpProvider):
    name = "solapi"
    concurrency = 32
    per_second = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.base_url = settings.SOLAPI_BASE_URL

    async def request(self, message: Outgoing) -> Reply:
        body = {"messages": [content(message)], "showMessageList": True}
        return await self.exchange("POST", SEND, json=body, headers={"Authorization": signature()})

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        return blamed(_judged(reply), message, OUR_NUMBER)

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        return run(self._query(message_id, begun_after(message, started_at), started_at))

    async def _query(self, message_id: UUID, since: datetime, started_at: datetime) -> Answer | None:
        """Our id rides in customFields, which cannot be searched for: the minutes around the attempt are read."""
        params = {
            "dateType": "CREATED",
            "startDate": (since - timedelta(minutes=2)).astimezone(UTC).isoformat(),
            "endDate": (started_at + timedelta(minutes=30)).astimezone(UTC).isoformat(),
            "limit": "500",
        }
        for _page in range(PAGES):
            try:
                reply = await self.exchange("GET", LIST, params=params, headers={"Authorization": signature()})
            except NoReply:
                return None
            items = _items(reply)
            if items is None:
                return None
            for item in items:
                fields = item.get("customFields")
                if isinstance(fields, dict) and fields.get("message_id") == str(message_id):
                    found = verdict(str(item.get("statusCode") or "2000"), str(item.get("messageId") or ""))
                    return found if found.outcome == "accepted" else final(found)
            if not (next_key := reply.body.get("nextKey")):
                return network("not_found")
            params["startKey"] = str(next_key)
        return None


def signature() -> str:
    """Good once and for 15 minutes, so every request gets its own."""
    date, salt = timezone.now().astimezone(UTC).isoformat(), secrets.token_hex(16)
    signed = hmac.new(settings.SOLAPI_API_SECRET.encode(), (date + salt).encode(), hashlib.sha256).hexdigest()
    return f"HMAC-SHA256 apiKey={settings.SOLAPI_API_KEY}, date={date}, salt={salt}, signature={signed}"


def content(message: Outgoing) -> dict[str, Any]:
    fields: dict[str, Any] = {"to": domestic(message.token), "customFields": {"message_id": str(message.message_id)}}
    if sender := re.sub(r"\D", "", domestic(message.from_ or settings.SOLAPI_FROM)):
        fields["from"] = sender
    if not message.token.startswith("+82") and (abroad := CALLING_CODE.match(message.token)):
        fields["country"], fields["to"] = abroad.groups()
    if message.channel_type == "kakao_talk":
        fields["type"] = "ATA"
        fields["kakaoOptions"] = {
            "pfId": settings.SOLAPI_PF_ID,
            "templateId": message.template_code,
            "variables": {f"#{{{key}}}": str(value) for key, value in message.template_parameters.items()},
            # Else Solapi texts the person beside our own failover.
            "disableSms": True,
        }
        return fields
    fields["text"] = message.body
    fields["type"] = "LMS" if is_long(message.body) else "SMS"
    if is_long(message.body):
        fields["subject"] = subject(message.title or message.body.strip().split("\n")[0])
    return fields


def _judged(reply: Reply) -> Answer:
    body = reply.body
    failed, listed, group = body.get("failedMessageList"), body.get("messageList"), body.get("groupInfo")
    if reply.status < 500 and isinstance(failed, list) and failed and isinstance(failed[0], dict):
        return verdict(str(failed[0].get("statusCode") or "failed"))
    if not reply.ok:
        return _refusal(reply)
    if isinstance(listed, list) and listed and isinstance(listed[0], dict) and listed[0].get("messageId"):
        return verdict(str(listed[0].get("statusCode") or "2000"), str(listed[0]["messageId"]))
    if isinstance(group, dict) and (group.get("groupId") or group.get("_id")):
        return accepted(str(group.get("groupId") or group["_id"]), "2000")
    return unknown("malformed")


def _refusal(reply: Reply) -> Answer:
    code = str(reply.body.get("errorCode") or f"http_{reply.status}")
    if code.lower() in OUR_LOGIN:
        return config(code)
    if code == "NotEnoughBalance" or reply.status == 402:
        return config(code, "sender")
    if code.isdigit():
        return verdict(code)
    if code in ("InternalError", "TooManyRequests"):
        return outage(code) if reply.status != 429 else by_status(reply, code)
    return by_status(reply, code)


def _items(reply: Reply) -> list[dict[str, Any]] | None:
    """The list comes as an object by message id, in older versions as an array."""
    listed = reply.body.get("messageList")
    if not reply.ok or not isinstance(listed, dict | list):
        return None
    return [item for item in (listed.values() if isinstance(listed, dict) else listed) if isinstance(item, dict)]
