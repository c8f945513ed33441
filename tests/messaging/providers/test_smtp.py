"""SMTP against aiosmtpd with STARTTLS and AUTH, and against a scripted server for what aiosmtpd never does."""

import socket
import ssl
import threading
from email import message_from_bytes
from email.header import decode_header, make_header
from email.policy import default
from email.utils import parseaddr

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from messaging.providers import provider_for
from messaging.providers.mime import text_of
from messaging.providers.smtp import classify

from .conftest import ACCEPTED, ADDRESS, NETWORK, UNKNOWN, nobody_listens, summary

BAD_MESSAGE = ("rejected", "permanent", "message")
BOUNCE = ("rejected", "permanent", "recipient")
OUTAGE = ("transient", "outage", "provider")
LIMITED = ("rate_limited", "rate_limited", "sender")
OUR_SENDER = ("config", "config", "sender")
THEIR_SENDER = ("rejected", "permanent", "sender")


class Mailbox:
    """Keeps what it takes; refuses by script."""

    def __init__(self):
        self.mails = []
        self.sessions = set()
        self.mail = self.rcpt = self.data = None

    async def handle_MAIL(self, server, session, envelope, address, options):
        if self.mail and (refusal := self.mail(address)):
            return refusal
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 2.1.0 OK"

    async def handle_RCPT(self, server, session, envelope, address, options):
        if self.rcpt:
            return self.rcpt
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 OK"

    async def handle_DATA(self, server, session, envelope):
        self.sessions.add(session.peer)
        if self.data:
            return self.data
        self.mails.append(envelope)
        return "250 2.0.0 queued as 42"


@pytest.fixture
def smtp(settings, certificate, authority):
    """Start a mail server of a kind and the provider that speaks to it."""
    running = []

    def start(mailbox=None, *, tls="", user="", password="", offered=True):
        mailbox = mailbox or Mailbox()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        options = {"hostname": "127.0.0.1", "port": nobody_listens(), "enable_SMTPUTF8": True}
        if tls == "starttls" and offered:
            options |= {"tls_context": context, "require_starttls": True}
        if tls == "smtps":
            options["ssl_context"] = context
        if user:
            options |= {
                "authenticator": lambda server, session, envelope, mechanism, login: AuthResult(
                    success=(login.login, login.password) == (b"user", b"p@ss"), handled=False
                ),
                "auth_required": True,
                "auth_require_tls": tls == "starttls",
            }
        controller = Controller(mailbox, **options)
        controller.start()
        running.append(controller)
        return mailbox, connect(settings, controller.port, tls=tls, user=user, password=password)

    settings.PROVIDER_CA_FILE = authority.path
    yield start
    for controller in running:
        controller.stop()


def connect(settings, port, tls="", user="", password=""):
    settings.PROVIDERS = {"Email": "smtp"}
    settings.SMTP_URL = {"host": "localhost", "port": port, "user": user, "password": password, "tls": tls}
    settings.EMAIL_FROM = "시그널 <no-reply@signalbox.example>"
    return provider_for("Email")


def test_a_mail_arrives_with_html_text_and_our_id(smtp, message, send_one):
    mailbox, provider = smtp()
    sent = message(
        "email",
        title="안녕하세요, " + "긴 제목 " * 20,
        body='<style>p{}</style><p>Dear <b>Kim</b>,</p><p>see <a href="https://x.example/a?b=1&amp;c=2">here</a></p>.\n.dot',
        headers={"List-Unsubscribe": "<https://signalbox.example/u/abc>"},
    )
    answer = send_one(provider, sent)
    assert summary(answer) == ACCEPTED
    assert answer.provider_message_id == f"{sent.message_id}@signalbox.example"
    [envelope] = mailbox.mails
    assert (envelope.mail_from, envelope.rcpt_tos) == ("no-reply@signalbox.example", [ADDRESS])
    mail = message_from_bytes(envelope.content, policy=default)
    assert mail["Subject"].strip() == sent.title.strip()
    assert str(mail["From"]) == "시그널 <no-reply@signalbox.example>"
    assert mail["To"] == ADDRESS
    assert mail["Message-ID"] == f"<{sent.message_id}@signalbox.example>"
    assert mail["List-Unsubscribe"] == "<https://signalbox.example/u/abc>"
    assert mail["Date"]
    assert mail.get_body("html").get_content().strip().replace("\r\n", "\n") == sent.body
    text = mail.get_body("plain").get_content()
    assert "Dear Kim," in text
    assert "here (https://x.example/a?b=1&c=2)" in text
    assert "p{}" not in text
    assert not [part.defects for part in mail.walk() if part.defects]


