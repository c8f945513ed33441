"""KakaoTalk Alimtalk and SMS by NHN Cloud. HTTP 200 is no success there: the header and each recipient are read."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote
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
from messaging.providers.korea import UNREACHABLE, is_long, kakao_result, local_time, subject

SET_UP = {"-1000", "-1001", "-1002", "-1003", "-1004", "-4004", "-4005"}
KAKAO_SET_UP = SET_UP | {"-1006", "-1027", "-2017"}
# Empty, not registered, blocked.
OUR_NUMBER = {"-2103", "-2312", "-2313", "-2314"}
SMS_SET_UP = SET_UP | OUR_NUMBER
DOWN = {"-7000", "-9998", "-9999", "-2021"}
TEMPLATE = {"-3003", "-3004", "-3005", "-3010", "-3324"}
REPEATED = "-1005"
NO_SUCH_NUMBER = {"1002", "3001", "3003"}


class NHN(HttpProvider):
    """Both services answer in the same form; they differ in path, body and codes."""

    name = "nhn"
    concurrency = 32
    per_second = 200.0
    secret = ""

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        code = header_code(reply.body)
        if reply.status == 400 and code:
            return self.refusal(code)  # says more than the status
        if not reply.ok:
            return by_status(reply, code or "")
        if code is None:
            return unknown("malformed")
        if code != "0":
            return self.refusal(code)
        found = self.result(reply.body)
        if found is None:
            return unknown("malformed")
        result, provider_message_id = found
        return accepted(provider_message_id, "0") if result == "0" else self.refusal(result)

    async def deliver(self, message: Outgoing) -> Answer:
        answer = await super().deliver(message)
        if answer.code != REPEATED:
            return answer
        # An earlier attempt with this key was taken: what became of it is the answer, once it is listed.
        now = timezone.now()
        first = await self._query(message.message_id, begun_after(message, now), now)
        if first is None or first.code == "not_found":
            return answer
        return replace(first, raw=answer.raw, latency_ms=answer.latency_ms)

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        since = begun_after(message, started_at)
        return run(self._query(message_id, since, started_at + timedelta(hours=1)))

    async def _query(self, message_id: UUID, since: datetime, until: datetime) -> Answer | None:
        raise NotImplementedError

    def refusal(self, code: str) -> Answer:
        raise NotImplementedError

    def result(self, body: dict[str, Any]) -> tuple[str, str] | None:
        raise NotImplementedError

    async def look_up(self, url: str, message_id: UUID, since: datetime, until: datetime) -> dict[str, Any] | None:
        """The answer to a list of what was asked with our key in that time."""
        params = {
            "startRequestDate": local_time(since - timedelta(minutes=5)),
            "endRequestDate": local_time(until + timedelta(minutes=5)),
            "recipientGroupingKey": str(message_id),
            "pageNum": "1",
            "pageSize": "10",
        }
        try:
            reply = await self.exchange("GET", url, params=params, headers={"X-Secret-Key": self.secret})
        except NoReply:
            return None
        return reply.body if reply.ok and header_code(reply.body) == "0" else None

    def key_headers(self, message: Outgoing) -> dict[str, str]:
        return {"X-Secret-Key": self.secret, "X-NC-API-IDEMPOTENCY-KEY": str(message.message_id)}


class NHNKakao(NHN):
    idempotent = True  # the same key within 10 minutes is refused, and later the query finds the first

    def __init__(self) -> None:
        super().__init__()
        self.base_url = settings.NHN_KAKAO_BASE_URL
        self.url = f"/alimtalk/v2.3/appkeys/{quote(settings.NHN_KAKAO_APPKEY, safe='')}/messages"
        self.secret = settings.NHN_KAKAO_SECRET

    async def request(self, message: Outgoing) -> Reply:
        return await self.exchange("POST", self.url, json=alimtalk(message), headers=self.key_headers(message))

    def result(self, body: dict[str, Any]) -> tuple[str, str] | None:
        return _first_result(body.get("message"), "sendResults")

    def refusal(self, code: str) -> Answer:
        if code in KAKAO_SET_UP:
            return config(code)
        if code in DOWN:
            return outage(code)
        if code in TEMPLATE:
            return rejected("message", code, "template_refused")
        if code == "-5000":
            return rejected("recipient", code, "invalid_number", subscription_status=-50)
        if code == REPEATED:
            return unknown(code)
        return kakao_result(code)

    async def _query(self, message_id: UUID, since: datetime, until: datetime) -> Answer | None:
        body = await self.look_up(self.url, message_id, since, until)
        found = (body or {}).get("messageSearchResultResponse")
        return _judged(found, "messages", message_id, _kakao_item) if body else None


class NHNSms(NHN):
    breaker = "nhn_sms"

    def __init__(self) -> None:
        super().__init__()
        self.base_url = settings.NHN_SMS_BASE_URL
        self.url = f"/sms/v3.0/appKeys/{quote(settings.NHN_SMS_APPKEY, safe='')}/sender"
        self.secret = settings.NHN_SMS_SECRET

    def judge(self, reply: Reply, message: Outgoing) -> Answer:
        return blamed(super().judge(reply, message), message, OUR_NUMBER)

    async def request(self, message: Outgoing) -> Reply:
        url = f"{self.url}/{'mms' if is_long(message.body) else 'sms'}"
        return await self.exchange("POST", url, json=text_message(message), headers=self.key_headers(message))

    def result(self, body: dict[str, Any]) -> tuple[str, str] | None:
        inner = body.get("body")
        return _first_result(inner.get("data") if isinstance(inner, dict) else None, "sendResultList")

    def refusal(self, code: str) -> Answer:
        if code in SMS_SET_UP:
            return config(code)
        if code in DOWN:
            return outage(code)
        if code in ("-2018", "-2019"):
            return rejected("recipient", code, "invalid_number", subscription_status=-50)
        if code == "-6001":
            return rejected("recipient", code, "unsubscribed", subscription_status=-2, suppress_reason="unsubscribed")
        if code == REPEATED:
            return unknown(code)
        return rejected("message", code, "rejected")

    async def _query(self, message_id: UUID, since: datetime, until: datetime) -> Answer | None:
        """A long one is listed apart from a short one, and which it was is not known here."""
        verdicts = []
        for kind in ("sms", "mms"):
            body = await self.look_up(f"{self.url}/{kind}", message_id, since, until)
            if body is None:
                return None
            verdicts.append(_judged(body.get("body"), "data", message_id, _sms_item))
        found = [verdict for verdict in verdicts if verdict and verdict.code != "not_found"]
        return found[0] if found else verdicts[0] and verdicts[1]


def alimtalk(message: Outgoing) -> dict[str, Any]:
    return {
        "senderKey": settings.NHN_KAKAO_SENDER_KEY,
        "templateCode": message.template_code,
        "recipientList": [
            {
                "recipientNo": domestic(message.token),
                "templateParameter": {key: str(value) for key, value in message.template_parameters.items()},
                # Left out, the console's setting would text the person beside our own failover.
                "resendParameter": {"isResend": False},
                "recipientGroupingKey": str(message.message_id),
            }
        ],
    }


def text_message(message: Outgoing) -> dict[str, Any]:
    number = {"recipientNo": domestic(message.token), "countryCode": "82"}
    if not message.token.startswith("+82"):
        number = {"internationalRecipientNo": message.token.lstrip("+")}
    fields = {
        "body": message.body,
        "sendNo": re.sub(r"\D", "", domestic(message.from_ or settings.NHN_SMS_FROM)),
        "recipientList": [{**number, "recipientGroupingKey": str(message.message_id)}],
    }
    if is_long(message.body):
        fields["title"] = subject(message.title or message.body.strip().split("\n")[0])
    return fields


def header_code(body: dict[str, Any]) -> str | None:
    header = body.get("header")
    if not isinstance(header, dict) or not isinstance(header.get("resultCode"), int | str):
        return None
    code = str(header["resultCode"])
    return "http_200" if code == "0" and header.get("isSuccessful") is False else code


def _first_result(part: Any, key: str) -> tuple[str, str] | None:
    """The only recipient's result code, and the request's id: with one recipient each, a request is a message."""
    if not isinstance(part, dict) or not isinstance(part.get("requestId"), str):
        return None
    results = part.get(key)
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
        return None
    result = results[0]
    if not isinstance(result.get("resultCode"), int | str):
        return None
    return str(result["resultCode"]), part["requestId"]


def _judged(part: Any, key: str, message_id: UUID, judge: Callable[[dict[str, Any]], Answer]) -> Answer | None:
    items = part.get(key) if isinstance(part, dict) else None
    if not isinstance(items, list):
        return None
    # Asked for by our key: an item that does not repeat it counts as ours, rather than sending twice.
    ours = [i for i in items if isinstance(i, dict) and (i.get("recipientGroupingKey") or "") in ("", str(message_id))]
    return judge(ours[0]) if ours else network("not_found")


def _kakao_item(item: dict[str, Any]) -> Answer:
    own = str(item.get("requestId") or "")
    code = str(item.get("resultCode") or "")
    if item.get("messageStatus") in ("FAILED", "CANCEL") or code in UNREACHABLE:
        return final(kakao_result(code)) if code not in ("", "1000") else rejected("message", "failed", "undelivered")
    return accepted(own, code or str(item.get("messageStatus") or ""))


def _sms_item(item: dict[str, Any]) -> Answer:
    own = str(item.get("requestId") or "")
    code = str(item.get("resultCode") or "")
    if str(item.get("msgStatus")) in ("0", "4"):
        return sms_result(code)
    return accepted(own, code or str(item.get("msgStatus") or ""))


def sms_result(code: str) -> Answer:
    """A carrier's result for a text message that failed."""
    if code in NO_SUCH_NUMBER:
        return rejected("recipient", code, "unknown_number", subscription_status=-52)
    return rejected("message", code or "failed", "undelivered")
