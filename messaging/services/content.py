"""What may be sent over a channel. The same rules for the API, campaigns and reminders."""

import json
import re
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.utils.translation import gettext as _

from messaging.models import Channel
from messaging.providers.korea import euc_kr_length

PUSH_BYTES, LMS_BYTES = 4096, 2000
LAYOUTS = ("banner", "popup", "fullscreen")
E164 = re.compile(r"\+[1-9][0-9]{6,14}")
PUSH_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
LABEL, OPT_OUT = "(광고)", "무료수신거부"
NUMBER_CHANNELS = (Channel.SMS, Channel.KAKAO_TALK)


@dataclass(frozen=True)
class Problem:
    attr: str
    code: str
    detail: str


def push_bytes(title: str, body: str, data: dict[str, Any]) -> int:
    text = json.dumps({"title": title, "body": body, "data": data}, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode())


def problems(
    channel: str, kind: str, title: str, body: str, data: dict[str, Any], template_code: str = ""
) -> list[Problem]:
    return [*_CHECKS[channel](title, body, data), *_kakao(kind, template_code, channel)]


def _required(attr: str, detail: str) -> Problem:
    return Problem(attr, "required", detail)


def _push(title: str, body: str, data: dict[str, Any]) -> list[Problem]:
    if not (title.strip() or body.strip()):
        return [_required("body", _("A push message needs a title or a body."))]
    size = push_bytes(title, body, data)
    if size > PUSH_BYTES:
        detail = _("The payload has %(size)s bytes, at most %(most)s are allowed.") % {"size": size, "most": PUSH_BYTES}
        return [Problem("body", "message_too_large", detail)]
    return []


def _email(title: str, body: str, _data: dict[str, Any]) -> list[Problem]:
    found = []
    if not title.strip():
        found.append(_required("title", _("An e-mail needs a subject.")))
    if "\r" in title or "\n" in title:
        found.append(Problem("title", "invalid", _("A subject has one line.")))
    if not body.strip():
        found.append(_required("body", _("An e-mail needs a body.")))
    return found


def _sms(_title: str, body: str, _data: dict[str, Any]) -> list[Problem]:
    if not body.strip():
        return [_required("body", _("A text message needs a body."))]
    size = euc_kr_length(body)
    if size > LMS_BYTES:
        detail = _("The text has %(size)s bytes, at most %(most)s are allowed.") % {"size": size, "most": LMS_BYTES}
        return [Problem("body", "message_too_large", detail)]
    return []


def _in_app(title: str, body: str, data: dict[str, Any]) -> list[Problem]:
    found = []
    if not (title.strip() or body.strip()):
        found.append(_required("body", _("An in-app message needs a title or a body.")))
    if data.get("layout_type") not in LAYOUTS:
        detail = _("layout_type is one of %(layouts)s.") % {"layouts": ", ".join(LAYOUTS)}
        found.append(Problem("data", "invalid_layout", detail))
    return found


def _kakao(kind: str, template_code: str, channel: str) -> list[Problem]:
    if channel != Channel.KAKAO_TALK:
        return []
    if kind == "marketing":
        return [Problem("kind", "invalid", _("KakaoTalk carries no marketing."))]
    if not template_code:
        return [_required("template_id", _("KakaoTalk needs an approved template with a provider code."))]
    return []


_CHECKS = {
    "push": _push,
    "email": _email,
    "sms": _sms,
    "kakao_talk": lambda _title, _body, _data: [],
    "in_app": _in_app,
}


def address_problem(channel: str, address: str) -> str | None:
    """Why the address cannot be one of this channel."""
    if channel == Channel.EMAIL:
        try:
            validate_email(address.strip())
        except ValidationError:
            return _("Enter a valid e-mail address.")
    elif channel in NUMBER_CHANNELS:
        if not E164.fullmatch(address.strip()):
            return _("Enter a number in E.164 form, such as +821012345678.")
    elif channel == Channel.IN_APP:
        # The app's own name for whoever reads the inbox, often its user's id in any script.
        if not 1 <= len(address.strip()) <= 4096:
            return _("Expected 1 to 4096 characters.")
    elif not PUSH_TOKEN.fullmatch(address.strip()):
        return _("Expected 1 to 4096 visible ASCII characters.")
    return None


def labelled(body: str, opt_out_number: str) -> str:
    """An advertisement to a Korean number says so first and ends with the way out. No text stays no text."""
    if not body.strip():
        return body
    if not body.startswith(LABEL):
        body = f"{LABEL}{body}"
    if opt_out_number and not body.endswith(opt_out_number):
        body = f"{body}\n{OPT_OUT} {opt_out_number}"
    return body
