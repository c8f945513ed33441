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
NEAR = {"오늘": 0, "금일": 0, "today": 0, "내일": 1, "명일": 1, "익일": 1, "tomorrow": 1, "모레": 2}

MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)(?![a-z])\.?"
)
WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?\b"
DAY_NUMBER = r"(?P<d{n}>\d{{1,2}})(?:st|nd|rd|th)?"
YEAR = r"(?:(?:,?\s*|-)(?P<y{n}>20\d\d)|-(?P<z{n}>\d\d))?"
# The last of several days of one month: 20-25, 20일(목)~25일, the 19th and 20th.
LAST = r"(?:(?:\s*\([^)]{{1,4}}\))?\s*(?:{joint})\s*(?P<e{n}>\d{{1,2}})(?:st|nd|rd|th)?(?![\d:]){unit}){{0,9}}"
KOREAN_LAST = {"joint": r"[~,·-]|과|와|및", "unit": r"\s*일(?!간)"}
KOREAN_AWAY = r"(?:휴가|부재|연차|반차|월차|병가|휴무|휴직|출장|외근)"

# The order matters: the first pattern that fits a place in the text wins.
CERTAIN = [
    r"(?P<y1>20\d\d)\s*[-./년]\s*(?P<m1>\d{1,2})\s*[-./월]\s*(?P<d1>\d{1,2})(?:\s*일|\.(?!\d))?"
    + LAST.format(n=1, **KOREAN_LAST)
    + r"(?!\d)",
    r"(?P<m2>\d{1,2})\s*월\s*(?P<d2>\d{1,2})\s*일?" + LAST.format(n=2, **KOREAN_LAST) + r"(?!\d)",
    rf"(?<!\d){DAY_NUMBER.format(n=3)}(?:\s+of)?[\s-]*(?P<m3>{MONTH}){YEAR.format(n=3)}(?!\d)",
    rf"(?P<m4>{MONTH})[\s-]+{DAY_NUMBER.format(n=4)}"
    + LAST.format(n=4, joint=r"[~&-]|and|to|till?|until|through|thru", unit="")
    + rf"{YEAR.format(n=4)}(?!\d)",
    r"(?<![\d월])(?P<d6>\d{1,2})\s*일(?=\s*(?:\([^)]{1,4}\)\s*)?(?:까지|부터|에?\s*(?:복귀|출근|돌아)))",
    # 19~24일 휴가; alone 3~5일 is how long something takes.
    r"(?<![\d월/.:-])(?P<d7>\d{1,2})\s*일?(?:\s*\([^)]{1,4}\))?\s*[~-]\s*(?P<e7>\d{1,2})\s*일"
    rf"(?=\s*(?:\([^)]{{1,4}}\)\s*)?{KOREAN_AWAY})",
]
VAGUE = [
    # 26.11.25, 11/25/26 or 25/11/26: which of the three is the year tells whether it makes a date that lies ahead.
    r"(?<![\d./])(?P<q10>\d{1,2})(?P<sep10>[/.])\s?(?P<r10>\d{1,2})(?P=sep10)\s?(?P<s10>\d{1,2})(?!\d|[./]\d)",
    # Not out of a longer number with dashes, such as a phone's; a range like 11/20-11/25 is two dates.
    r"(?:(?<![\d./-])|(?<=[/.]\d-)|(?<=[/.]\d\d-)|(?<=[/.]\d{4}-))(?P<a5>\d{1,2})(?P<sep5>[/.])(?P<b5>\d{1,2})"
    r"(?:(?P=sep5)(?P<y5>20\d\d)|(?:(?:\s*\([^)]{1,4}\))?\s*~|(?<=/\d)-|(?<=/\d\d)-)\s*(?P<e5>\d{1,2})(?![\d./월시:-]))?"
    r"(?![\d/]|\.\d|-\d(?!\d?[/.]\d))",
    # The second half of 2026-11-20 ~ 11-25, or a Korean deadline: elsewhere 9-12 are hours.
    r"(?:(?<=~)|(?<=[~-] )|(?<![\d./-])(?=\d{1,2}-\d{1,2}\s*(?:\([^)]{1,9}\)\s*)?(?:까지|부터|에?\s*복귀|~)))"
    r"(?P<m11>\d{1,2})-(?P<d11>\d{1,2})(?![\d-])",
    r"(?<![\d-])(?P<a14>\d{1,2})-(?P<b14>\d{1,2})-(?P<y14>20\d\d)(?!\d)",
    r"(?<!\d)(?P<y13>20\d\d)(?P<m13>0[1-9]|1[0-2])(?P<d13>[0-3]\d)(?!\d)",
    r"(?P<next7>다음\s*주\s*|[차내]주\s*|next\s+)?(?:(?:this|coming)\s+)?(?:(?P<k7>[월화수목금토일])요일|\b(?P<w7>"
    + WEEKDAY
    + r")(?:,?\s+(?:the\s+)?(?P<d15>\d{1,2})(?:st|nd|rd|th)?(?![\d:/]|\.\d|\s*[ap]\.?m\b"
    + rf"|\s*(?:of\s+)?{MONTH}))?)",
    r"(?P<near>오늘|금일|내일|명일|익일|모레|\btoday\b|\btomorrow\b)",
    r"\b(?P<d9>\d{1,2})(?:st|nd|rd|th)\b",
]
MENTION = re.compile(f"{'|'.join(CERTAIN)}|(?P<vague>{'|'.join(VAGUE)})", re.IGNORECASE)

