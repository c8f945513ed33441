"""From a page's HTML to the plain words of a notice."""

import re
from dataclasses import dataclass
from html import unescape

from reminders.models import SNAPSHOT_LENGTH

# A quoted value may hold a `>`. Possessive, so a tag without an end is read once and not once per character.
TAG = re.compile(r"""</?([a-zA-Z][^\s/>]*)(?:[^>=]|=\s*(?:"[^"]*"|'[^']*')?)*+>""")
OPENS_TAG = re.compile(r"</?[a-zA-Z]")
SILENT = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
# Python reads no number of so many digits, and there is no such character.
ENDLESS = re.compile(r"&#[0-9]{1000,};?")
# More than an entity or the first characters of a tag, cut off at the end of a text's beginning, can spoil.
FRAYED = 50


@dataclass(frozen=True)
class Words:
    title: str
    body: str

    def __bool__(self) -> bool:
        return bool(self.title or self.body)


def words_of(title: str, body: str) -> Words:
    return Words(plain_title(title), plain_body(body))


def plain_title(html: str) -> str:
    return " ".join(decoded(without_tags(html)).split())[:SNAPSHOT_LENGTH]


def plain_body(html: str) -> str:
    return decoded(without_tags(html)).strip()[:SNAPSHOT_LENGTH]


def plain_start(beginning: str) -> str | None:
    """The words of a body of which only the beginning is known; None when that is too little to be sure of them."""
    text = decoded(without_tags(beginning, cut=True)).strip()
    return text[:SNAPSHOT_LENGTH] if len(text) >= SNAPSHOT_LENGTH + FRAYED else None


def decoded(text: str) -> str:
    return unescape(ENDLESS.sub("\N{REPLACEMENT CHARACTER}", text))


def without_tags(html: str, cut: bool = False) -> str:
    """Tags, comments and what script and style hold are gone; a `<` that opens nothing stays.

    What has no end is kept as text, unless the end may merely have been `cut` off.
    """
    kept, at = [], 0
    while (start := html.find("<", at)) >= 0:
        kept.append(html[at:start])
        end = end_of_markup(html, start)
        if end is None:
            return "".join(kept) if cut else "".join(kept) + html[start:]
        if end == start:
            kept.append("<")
        at = max(end, start + 1)
    return "".join(kept) + html[at:] if kept else html


def end_of_markup(html: str, start: int) -> int | None:
    """Where the markup that begins at `start` ends; `start` itself when none begins there, None when none ends."""
    if html.startswith("<!--", start):
        end = html.find("-->", start + 2)
        return len(html) if end < 0 else end + 3
    if html.startswith(("<!", "<?"), start):
        return html.find(">", start) + 1 or None
    if not OPENS_TAG.match(html, start):
        return start
    tag = TAG.match(html, start)
    if tag is None:
        return None
    silent = SILENT.get(tag[1].lower()) if html[start + 1] != "/" else None
    if silent is None:
        return tag.end()
    closing = silent.search(html, tag.end())
    return closing.start() if closing else len(html)
