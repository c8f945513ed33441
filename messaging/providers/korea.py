"""What Korean gateways have in common: EUC-KR lengths, clocks and the results of KakaoTalk."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from messaging.providers.answers import Answer, accepted, config, outage, rate_limited, rejected, unknown

SEOUL = ZoneInfo("Asia/Seoul")
SMS_BYTES = 90


def euc_kr_length(text: str) -> int:
    """Bytes on the air; a character that EUC-KR lacks counts two.

    Python composes syllables beyond its 2,350 of eight bytes, which no gateway does."""
    return sum(1 if len(c.encode("euc-kr", "ignore")) == 1 else 2 for c in text)


def is_long(text: str) -> bool:
    return euc_kr_length(text) > SMS_BYTES


def subject(text: str) -> str:
    """The title of a long message holds 40 bytes."""
    kept, left = "", 40
    for character in text:
        left -= euc_kr_length(character)
        if left < 0:
            break
        kept += character
    return kept


def local_time(at: datetime) -> str:
    return at.astimezone(SEOUL).strftime("%Y-%m-%d %H:%M:%S")


def parse_local(text: Any) -> datetime | None:
    """`2018-08-10 10:06:30.0` in Seoul, or an ISO time with its own offset."""
    try:
        at = datetime.fromisoformat(str(text))
        return (at if at.tzinfo else at.replace(tzinfo=SEOUL)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


# The recipient cannot be reached on KakaoTalk, and how the subscription is marked.
UNREACHABLE = {
    "3018": ("not_reachable", None),
    "3019": ("not_kakao_user", -60),
    "3020": ("kakao_blocked", -61),
    "3021": ("old_kakao_app", None),
}
KAKAO_DOWN = {"2001", "3000", "3006", "3010", "3012", "9998", "9999"}


def kakao_result(code: str, provider_message_id: str = "") -> Answer:
    """The outcome of an Alimtalk by Kakao's result code."""
    if code in ("1000", "MRC01"):
        return accepted(provider_message_id, code)
    if code in UNREACHABLE:
        reason, status = UNREACHABLE[code]
        return replace(rejected("recipient", code, reason, subscription_status=status), failover=True)
    if code == "3005":
        # Handed over, arrival not confirmed within the time: it may still come.
        return accepted(provider_message_id, code)
    if code == "3008":
        return rejected("recipient", code, "invalid_number", subscription_status=-50)
    if code in KAKAO_DOWN:
        return outage(code)
    if code in ("4131", "4161"):
        return unknown(code)
    if code == "4156":
        return rate_limited(code)
    if code == "3001":
        return config(code, "sender")
    return rejected("message", code, "rejected")