@pytest.mark.parametrize(
    ("own", "envelope", "name"),
    [
        ('"김영희 \\"지원\\" (주)" <help@shop.example>', "help@shop.example", '김영희 "지원" (주)'),
        ('"Kim, Young-Hee" <help@shop.example>', "help@shop.example", "Kim, Young-Hee"),
        ("help@shop.example", "help@shop.example", ""),
        ('"가게" <help@가게.example>', "help@" + "가게.example".encode("idna").decode(), "가게"),
        (f'"{"가나다라 " * 20}" <help@shop.example>', "help@shop.example", ("가나다라 " * 20).strip()),
    ],
)
def test_a_message_may_bring_its_own_from(smtp, message, send_one, own, envelope, name):
    mailbox, provider = smtp()
    sent = message("email", from_=own)
    answer = send_one(provider, sent)
    assert (summary(answer), answer.provider_message_id.partition("@")[0]) == (ACCEPTED, str(sent.message_id))
    assert mailbox.mails[0].mail_from == envelope
    raw = message_from_bytes(mailbox.mails[0].content)["From"]
    assert max(map(len, raw.split("\n"))) < 900
    assert all(len(word) <= 75 for word in raw.split() if word.startswith("=?"))
    shown, address = parseaddr(raw)
    assert (str(make_header(decode_header(shown))).strip(), address) == (name, envelope)


@pytest.mark.parametrize("body", ["한글 본문 " * 300, "x" * 3000, ".starts\n..and goes on with dots", "a\r\nb\rc\nd"])
def test_any_body_survives_the_way(smtp, message, send_one, body):
    mailbox, provider = smtp()
    send_one(provider, message("email", body=body))
    html = message_from_bytes(mailbox.mails[0].content, policy=default).get_body("html").get_content()
    assert html.strip().split() == body.split()


def test_starttls_and_login(smtp, message, send_one):
    mailbox, provider = smtp(tls="starttls", user="user", password="p@ss")
    assert summary(send_one(provider, message("email"))) == ACCEPTED
    assert len(mailbox.mails) == 1


def test_smtps(smtp, message, send_one):
    mailbox, provider = smtp(tls="smtps")
    assert summary(send_one(provider, message("email"))) == ACCEPTED


def test_a_wrong_password_is_our_set_up(smtp, message, send_one):
    mailbox, provider = smtp(tls="starttls", user="user", password="wrong")
    answer = send_one(provider, message("email"))
    assert summary(answer) == OUR_SENDER
    assert answer.code.startswith("535")
    assert "wrong" not in answer.raw


def test_starttls_that_is_not_offered_is_our_set_up(smtp, message, send_one):
    _mailbox, provider = smtp(tls="starttls", offered=False)
    assert send_one(provider, message("email")).outcome == "config"


def test_a_certificate_of_nobody_we_trust_is_never_connected(settings, smtp, message, send_one):
    mailbox, provider = smtp(tls="starttls")
    settings.PROVIDER_CA_FILE = ""
    assert summary(send_one(provider, message("email"))) == NETWORK
    assert mailbox.mails == []


def test_never_connected_is_network(settings, message, send_one, dead_port):
    assert summary(send_one(connect(settings, dead_port), message("email"))) == NETWORK


def test_connections_are_kept_for_the_next_batch(smtp, message):
    mailbox, provider = smtp()
    for _ in range(4):
        answers = provider.send([message("email") for _ in range(5)])
        assert {answer.outcome for answer in answers} == {"accepted"}
    assert len(mailbox.mails) == 20
    assert len(mailbox.sessions) == 1


def test_a_refused_recipient_does_not_cost_the_connection(smtp, message):
    mailbox, provider = smtp()
    mailbox.rcpt = f"550 5.1.1 <{ADDRESS}>: no such user"
    [refused] = provider.send([message("email")])
    mailbox.rcpt = None
    [taken] = provider.send([message("email")])
    assert summary(refused) == BOUNCE
    assert (refused.subscription_status, refused.suppress_reason, refused.code) == (-42, "hard_bounce", "550 5.1.1")
    assert ADDRESS not in refused.raw
    assert taken.outcome == "accepted"
    assert len(mailbox.sessions) == 1


def test_a_refusal_of_the_content_is_no_unknown(smtp, message, send_one):
    mailbox, provider = smtp()
    mailbox.data = "554 5.6.0 bad content"
    assert summary(send_one(provider, message("email"))) == BAD_MESSAGE
    mailbox.data = "451 4.3.0 try later"
    assert summary(send_one(provider, message("email"))) == OUTAGE
    mailbox.data = "451 4.7.1 slow down"
    assert summary(send_one(provider, message("email"))) == LIMITED


