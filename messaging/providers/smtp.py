"""E-mail by SMTP: connections are kept and reused, each message is a transaction with one recipient."""

import re
import smtplib
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parseaddr
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings

from messaging.providers.answers import (
    Answer,
    Outgoing,
    accepted,
    config,
    network,
    outage,
    rate_limited,
    rejected,
    sender_rejected,
    unknown,
)
from messaging.providers.http import tls_context
from messaging.providers.mime import BadHeader, as_bytes, ascii_address, message_id, sender
from messaging.providers.threads import spread

ENHANCED = re.compile(rb"\s*([245])\.(\d{1,3})\.(\d{1,3})\b")
HARD_BOUNCE = {"5.1.1", "5.1.2", "5.1.3", "5.1.6", "5.1.10", "5.2.1"}
OUR_LOGIN = {"5.7.8", "5.7.9", "5.7.11", "5.7.14"}
OUR_ADDRESS = {"5.1.7", "5.1.8"}
# "Not allowed to send as": told after the content by Exchange, and after RCPT by Postfix, which puts it off till then.
NOT_OURS = {"5.2.252", "5.7.60"}
NOT_OURS_AT_RCPT = "553 5.7.1"
ADDRESS = re.compile(r"[^\s<>@\x00-\x1f\x7f]+@[^\s<>@\x00-\x1f\x7f]+")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Servers close idle connections after some minutes; an older one is not worth the doubt.
IDLE_SECONDS = 30
PER_CONNECTION = 1000


def classify(code: int, text: bytes, stage: str, own_from: bool = False) -> Answer:
    """Class and scope of a refusal; the enhanced code (RFC 3463) wins over the basic one.

    `own_from`: the message brought its own From, so that a refusal of it is no verdict on all the others.
    """
    found = ENHANCED.match(text)
    enhanced = b".".join(found.groups()).decode() if found else ""
    shown = f"{code} {enhanced}".strip()
    if (enhanced[:1] or str(code)[:1]) == "4":
        return _temporary(enhanced, shown)
    if code in (530, 534, 535, 538) or enhanced in OUR_LOGIN or stage in ("connect", "auth"):
        return config(shown, "sender")
    if own_from and _blames_from(code, enhanced, shown, stage):
        return sender_rejected(shown)
    return _permanent(code, enhanced, shown, stage)


def _blames_from(code: int, enhanced: str, shown: str, stage: str) -> bool:
    if stage == "mail":
        # A spent quota and commands out of order are no word about the address.
        return enhanced != "5.4.5" and code != 503
    return enhanced in OUR_ADDRESS | NOT_OURS or shown == NOT_OURS_AT_RCPT


def _temporary(enhanced: str, shown: str) -> Answer:
    if enhanced.startswith("4.7."):
        return rate_limited(shown)
    return outage(shown, "recipient" if enhanced == "4.2.2" else "provider")


def _permanent(code: int, enhanced: str, shown: str, stage: str) -> Answer:
    if enhanced in HARD_BOUNCE and stage != "mail":
        return rejected("recipient", shown, "hard_bounce", subscription_status=-42, suppress_reason="hard_bounce")
    if enhanced == "5.2.2":
        return rejected("recipient", shown, "mailbox_full")
    if enhanced == "5.4.5":
        return rate_limited(shown)  # the day's quota is spent
    if enhanced in OUR_ADDRESS:
        return config(shown, "sender")
    if enhanced.startswith("5.7.") or stage == "mail":
        return rejected("sender", shown, "policy")
    if enhanced in ("5.2.3", "5.3.4") or enhanced.startswith("5.6.") or code == 552:
        return rejected("message", shown, "message_refused")
    # A bare 550 may mean the mailbox or our reputation: nobody is suppressed on a guess.
    return rejected("message", shown, "rejected")


class Refused(Exception):
    def __init__(self, code: int, text: bytes, stage: str) -> None:
        super().__init__(code)
        self.code, self.text, self.stage = code, text, stage