# What may stand between a date and the word that tells its role: the weekday, and the time of day.
DAY_NAME = rf"(?:\s*\([^)]{{1,9}}\)|,?\s*[월화수목금토일]요일|,?\s+{WEEKDAY})?"
CLOCK = r"(?:\s*(?:오전|오후|아침|저녁|자정|정오)?(?:\s*\d{1,2}(?:시(?:\s*\d{1,2}분|\s*반)?|:\d\d))?)"
NOT = r"(?<!\bnot )(?<!\bnot be )(?<!n't be )(?<!n't )(?<!\bnot currently )"
NAMED = rf"(?:\s+the)?(?:\s+{WEEKDAY},?)?\s*$"

# Not back until the 25th is back on the 25th; and what follows a label is no range.
BACK_AT = re.compile(
    r"(?:(?:\bnot|n't)\s+(?:be\s+)?(?:back|return\w*|resum\w*)\b[^.!?]{0,40}\b(?:until|till?)\b|\bbefore\b"
    rf"|(?:\breturn(?:ing)?\b|\bback\b|복귀|출근)[^.!?\d~]{{0,20}}[-:]){NAMED}",
    re.IGNORECASE,
)
BACK_BEFORE = re.compile(
    r"(?:\bback\b|\breturn(?:s|ing)?\b|\bresum(?:e|es|ing)\b|\bre-?open(?:s|ing)?\b|\bagain\b"
    rf"|{NOT}(?:\bavailable\b|\breachable\b|\bin the office\b)"
    r"|복귀(?:일|\s*예정일?)?|출근\s*(?:예정\s*)?일|돌아오는\s*날)[^.!?]{0,40}$",
    re.IGNORECASE,
)
BACK_AFTER = re.compile(
    rf"^{DAY_NAME}{CLOCK}\s*(?:날\s*)?(?:에야?|부터|부로|자로|이후(?:에|로|부터)?|경에?|쯤에?|이\s*되어야)?\s*"
    r"(?:(?:다시|정상(?:적으로)?|업무[에를]?|(?:사무실|회사|자리)[에로]?|순차적으로|바로|이?메일(?:을)?|확인\s*후)\s*)*"
    r"(?:복귀|복직|출근|돌아|근무|재개|가능"
    r"|(?:연락|확인|회신|답변|답장|응답|통화)[은는을를이]?\s*(?:가능|드리(?!기\s*(?:어렵|힘))|드릴|부탁|바랍|주시))",
)
# "On 25 November I will be back"; but not "until 25 November, I will be back later".
THEN_BACK = re.compile(
    rf"^{DAY_NAME},?\s+(?:i|we)(?:'ll|'m|\s+will|\s+am|\s+shall)?\s+(?:be\s+)?"
    r"(?:back|return|resum|in the office|available|reachable)",
    re.IGNORECASE,
)
UNTIL_BEFORE = re.compile(
    r"(?:\b(?:until|till?|thru|through|to|and including|up to|ending|ends?(?: on)?)\b:?|[~-]|\b까지"
    r"|\b(?:between|b/w)\b[^.!?]{1,40}\band)"
    r"\s*'?(?:the\s+)?(?:and including\s+)?(?:the\s+)?"
    r"(?:(?:end of(?: (?:the )?(?:day|business))?|close of business|eod|cob)(?: on)?,?\s+)?"
    rf"(?:(?:(?:this|next|coming)\s+)?{WEEKDAY},?\s+)?$",
    re.IGNORECASE,
)
UNTIL_AFTER = re.compile(rf"^{DAY_NAME}{CLOCK}\s*까지")
START_AFTER = re.compile(
    rf"^{DAY_NAME}{CLOCK}\s*(?:부터|에서)|^{DAY_NAME}{CLOCK}\s*[~-]\s*(?:'?\d|{MONTH}|{WEEKDAY})", re.IGNORECASE
)
START_BEFORE = re.compile(
    rf"\b(?:from|starting|since|as of|beginning|between|b/w)(?::\s*|\s+)(?:the\s+)?(?:{WEEKDAY},?\s+)?$",
    re.IGNORECASE,
)
KOREAN = re.compile("[가-힣]")
ABSENCE = re.compile(rf"{KOREAN_AWAY}|\b(?:out|away|leave|vacation|holidays?|off|absen\w+)\b", re.IGNORECASE)
# Nothing but days between the word of absence and this one: out of office today and tomorrow, 오늘 하루 연차.
AWAY_BEFORE = re.compile(
    r"(?:\bout(?: of (?:the )?office)?|\booo|\baway|\boff|\babsent|\bon (?:\w+ )?(?:leave|vacation|holidays?|pto)"
    rf"|{KOREAN_AWAY}(?:\s*(?:기간|일정|일자|일))?)\b"
    rf"(?:[\s,&:/\d]|\b(?:work|sick|on|for|all|day|and|the|today|{WEEKDAY})\b)*$",
    re.IGNORECASE,
)
AWAY_AFTER = re.compile(rf"^{DAY_NAME}(?:\s|,|하루|종일|오전|오후|[은는]|에는?)*(?:개인\s*)?{KOREAN_AWAY}")
UNFINISHED = re.compile(r"[a-z:,]\Z", re.IGNORECASE)
# Signs of the same meaning, one for one, so that places in the text stay what they are.
PLAIN = str.maketrans({"∼": "~", "〜": "~", "～": "~", "–": "-", "—": "-", "−": "-", "’": "'", "‘": "'", "\xa0": " "})