@pytest.mark.parametrize(
    ("code", "text", "stage", "expected", "status"),
    [
        (421, b"closing", "mail", OUTAGE, None),
        (450, b"busy", "rcpt", OUTAGE, None),
        (451, b"4.3.0 local error", "content", OUTAGE, None),
        (452, b"4.2.2 full", "rcpt", ("transient", "outage", "recipient"), None),
        (451, b"4.7.0 greylisted", "rcpt", LIMITED, None),
        (421, b"4.7.28 rate", "mail", LIMITED, None),
        (452, b"4.5.3 too many", "rcpt", OUTAGE, None),
        (454, b"4.7.0 too many logins", "auth", LIMITED, None),
        (550, b"5.4.5 daily quota", "rcpt", LIMITED, None),
        (550, b"5.1.1 unknown", "rcpt", BOUNCE, -42),
        (550, b"5.1.2 no such domain", "rcpt", BOUNCE, -42),
        (550, b"5.1.10 null mx", "rcpt", BOUNCE, -42),
        (550, b"5.2.1 disabled", "content", BOUNCE, -42),
        (552, b"5.2.2 full", "rcpt", BOUNCE, None),
        (552, b"too big", "content", BAD_MESSAGE, None),
        (552, b"5.3.4 too big", "content", BAD_MESSAGE, None),
        (554, b"5.6.0 mime", "content", BAD_MESSAGE, None),
        (550, b"5.7.1 spam", "content", ("rejected", "permanent", "sender"), None),
        (550, b"5.7.26 unauthenticated", "content", ("rejected", "permanent", "sender"), None),
        (550, b"who knows", "rcpt", BAD_MESSAGE, None),
        (554, b"", "content", BAD_MESSAGE, None),
        (553, b"5.1.8 bad sender", "mail", OUR_SENDER, None),
        (550, b"no", "mail", ("rejected", "permanent", "sender"), None),
        (530, b"5.7.0 authenticate", "mail", OUR_SENDER, None),
        (535, b"5.7.8 bad login", "auth", OUR_SENDER, None),
        (554, b"no service", "connect", OUR_SENDER, None),
        (550, b"4.2.1 the enhanced code wins", "rcpt", OUTAGE, None),
    ],
)
def test_the_enhanced_code_decides_class_and_scope(code, text, stage, expected, status):
    answer = classify(code, text, stage)
    assert summary(answer) == expected
    assert answer.subscription_status == status


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token": "no address"}, BOUNCE),
        ({"token": "a@b.example\r\nRCPT TO:<x@y.example>"}, BOUNCE),
        ({"title": "x\r\nBcc: everybody@example.com"}, BAD_MESSAGE),
        ({"headers": {"X-A": "1\nX-B: 2"}}, BAD_MESSAGE),
        ({"headers": {"Bad name": "1"}}, BAD_MESSAGE),
    ],
)
def test_nothing_breaks_out_of_its_line(smtp, message, changes, expected):
    mailbox, provider = smtp()
    [answer] = provider.send([message("email", **changes)])
    assert summary(answer) == expected
    assert mailbox.mails == []


def test_an_address_beyond_ascii(smtp, message, send_one):
    mailbox, provider = smtp()
    assert summary(send_one(provider, message("email", token="김@예시.example"))) == ACCEPTED
    assert mailbox.mails[0].rcpt_tos == ["김@" + "예시.example".encode("idna").decode()]


@pytest.mark.parametrize(
    ("code", "text", "stage", "expected"),
    [
        (550, b"no", "mail", "sender_rejected"),
        (553, b"5.1.8 bad sender", "mail", "sender_rejected"),
        (553, b"5.1.7 bad sender", "rcpt", "sender_rejected"),
        (553, b"5.7.1 not owned by user", "rcpt", "sender_rejected"),
        (550, b"5.7.60 no permission to send as this sender", "content", "sender_rejected"),
        (550, b"5.7.1 spam", "content", "policy"),
        (550, b"5.1.1 unknown", "rcpt", "hard_bounce"),
        (451, b"4.1.8 try later", "mail", "outage"),
        (452, b"4.7.1 slower", "mail", "rate_limited"),
        (550, b"5.4.5 daily quota", "mail", "rate_limited"),
        (503, b"5.5.1 log in first", "mail", "policy"),
        (530, b"5.7.0 authenticate", "mail", "config"),
        (535, b"5.7.8 bad login", "auth", "config"),
    ],
)
def test_only_the_from_a_message_brought_is_blamed_on_its_sender(code, text, stage, expected):
    answer = classify(code, text, stage, own_from=True)
    assert answer.error_reason == expected
    if expected == "sender_rejected":
        assert (*summary(answer), answer.subscription_status, answer.suppress_reason) == (*THEIR_SENDER, None, "")
        assert classify(code, text, stage).error_reason != expected


