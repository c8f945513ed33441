"""Mail through the SMTP provider to a sink on loopback that takes everything: messages a minute."""

import multiprocessing
import socket
import threading
import time
from uuid import uuid4

from django.conf import settings

from messaging.providers import Outgoing
from messaging.providers.smtp import SMTP

MESSAGES = 10_000
BATCH = 500
BODY = (
    "<p>Dear {n},</p><p>your order has been <b>shipped</b>. <a href='https://shop.example/o/{n}'>Follow it</a>.</p>" * 4
)


def _sink(listener: socket.socket) -> None:
    while True:
        connection, _address = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_take, args=(connection,), daemon=True).start()


def _take(connection: socket.socket) -> None:
    """One answer per command; the content is over at the dot that stands alone."""
    connection.sendall(b"220 sink\r\n")
    content, held = False, b""
    while data := connection.recv(65536):
        held += data
        while True:
            end = held.find(b"\r\n.\r\n" if content else b"\r\n")
            if end < 0:
                break
            line, held = held[:end], held[end + (5 if content else 2) :]
            content, answer = False if content else line.upper() == b"DATA", b"250 ok\r\n"
            connection.sendall(b"354 go on\r\n" if content else answer)


def run() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    # A process of its own, as a real server has one.
    sink = multiprocessing.get_context("fork").Process(target=_sink, args=(listener,), daemon=True)
    sink.start()
    settings.SMTP_URL = {
        "host": "127.0.0.1", "port": listener.getsockname()[1], "user": "", "password": "", "tls": "",
    }  # fmt: skip
    try:
        rate = _measure(SMTP())
    finally:
        sink.terminate()
    print(f"providers: SMTP to a loopback sink, {MESSAGES:,} mails of {len(BODY)} characters, {BATCH} a batch")  # noqa: T201
    print(f"  mails a minute            {rate:10,.0f}   {rate / 50_000:.2f} of the 50,000 wanted")  # noqa: T201


def _measure(provider: SMTP) -> float:
    batches = [[_mail(n) for n in range(start, start + BATCH)] for start in range(0, MESSAGES, BATCH)]
    started = time.perf_counter()
    outcomes = {answer.outcome for batch in batches for answer in provider.send(batch)}
    elapsed = time.perf_counter() - started
    assert outcomes == {"accepted"}, outcomes
    return MESSAGES / elapsed * 60


def _mail(n: int) -> Outgoing:
    return Outgoing(uuid4(), 1, "email", "Email", f"user{n}@example.com", title=f"Order {n}", body=BODY.format(n=n))