QUOTE_BEGINS = re.compile(
    r"^\s*(?:-{2,}\s*(?:original message|원본 메[시세]지|forwarded message).*|on .{5,200} wrote:"
    r"|.{0,100}님이 (?:작성|쓴 글).*|20\d\d[.년].{5,150}작성\s*:|(?:from|보낸\s?사람)\s*:(?:[^\d]*|.*@.*))$",
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

    @property
    def is_weekday(self) -> bool:
        """And nothing more: Monday the 24th is a date."""
        return bool(self.part("k") or self.part("w")) and not self.part("d")


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
    mentions = list(_mentions(words.translate(PLAIN)))
    today = received_at.astimezone(zone).date()

    def latest(role: str, since: date = today, *, weekday: bool = False) -> tuple[date, datetime, Mention] | None:
        found = (
            (*resolved, mention)
            for mention in mentions
            if mention.role == role and mention.is_weekday <= weekday
            if (resolved := _resolve(mention, role, received_at, zone, words, since)) is not None
        )
        return max(found, key=lambda told: told[0], default=None)

    until = latest("until", weekday=True) or latest("bare", weekday=True)
    # Away until the 28th and back on Monday is the Monday after the 28th.
    back = latest("back") or latest("back", until[0] if until else today, weekday=True)
    if (told := back or until) is None:
        return Absence(received_at + DEFAULT, "default")
    return Absence(told[1], "back" if back else "until", _sentence(words, told[2].found))


def _mentions(words: str) -> Iterator[Mention]:
    for found in MENTION.finditer(words):
        before, after = _beside(words, found)
        role = _role(before, after)
        # 11/25, the 25th, a weekday or "tomorrow" may be anything: a date of return only beside a word of absence.
        if not found["vague"] or role != "bare" or _away(found, before, after):
            yield Mention(found, role)


def _away(found: re.Match[str], before: str, after: str) -> bool:
    if found["e5"] and ABSENCE.search(before + after):
        return True
    return bool(AWAY_BEFORE.search(before) or AWAY_AFTER.match(after))


def _beside(words: str, found: re.Match[str]) -> tuple[str, str]:
    """What stands before and after it in its line; a date that begins one may end what the line before it says."""
    start = words.rfind("\n", 0, found.start()) + 1
    if start and not words[start : found.start()].strip():
        above = words.rfind("\n", 0, start - 1) + 1
        start = above if UNFINISHED.search(words[above:start].rstrip()) else start
    before = words[max(start, found.start() - BESIDE) : found.start()].replace("\n", " ")
    return before, words[found.end() : found.end() + 40].split("\n")[0]


def _role(before: str, after: str) -> str:
    before = re.split(r"[.!?]\s", before)[-1]
    if BACK_AFTER.match(after):
        return "back"
    if START_AFTER.match(after):
        return "start"
    if BACK_AT.search(before):
        return "back"
    if UNTIL_AFTER.match(after) or UNTIL_BEFORE.search(before):
        return "until"
    if BACK_BEFORE.search(before) or THEN_BACK.match(after):
        return "back"
    return "start" if START_BEFORE.search(before) else "bare"


def _resolve(
    mention: Mention, role: str, received_at: datetime, zone: ZoneInfo, words: str, since: date
) -> tuple[date, datetime] | None:
    """The first candidate at most 180 days away whose moment of return lies ahead, and that moment."""
    today = received_at.astimezone(zone).date()
    for day in _candidates(mention, since if mention.is_weekday else today, words):
        moment = datetime.combine(day if role == "back" else next_working_day(day), OFFICE_OPENS, zone)
        if moment > received_at and day <= today + LONGEST:
            return day, moment
    return None


def next_working_day(day: date) -> date:
    day += DAY
    while day.isoweekday() > 5:
        day += DAY
    return day


def _candidates(mention: Mention, today: date, words: str) -> Iterator[date]:
    if near := mention.found["near"]:
        yield today + NEAR[near.lower()] * DAY
    elif mention.is_weekday:
        yield from _weekdays(mention, today)
    elif mention.part("q"):
        yield from _short_years(mention, words)
    elif mention.part("m") is None and mention.part("a") is None:
        yield from _days_of_month(int(mention.part("e") or mention.part("d") or 0), today)
    else:
        month, day = _month_and_day(mention, words)
        year = mention.part("y") or (short := mention.part("z")) and f"20{short}"
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


def _short_years(mention: Mention, words: str) -> Iterator[date]:
    one, two, three = (int(mention.part(name) or 0) for name in "qrs")
    year_first, month_first, day_first = (one, two, three), (three, one, two), (three, two, one)
    english = [month_first, day_first] if mention.part("sep") == "/" else [day_first, month_first]
    for year, month, day in [year_first, *english] if KOREAN.search(words) else [*english, year_first]:
        yield from _valid(2000 + year, month, day)


def _month_and_day(mention: Mention, words: str) -> tuple[int, int]:
    # Of "November 20-25" the end.
    last = int(mention.part("e") or 0)
    if (first := mention.part("a")) is not None:
        one, two = int(first), int(mention.part("b") or 0)
        if not last and (one > 12 or (mention.part("sep") == "." and not KOREAN.search(words) and two <= 12)):
            return two, one
        return one, max(last, two)
    month = str(mention.part("m"))
    number = int(month) if month.isdigit() else MONTHS.index(month[:3].lower()) + 1
    return number, max(last, int(mention.part("d") or 0))


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
