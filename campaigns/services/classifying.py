"""What kind of reply it is, from what machines write into headers and subjects; never from what a body mentions."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from campaigns.services.absence import own_words

ABSENT = re.compile(
    r"out of (?:the )?office|\booo\b|auto(?:matic|mated)?[\s-]?(?:reply|response)|autoreply"
    r"|away from (?:the |my )?(?:office|desk)|\b(?:i['’]?m|i am|currently) away|\baway (?:until|till)"
    r"|on (?:vacation|(?:[a-z]+ )?leave|holiday)|annual leave|absen(?:t|ce)"
    r"|(?:vacation|holiday) (?:reply|respon\w+|notice|message)"
    r"|부재|자동\s?(?:응답|회신|답장|답변)|휴가(?![철지])|연차|휴무|(?:출장|외근)\s?중",
    re.IGNORECASE,
)
UNDELIVERED = re.compile(
    r"undeliver(?:ed|able)|delivery status notification|mail delivery (?:failed|subsystem)|failure notice"
    r"|returned mail|delivery (?:has )?failed|반송|전송\s?실패",
    re.IGNORECASE,
)
DAEMON = re.compile(r"(?:mailer-daemon|postmaster)@", re.IGNORECASE)
# What only a mail system writes, when the headers did not come along.
RETURNED = re.compile(
    r"^\s*(?:undelivered mail returned to sender|delivery status notification \(failure\)|undeliverable:|returned mail:"
    r"|failure notice\s*$|mail delivery failed: returning message)",
    re.IGNORECASE,
)
RECIPIENT = re.compile(r"^[ \t]*final-recipient:", re.IGNORECASE | re.MULTILINE)
FAILED = re.compile(r"^[ \t]*action:[ \t]*failed", re.IGNORECASE | re.MULTILINE)
NOT_FINAL = re.compile(r"^[ \t]*action:[ \t]*(?:delayed|relayed|delivered|expanded)", re.IGNORECASE | re.MULTILINE)
# The whole message, and nothing else: who says more is a person with something to say.
WISHES_TO_LEAVE = re.compile(
    r"\W*(?:(?:please\W+)?(?:(?:unsubscribe|remove)(?:\W+me)?|take\W+me\W+off)"
    r"(?:\W+(?:from|off)?\W*(?:this|the|your)\W+(?:mailing\W+)?list)?(?:\W+please)?|opt[\s-]?out"
    r"|(?:수신\s?거부|구독\s?취소)(?:\s?(?:합니다|해\s?주세요|부탁드립니다|요청(?:합니다|드립니다)?))?"
    r"|(?:메일\s?)?(?:그만|더\s?이상)\s?보내지?\s?(?:마세요|말아\s?주세요|주세요))\W*",
    re.IGNORECASE,
)


# What a phone or a mail program puts below what its owner wrote.
SIGNATURE = re.compile(r"^(?:-- ?$|sent from (?:my|outlook)\b|나의 \S+에서 보냄)", re.IGNORECASE | re.MULTILINE)


def classify(
    subject: str, text: str, headers: Mapping[str, Any], ours: Iterable[str] = ()
) -> tuple[str, dict[str, Any]]:
    """(kind, evidence). `ours` are the subjects we wrote: an answer repeats them, and they are not its own words."""
    found = {str(name).lower(): _first(value) for name, value in headers.items()}
    for title in ours:
        subject = re.sub(re.escape(title), "", subject, flags=re.IGNORECASE) if title else subject
    if reason := _bounce(subject, text, found):
        # The carrier still tries, or tells of success: no failure, but no person's word either.
        return ("ooo" if NOT_FINAL.search(text) else "bounce"), reason
    if reason := _automatic(subject, found):
        return "ooo", reason
    said = SIGNATURE.split(own_words(text), maxsplit=1)[0].strip()
    if WISHES_TO_LEAVE.fullmatch(said or subject):
        return "unsubscribe", {"rule": "asks_to_be_left_alone"}
    return "human", {"rule": "no_sign_of_a_machine"}


def _first(value: Any) -> str:
    """A header that came more than once may be told as a list."""
    return str(value[0]) if isinstance(value, list) and value else str(value)


def _bounce(subject: str, text: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """The sign of a carrier's report, be it of a failure or of a delay."""
    content_type = headers.get("content-type", "")
    if "multipart/report" in content_type.lower() and "delivery-status" in content_type.lower():
        return {"rule": "delivery_status_notification", "header": "Content-Type"}
    if "x-failed-recipients" in headers:
        return {"rule": "delivery_status_notification", "header": "X-Failed-Recipients"}
    if DAEMON.search(headers.get("from", "")) and (UNDELIVERED.search(subject) or headers.get("return-path") == "<>"):
        return {"rule": "delivery_status_notification", "header": "From"}
    if RETURNED.match(subject):
        return {"rule": "delivery_status_notification", "subject": subject[:100]}
    if RECIPIENT.search(text) and (FAILED.search(text) or NOT_FINAL.search(text)):
        return {"rule": "delivery_status_notification", "part": "report"}
    return None


def _automatic(subject: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """The sign of a program: an absence told, or a message seen."""
    if "multipart/report" in headers.get("content-type", "").lower():
        return {"rule": "automatic", "header": "Content-Type"}
    submitted = headers.get("auto-submitted", "").strip().lower()
    if submitted and not submitted.startswith("no"):
        return {"rule": "automatic", "header": "Auto-Submitted", "value": submitted[:100]}
    for name in ("x-autoreply", "x-autorespond", "x-autoresponder"):
        if headers.get(name, "no").strip().lower() not in ("no", "false", "0", ""):
            return {"rule": "automatic", "header": name}
    if headers.get("precedence", "").strip().lower() == "auto_reply":
        return {"rule": "automatic", "header": "Precedence"}
    if found := ABSENT.search(subject):
        return {"rule": "absence_in_subject", "value": found.group()[:100]}
    return None
