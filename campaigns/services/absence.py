"""When somebody who is away comes back, read from the text of an automatic reply in Korean or English."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

DAY = timedelta(days=1)
LONGEST = timedelta(days=180)
DEFAULT = timedelta(days=7)
OFFICE_OPENS = time(9)
# Who is away says so at the top and close to the date; looking further would let a long text keep us busy for minutes.
READ = 10_000
BESIDE = 120

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
KOREAN_WEEKDAYS = "월화수목금토일"

MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?\b"
DAY_NUMBER = r"(?P<d{n}>\d{{1,2}})(?:st|nd|rd|th)?"
YEAR = r"(?:,?\s*(?P<y{n}>20\d\d))?"

# The order matters: the first pattern that fits a place in the text wins.
PATTERNS = [
    r"(?P<y1>20\d\d)\s*[-./년]\s*(?P<m1>\d{1,2})\s*[-./월]\s*(?P<d1>\d{1,2})\s*일?(?!\d)",
    r"(?P<m2>\d{1,2})\s*월\s*(?P<d2>\d{1,2})\s*일?(?:\s*[~–-]\s*(?P<e2>\d{1,2})\s*일)?(?!\d)",
    rf"{DAY_NUMBER.format(n=3)}(?:\s+of)?[\s-]+(?P<m3>{MONTH}){YEAR.format(n=3)}(?!\d)",
    rf"(?P<m4>{MONTH})\s+{DAY_NUMBER.format(n=4)}(?:\s*(?:[~–-]|to|till?|until|through|thru)\s*(?P<e4>\d{{1,2}})(?:st|nd|rd|th)?\b)?{YEAR.format(n=4)}(?!\d)",
    r"(?<![\d./-])(?P<a5>\d{1,2})(?P<sep5>[/.])(?P<b5>\d{1,2})(?:(?P=sep5)(?P<y5>20\d\d))?(?![\d/]|[.-]\d)",
    r"(?<![\d월])(?P<d6>\d{1,2})\s*일(?=\s*(?:\([^)]{1,4}\)\s*)?(?:까지|부터|에?\s*(?:복귀|출근|돌아)))",
    r"(?P<next7>다음\s*주\s*|next\s+)?(?:(?P<k7>[월화수목금토일])요일|\b(?P<w7>" + WEEKDAY + "))",
    r"(?P<tomorrow>내일|\btomorrow\b)",
    r"\b(?P<d9>\d{1,2})(?:st|nd|rd|th)\b",
]
MENTION = re.compile("|".join(f"(?P<p{n}>{pattern})" for n, pattern in enumerate(PATTERNS, 1)), re.IGNORECASE)

BACK_BEFORE = re.compile(
    r"(?:\bback\b|\breturn(?:s|ing)?\b|\bresum(?:e|es|ing)\b|\bavailable\b|\breachable\b|\bin the office\b"
    r"|복귀(?:일|\s*예정일?)?|출근일)[^.!?\n]{0,40}$",
    re.IGNORECASE,
)
BACK_AFTER = re.compile(
    r"^\s*(?:\([^)]{1,9}\))?\s*(?:에|부터|자로|경|쯤)?\s*(?:다시|정상|업무에?|사무실[에로]?)*\s*(?:복귀|출근|돌아|근무)",
)
UNTIL_BEFORE = re.compile(
    r"(?:\b(?:until|till?|thru|through|to|and including|up to|ending|ends?(?: on)?)\b|[~–—-]|\b까지)"
    rf"\s*(?:the\s+)?(?:and including\s+)?(?:the\s+)?(?:(?:end of|close of business(?: on)?)\s+)?(?:{WEEKDAY},?\s+)?$",
    re.IGNORECASE,
)
UNTIL_AFTER = re.compile(r"^\s*(?:\([^)]{1,9}\))?\s*(?:\d{1,2}시)?\s*까지")
START_AFTER = re.compile(
    r"^\s*(?:\([^)]{1,9}\))?\s*(?:부터|에서)|^\s*(?:\([^)]{1,9}\))?\s*[~–—-]\s*(?:\d|[a-z])", re.IGNORECASE
)
START_BEFORE = re.compile(
    rf"\b(?:from|starting|since|as of|beginning)\s+(?:the\s+)?(?:{WEEKDAY},?\s+)?$", re.IGNORECASE
)

QUOTE_BEGINS = re.compile(
    r"^\s*(?:-{2,}\s*(?:original message|원본 메[시세]지|forwarded message).*|on .{5,200} wrote:"
    r"|.{0,100}님이 (?:작성|쓴 글).*|(?:from|보낸\s?사람)\s*:.*)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Absence:
    until: datetime
    rule: str  # given | back | until | default
    quote: str = ""


@dataclass(frozen=True)
class Mention:
    found: re.Match[str]
    role: str  # back | until | start | bare

    def part(self, name: str) -> str | None:
        return next(
            (value for key, value in self.found.groupdict().items() if key.rstrip("0123456789") == name and value), None
        )


def own_words(text: str) -> str:
    """The reply without what it quotes."""
    kept: list[str] = []
    for line in text.splitlines():
        if QUOTE_BEGINS.match(line):
            break
        if not line.lstrip().startswith(">"):
            kept.append(line)
    return "\n".join(kept)


def read_absence(text: str, received_at: datetime, zone: ZoneInfo) -> Absence:
    """The return in the lead's zone at 09:00; without a date that makes sense, a week after the reply."""
    words = own_words(text)[:READ]
    mentions = list(_mentions(words))
    for role in ("back", "until", "bare"):
        found = [
            (moment, mention)
            for mention in mentions
            if mention.role == role and (moment := _resolve(mention, role, received_at, zone, words)) is not None
        ]
        if found:
            moment, mention = max(found, key=lambda pair: pair[0])
            return Absence(moment, "until" if role == "bare" else role, _sentence(words, mention.found))
    return Absence(received_at + DEFAULT, "default")