@pytest.mark.parametrize("own", ["nobody", '"x\r\nBcc: e@x.example" <a@b.example>', '"x" <>'])
def test_a_from_that_is_none_is_never_an_empty_envelope(smtp, message, send_one, own):
    mailbox, provider = smtp()
    assert summary(send_one(provider, message("email", from_=own)))[0] == "rejected"
    assert mailbox.mails == []


class ScriptedServer:
    """Plays one line per command: to drop, to fall silent, to talk nonsense at a chosen moment."""

    def __init__(self, *, after_dot="250 ok", at_data="354 go", greeting="220 hello", mails_per_connection=99):
        self.after_dot, self.at_data, self.greeting = after_dot, at_data, greeting
        self.mails_per_connection = mails_per_connection
        self.mails = self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.released = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            try:
                connection, _address = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        carried = 0
        with connection, connection.makefile("rb") as lines:
            connection.sendall(f"{self.greeting}\r\n".encode())
            while line := lines.readline():
                if not line.upper().startswith(b"DATA"):
                    connection.sendall(b"250 ok\r\n")
                    continue
                if not self._say(connection, self.at_data):
                    return
                while (line := lines.readline()) not in (b".\r\n", b""):
                    pass
                self.mails += line != b""
                carried += 1
                if not self._say(connection, self.after_dot) or carried == self.mails_per_connection:
                    return

    def _say(self, connection, words):
        if words == "silence":
            self.released.wait(30)
        if words in ("drop", "silence"):
            return False
        connection.sendall(f"{words}\r\n".encode())
        return True

    def close(self):
        self.released.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def scripted(settings):
    servers = []

    def start(**script):
        servers.append(ScriptedServer(**script))
        return servers[0], connect(settings, servers[0].port)

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("after_dot", ["drop", "silence", "999 what", "hello there"])
def test_after_the_final_dot_a_lost_answer_is_unknown(quick, scripted, message, send_one, after_dot):
    server, provider = scripted(after_dot=after_dot)
    assert summary(send_one(provider, message("email"))) == UNKNOWN
    assert server.mails == 1


@pytest.mark.parametrize("at_data", ["drop", "silence", "250 what"])
def test_before_the_content_a_lost_answer_is_network(quick, scripted, message, send_one, at_data):
    server, provider = scripted(at_data=at_data)
    assert summary(send_one(provider, message("email"))) == NETWORK
    assert server.mails == 0


def test_a_server_that_turns_us_away_at_the_door(scripted, message, send_one):
    _server, provider = scripted(greeting="421 4.3.2 not now")
    assert summary(send_one(provider, message("email"))) == OUTAGE


def test_a_kept_connection_that_was_closed_meanwhile_is_opened_anew(scripted, message):
    server, provider = scripted(mails_per_connection=1)
    outcomes = [provider.send([message("email")])[0].outcome for _ in range(3)]
    assert outcomes == ["accepted"] * 3
    assert (server.mails, server.connections) == (3, 3)


def test_a_large_batch_uses_several_connections_and_keeps_the_order(smtp, message):
    mailbox, provider = smtp()
    batch = [message("email", title=f"n{n}") for n in range(200)]
    answers = provider.send(batch)
    assert [a.provider_message_id.split("@")[0] for a in answers] == [str(m.message_id) for m in batch]
    assert len(mailbox.mails) == 200
    assert 1 < len(mailbox.sessions) <= provider.concurrency


def test_a_defect_of_ours_leaves_one_message_unknown_and_sends_the_rest(smtp, message):
    """A title that is no text stands for what nobody foresaw."""
    mailbox, provider = smtp()
    batch = [message("email", title=None if n == 3 else f"n{n}") for n in range(32)]
    outcomes = [answer.outcome for answer in provider.send(batch)]
    assert outcomes == ["unknown" if n == 3 else "accepted" for n in range(32)]


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain words", "plain words"),
        ("<p>one</p><p>two</p>", "one\n\ntwo"),
        ("a<br>b", "a\nb"),
        ("<ul><li>x</li><li>y</li></ul>", "x\n\ny"),
        ("<title>t</title><script>alert(1)</script>5 &lt; 6 &amp; 7", "5 < 6 & 7"),
        ('<a href="https://x.example">https://x.example</a>', "https://x.example"),
        ('<a href="javascript:alert(1)">go</a>', "go"),
        ("<p>unclosed <b>tag", "unclosed tag"),
    ],
)
def test_the_text_part_is_derived(html, text):
    assert text_of(html) == text
