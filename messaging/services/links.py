"""Signed links in e-mails: what the dispatcher puts in, and what a token means when it comes back."""

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from html import escape, unescape
from html.parser import HTMLParser
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings
from django.utils.crypto import salted_hmac
from django.utils.encoding import iri_to_uri

from messaging.models import TrackedLink
from messaging.providers.mime import readable

MAC_LENGTH = 16
# Django refuses to redirect to more than 2048 characters; such a link stays as it is.
LONGEST_URL = 2000
# A name, then perhaps "= value", as browsers read the attributes of a tag.
ATTRIBUTE = re.compile(r"""([^\s"'<>/=]+)(\s*=\s*)?(?(2)("[^"]*"|'[^']*'|[^\s"'=<>`][^\s>]*)?)""")
TAG_NAME = re.compile(r"<[A-Za-z][^\s/>]*")
WORTH_READING = re.compile(r"href|</body", re.IGNORECASE)
UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


class Sender(NamedTuple):
    """As much of an application as an e-mail needs."""

    id: UUID
    settings: dict[str, Any]


class Prepared(NamedTuple):
    html: str
    headers: dict[str, str]
    links: dict[UUID, str]


# --- tokens ------------------------------------------------------------------------------------------------------


def make_token(purpose: str, *ids: UUID) -> str:
    """The ids and a MAC over them, nothing else: no address, no URL, nothing to read or to forge."""
    value = b"".join(part.bytes for part in ids)
    return urlsafe_b64encode(value + _mac(purpose, value, settings.SECRET_KEY)).decode().rstrip("=")


def read_token(purpose: str, token: str, count: int) -> tuple[UUID, ...] | None:
    """The ids in it, or None for anything we did not make for this purpose."""
    try:
        raw = urlsafe_b64decode((token + "=" * (-len(token) % 4)).encode("ascii"))
    except ValueError:
        return None
    value, mac = raw[: 16 * count], raw[16 * count :]
    # Decoding forgives stray characters and spare bits; only the spelling we gave out counts.
    if len(raw) != 16 * count + MAC_LENGTH or urlsafe_b64encode(raw).decode().rstrip("=") != token:
        return None
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    if not any(hmac.compare_digest(mac, _mac(purpose, value, key)) for key in keys):
        return None
    return tuple(UUID(bytes=value[start : start + 16]) for start in range(0, len(value), 16))


def _mac(purpose: str, value: bytes, key: str) -> bytes:
    return salted_hmac(f"messaging.{purpose}", value, secret=key, algorithm="sha256").digest()[:MAC_LENGTH]


def open_url(message_id: UUID) -> str:
    return f"{settings.PUBLIC_URL}/t/o/{make_token('open', message_id)}.gif"


def click_url(message_id: UUID, link_id: UUID) -> str:
    return f"{settings.PUBLIC_URL}/t/c/{make_token('click', message_id, link_id)}"


def unsubscribe_url(subscription_id: UUID, message_id: UUID) -> str:
    return f"{settings.PUBLIC_URL}/u/{make_token('unsubscribe', subscription_id, message_id)}"


def link_id(application_id: UUID, url: str) -> UUID:
    """The same URL of the same application is one row, and its id is known without asking the database."""
    return UUID(bytes=sha256(application_id.bytes + url.encode("utf-8", "surrogatepass")).digest()[:16])


# --- e-mails -----------------------------------------------------------------------------------------------------


def prepare_email(message: Any, application: Any) -> Prepared:
    """The HTML as it goes out, the extra headers, and the links that must be stored before it does."""
    html: str = message.body or ""
    found: dict[UUID, str] = {}
    if tracks(application):
        html, found = rewrite(html, message.id, application.id)
    return Prepared(html, unsubscribe_headers(message), found)


def tracks(application: Any) -> bool:
    return (application.settings or {}).get("tracking", True) is not False


def unsubscribe_headers(message: Any) -> dict[str, str]:
    """RFC 8058. A receipt or a password mail has no list to leave."""
    if message.kind == "transactional" or message.subscription_id is None:
        return {}
    return {
        "List-Unsubscribe": f"<{unsubscribe_url(message.subscription_id, message.id)}>",
        "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
    }


def store_links(links: Mapping[UUID, tuple[UUID, str]]) -> None:
    """{id: (application, URL)}, before the mail goes out. A link that is there already is the same link."""
    if links:
        TrackedLink.objects.bulk_create(
            (TrackedLink(id=key, application_id=owner, url=url) for key, (owner, url) in sorted(links.items())),
            ignore_conflicts=True,
        )


def rewrite(html: str, message_id: UUID, application_id: UUID) -> tuple[str, dict[UUID, str]]:
    """Links lead over /t/c/, the pixel stands before the end of the body; every other byte stays."""
    links, end = _find(html)
    found = {link_id(application_id, url): url for _start, _stop, url in links}
    edits = [(end, end, f'<img src="{open_url(message_id)}" width="1" height="1" alt="">')]
    for start, stop, url in links:
        edits.append((start, stop, f'"{escape(click_url(message_id, link_id(application_id, url)))}"'))
    return _edited(html, edits), found


def _find(html: str) -> tuple[list[tuple[int, int, str]], int]:
    if not WORTH_READING.search(html):
        return [], len(html)
    finder = _Finder()
    try:
        finder.feed(readable(html))
        finder.close()
    except AssertionError:
        pass  # the standard parser's word for a declaration it does not know; what stands before it was found
    return finder.links, len(html) if finder.body_end is None else finder.body_end


def _edited(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    parts, done = [], 0
    for start, end, new in sorted(edits):
        parts += [text[done:start], new]
        done = end
    return "".join([*parts, text[done:]])


class _Finder(HTMLParser):
    """Where the links' values stand, and where the body ends. Comments and scripts are not looked into."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[tuple[int, int, str]] = []
        self.body_end: int | None = None
        self.starts = [0]

    def feed(self, data: str) -> None:
        # getpos() counts lines by "\n" alone.
        self.starts = [0, *(match.end() for match in re.finditer("\n", data))]
        super().feed(data)

    def place(self) -> int:
        line, column = self.getpos()
        return self.starts[line - 1] + column

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("a", "area") and (text := self.get_starttag_text()):
            self.links += _trackable(self.place(), text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "body":
            self.body_end = self.place()


def _trackable(offset: int, tag: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, url) of the tag's first href, when it leads out over http."""
    name = TAG_NAME.match(tag)
    for match in ATTRIBUTE.finditer(tag, name.end() if name else 0):
        if match[1].lower() == "href":
            url = unescape((match[3] or "").strip("\"'")).strip()
            if match[3] and leads_out(url):
                yield offset + match.start(3), offset + match.end(3), url
            return


def leads_out(url: str) -> bool:
    """http or https with a host, fit for a Location header, and not one of our own links."""
    try:
        parts = urlsplit(url)
        fits = len(iri_to_uri(url) or "") <= LONGEST_URL and not UNSAFE.search(url)
        known = parts.scheme.lower() in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018  raises ValueError for a port that is none
    except ValueError:
        return False
    own = url.startswith((f"{settings.PUBLIC_URL}/t/", f"{settings.PUBLIC_URL}/u/"))
    return known and fits and not own