def _mentions(words: str) -> Iterator[Mention]:
    for found in MENTION.finditer(words):
        role = _role(words, found)
        weak = found["p5"] or found["p7"] or found["p8"] or found["p9"]
        # 11/25, the 25th, a weekday or "tomorrow" may be anything: a date of return only beside a word of absence.
        if not (weak and role == "bare"):
            yield Mention(found, role)


def _role(words: str, found: re.Match[str]) -> str:
    line_start = max(words.rfind("\n", 0, found.start()), found.start() - BESIDE, 0)
    before = re.split(r"[.!?]\s", words[line_start : found.start()])[-1]
    after = words[found.end() : found.end() + 40].split("\n")[0]
    if START_AFTER.match(after) and not BACK_AFTER.match(after):
        return "start"
    if BACK_AFTER.match(after):
        return "back"
    if UNTIL_AFTER.match(after) or UNTIL_BEFORE.search(before):
        return "until"
    if START_BEFORE.search(before) and not BACK_BEFORE.search(before):
        return "start"
    return "back" if BACK_BEFORE.search(before) else "bare"


def _resolve(mention: Mention, role: str, received_at: datetime, zone: ZoneInfo, words: str) -> datetime | None:
    """The first candidate whose moment of return lies ahead, at most 180 days."""
    today = received_at.astimezone(zone).date()
    for day in _candidates(mention, today, words):
        moment = datetime.combine(day if role == "back" else next_working_day(day), OFFICE_OPENS, zone)
        if received_at < moment <= received_at + LONGEST:
            return moment
    return None


def next_working_day(day: date) -> date:
    day += DAY
    while day.isoweekday() > 5:
        day += DAY
    return day


def _candidates(mention: Mention, today: date, words: str) -> Iterator[date]:
    if mention.found["tomorrow"]:
        yield today + DAY
    elif mention.part("k") or mention.part("w"):
        yield from _weekdays(mention, today)
    elif mention.part("m") is None and mention.part("a") is None:
        yield from _days_of_month(int(mention.part("d") or 0), today)
    else:
        month, day = _month_and_day(mention, words)
        year = mention.part("y")
        for candidate in [int(year)] if year else [today.year, today.year + 1]:
            yield from _valid(candidate, month, day)


def _weekdays(mention: Mention, today: date) -> Iterator[date]:
    korean, english = mention.part("k"), mention.part("w")
    wanted = KOREAN_WEEKDAYS.index(korean) if korean else WEEKDAYS.index(str(english)[:3].lower())
    if mention.part("next"):
        yield today - today.weekday() * DAY + 7 * DAY + wanted * DAY
        return
    ahead = (wanted - today.weekday()) % 7
    yield from (today + ahead * DAY, today + (ahead + 7) * DAY)


def _days_of_month(day: int, today: date) -> Iterator[date]:
    following = today.replace(day=28) + 4 * DAY
    yield from _valid(today.year, today.month, day)
    yield from _valid(following.year, following.month, day)


def _month_and_day(mention: Mention, words: str) -> tuple[int, int]:
    if (first := mention.part("a")) is not None:
        one, two = int(first), int(mention.part("b") or 0)
        korean = re.search("[가-힣]", words) is not None
        day_first = one > 12 or (mention.part("sep") == "." and not korean and two <= 12)
        return (two, one) if day_first else (one, two)
    month = str(mention.part("m"))
    number = int(month) if month.isdigit() else MONTHS.index(month[:3].lower()) + 1
    # Of "November 20-25" the end.
    return number, int(mention.part("e") or mention.part("d") or 0)


def _valid(year: int, month: int, day: int) -> Iterator[date]:
    try:
        yield date(year, month, day)
    except ValueError:
        return


def _sentence(words: str, found: re.Match[str]) -> str:
    start = max(words.rfind("\n", 0, found.start()), words.rfind(". ", 0, found.start())) + 1
    end = min(
        (at for at in (words.find("\n", found.end()), words.find(". ", found.end())) if at > 0), default=len(words)
    )
    return words[start:end].strip()[:300]


def plain(absence: Absence) -> dict[str, Any]:
    return {"date_rule": absence.rule, **({"date_quote": absence.quote} if absence.quote else {})}
