"""An e-mail as bytes: the HTML body, a text part derived from it, and headers that nobody can break out of.

Written by hand because the standard library needs about a millisecond per message, and a thousand a second are wanted.
"""

import base64
import re
from email.header import Header
from email.utils import format_datetime, formataddr, parseaddr
from html.parser import HTMLParser

from django.conf import settings
from django.utils import timezone

from messaging.providers.answers import Outgoing

BLOCKS = {
    "address", "article", "blockquote", "br", "div", "dl", "dt", "dd", "fieldset", "footer", "form", "h1", "h2", "h3",
    "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "tr", "ul",
}  # fmt: skip
SILENT = {"head", "script", "style", "template", "title"}
HEADER_NAME = re.compile(r"[!-9;-~]+")
ENDLESS = re.compile(r"&#[0-9]{1000,}")


class BadHeader(ValueError):
    """A name or value that would end its line and begin another header."""


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.silent = 0
        self.link = ""
        self.link_at = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SILENT:
            self.silent += 1
        elif tag in BLOCKS:
            self.parts.append("\n")
        elif tag == "a":
            self.link, self.link_at = dict(attrs).get("href") or "", len(self.parts)

    def handle_endtag(self, tag: str) -> None:
        if tag in SILENT:
            self.silent = max(0, self.silent - 1)
        elif tag in BLOCKS:
            self.parts.append("\n")
        elif tag == "a" and self.link.startswith(("http://", "https://", "mailto:")):
            shown = "".join(self.parts[self.link_at :]).strip()
            if shown != self.link:
                self.parts.append(f" ({self.link})" if shown else self.link)
            self.link = ""

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.parts.append(re.sub(r"\s+", " ", data))


def readable(html: str) -> str:
    """Python reads no number of thousands of digits, and there is no such character. As long as before: places stay."""
    return ENDLESS.sub(lambda found: "\N{REPLACEMENT CHARACTER}" * len(found[0]), html)


def text_of(html: str) -> str:
    if "<" not in html and "&" not in html:
        return html.strip()
    parser = _Text()
    try:
        parser.feed(readable(html))
        parser.close()
    except AssertionError:
        pass  # the standard parser's word for a declaration it does not know; the text before it stands
    lines = (line.strip() for line in "".join(parser.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def message_id(message: Outgoing) -> str:
    domain = parseaddr(sender(message))[1].rpartition("@")[2]
    return f"<{message.message_id}@{ascii_domain(domain)}>"


def sender(message: Outgoing) -> str:
    return message.from_ or settings.EMAIL_FROM


def ascii_domain(domain: str) -> str:
    return domain if domain.isascii() else domain.encode("idna").decode()


def ascii_address(address: str) -> str:
    local, at, domain = address.rpartition("@")
    return f"{local}{at}{ascii_domain(domain)}"


def named(name: str, address: str) -> str:
    """An encoded word holds 75 characters, a dozen or two of Korean; the standard library would write one for all."""
    if name.isascii():
        return formataddr((name, address))
    return f"{Header(name, 'utf-8', maxlinelen=75).encode(linesep='')} <{address}>"


def as_bytes(message: Outgoing) -> bytes:
    name, address = parseaddr(sender(message))
    boundary = f"=_{message.message_id.hex}"
    headers = {
        "From": named(name, ascii_address(address)),
        "To": ascii_address(message.token),
        "Subject": message.title,
        "Date": format_datetime(timezone.now()),
        "Message-ID": message_id(message),
        **message.headers,
        "MIME-Version": "1.0",
        "Content-Type": f'multipart/alternative; boundary="{boundary}"',
    }
    lines = [_header(name, value) for name, value in headers.items()]
    for kind, content in (("plain", text_of(message.body)), ("html", message.body)):
        lines += ["", f"--{boundary}", *_part(kind, content)]
    return "\r\n".join([*lines, f"--{boundary}--", ""]).encode("utf-8")


def _header(name: str, value: str) -> str:
    if not HEADER_NAME.fullmatch(name) or "\r" in value or "\n" in value or "\x00" in value:
        raise BadHeader(name)
    if value.isascii() and len(name) + len(value) < 900:
        return f"{name}: {value}"
    return f"{name}: {Header(value, 'utf-8', header_name=name).encode(linesep=chr(13) + chr(10))}"


def _part(kind: str, content: str) -> list[str]:
    lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    head = f'Content-Type: text/{kind}; charset="utf-8"'
    if content.isascii() and all(len(line) < 900 for line in lines):
        return [head, "Content-Transfer-Encoding: 7bit", "", *lines]
    encoded = base64.encodebytes("\r\n".join(lines).encode("utf-8", "replace")).decode()
    return [head, "Content-Transfer-Encoding: base64", "", *encoded.strip().split("\n")]