class Line:
    """One connection, and how far the message on it has got."""

    def __init__(self) -> None:
        server = settings.SMTP_URL
        self.used = time.monotonic()
        self.deadline = self.used + settings.PROVIDER_TIMEOUT
        self.carried = 0
        self.content_sent = False
        name = urlsplit(settings.PUBLIC_URL).hostname  # else smtplib asks the resolver for ours each time
        if server["tls"] == "smtps":
            self.smtp: smtplib.SMTP = smtplib.SMTP_SSL(
                server["host"], server["port"], name, timeout=settings.PROVIDER_TIMEOUT, context=tls_context()
            )
        else:
            self.smtp = smtplib.SMTP(server["host"], server["port"], name, timeout=settings.PROVIDER_TIMEOUT)
        try:
            self._greet(server)
        except (smtplib.SMTPException, OSError):
            self.smtp.close()
            raise

    def _greet(self, server: dict[str, str]) -> None:
        self.smtp.ehlo_or_helo_if_needed()
        self._hurry()
        if server["tls"] == "starttls":
            self.smtp.starttls(context=tls_context())
            self.smtp.ehlo()
            self._hurry()
        if server["user"]:
            self.smtp.login(server["user"], server["password"])

    def _hurry(self) -> None:
        """The timeout is for the whole conversation: a server that drips must not outlive the lease."""
        if self.smtp.sock:
            self.smtp.sock.settimeout(max(0.05, self.deadline - time.monotonic()))

    @property
    def worn(self) -> bool:
        return self.carried >= PER_CONNECTION or time.monotonic() - self.used > IDLE_SECONDS

    def carry(self, message: Outgoing, content: bytes) -> bytes:
        """The server's last words, or Refused. Nothing is retried here."""
        self.content_sent = False
        self.deadline = time.monotonic() + settings.PROVIDER_TIMEOUT
        to, from_ = ascii_address(message.token), ascii_address(parseaddr(sender(message))[1])
        options = [] if (to + from_).isascii() else ["SMTPUTF8", "BODY=8BITMIME"]
        if options and not self.smtp.has_extn("smtputf8"):
            raise Refused(553, b"5.6.7 SMTPUTF8 is not offered", "rcpt")
        self._step("mail", (250,), lambda: self.smtp.mail(from_, options))
        self._step("rcpt", (250, 251), lambda: self.smtp.rcpt(to))
        self._step("data", (354,), lambda: self.smtp.docmd("DATA"))
        self._hurry()
        self.smtp.send(_dotted(content) + b".\r\n")
        self.content_sent = True
        text = self._step("content", (250,), self.smtp.getreply)
        self.used, self.carried = time.monotonic(), self.carried + 1
        return text

    def _step(self, stage: str, good: tuple[int, ...], ask: Callable[[], tuple[int, bytes]]) -> bytes:
        self._hurry()
        code, text = ask()
        if code in good:
            return text
        if not 400 <= code <= 599:
            raise smtplib.SMTPServerDisconnected(f"{code} makes no sense after {stage}")
        raise Refused(code, text, stage)

    def close(self) -> None:
        try:
            self.smtp.close()
        except OSError:
            pass


def _dotted(content: bytes) -> bytes:
    return content.replace(b"\r\n.", b"\r\n..")


class SMTP:
    name = "smtp"
    concurrency = 8
    idempotent = False
    receipts = False

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()
        self.pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="smtp")

    def send(self, batch: Sequence[Outgoing]) -> list[Answer]:
        return spread(self.pool, self.concurrency, batch, self._deliver)

    def query(
        self, message_id: UUID, provider_message_id: str, started_at: datetime, message: Outgoing | None = None
    ) -> Answer | None:
        return None

    def _deliver(self, message: Outgoing) -> Answer:
        started = time.monotonic()
        if message.from_ and not _is_mailbox(message.from_):
            return sender_rejected("bad_address").about(message, "", started)
        try:
            content = _checked(message)
        except (BadHeader, UnicodeError) as error:
            return rejected("message", type(error).__name__, "bad_header").about(message, "", started)
        except ValueError as error:
            bad = rejected("recipient", str(error), "invalid_address", subscription_status=-40)
            return bad.about(message, "", started)
        answer, raw = self._try(message, content, fresh=False)
        return answer.about(message, raw, started)

    def _try(self, message: Outgoing, content: bytes, fresh: bool) -> tuple[Answer, str]:
        line = None if fresh else self._kept()
        reused = line is not None
        try:
            line = line or Line()
            text = line.carry(message, content)
        except Refused as refusal:
            return self._refused(line, refusal, bool(message.from_))
        except (smtplib.SMTPException, OSError, UnicodeError) as error:
            heard = line is not None and line.content_sent
            if line:
                line.close()
            if reused and not heard:
                # The server had closed it meanwhile: nothing was handed over, a new connection may.
                return self._try(message, content, fresh=True)
            return _broken(error, heard), f"{type(error).__name__}: {error}"
        self.lines.append(line)
        return accepted(message_id(message).strip("<>"), "250"), text.decode("utf-8", "replace")

    def _refused(self, line: Line | None, refusal: Refused, own_from: bool) -> tuple[Answer, str]:
        raw = f"{refusal.code} {refusal.text.decode('utf-8', 'replace')}"
        if line and refusal.code != 421 and _reset(line):
            self.lines.append(line)
        elif line:
            line.close()
        return classify(refusal.code, refusal.text, refusal.stage, own_from), raw

    def _kept(self) -> Line | None:
        while self.lines:
            try:
                line = self.lines.pop()
            except IndexError:
                return None
            if not line.worn:
                return line
            line.close()
        return None


def _reset(line: Line) -> bool:
    try:
        return line.smtp.rset()[0] == 250
    except (smtplib.SMTPException, OSError):
        return False


def _is_mailbox(text: str) -> bool:
    """Rows may be written by hand; an empty envelope sender would make a mail a bounce."""
    return not CONTROL.search(text) and bool(ADDRESS.fullmatch(parseaddr(text)[1]))


def _checked(message: Outgoing) -> bytes:
    if not ADDRESS.fullmatch(message.token) or len(message.token) > 320:
        raise ValueError("bad_address")
    return as_bytes(message)


def _broken(error: Exception, heard: bool) -> Answer:
    code = type(error).__name__
    if heard:
        return unknown(code)
    if isinstance(error, smtplib.SMTPAuthenticationError | smtplib.SMTPConnectError | smtplib.SMTPHeloError):
        text = error.smtp_error if isinstance(error.smtp_error, bytes) else str(error.smtp_error).encode()
        stage = "auth" if isinstance(error, smtplib.SMTPAuthenticationError) else "connect"
        return classify(error.smtp_code, text, stage) if error.smtp_code >= 400 else network(code)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        # STARTTLS or AUTH is asked for by SMTP_URL and not offered.
        return config(code)
    if isinstance(error, ssl.SSLCertVerificationError):
        return network("certificate")
    return network(code)
