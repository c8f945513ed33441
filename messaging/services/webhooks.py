"""Outgoing webhooks by the Standard Webhooks rules: claim, call with no transaction open, record."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit
from uuid import UUID, uuid4

import httpx
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from config.errors import Invalid
from config.observe import redact
from messaging.models import Application, WebhookAttempt, WebhookDelivery, WebhookEndpoint
from messaging.models.addresses import encrypt
from messaging.providers.http import tls_context

BATCH = 200
SHARE = 50  # of a batch at most for one endpoint
AT_ONCE = 20
DEADLINE = 15.0  # seconds for one call, everything included
# Seconds in which a batch starts its calls: with the sweep's budget and the last call it ends before the task's kill.
START_WITHIN = 30.0
LEASE = timedelta(minutes=5)
# An endpoint that does not answer is left alone until the next minute's sweep, and then asked with one call.
REST = timedelta(seconds=50)
# After the n-th try failed, wait so long; then it is given up and an operator may send it again.
DELAYS = [timedelta(minutes=minutes) for minutes in (1, 5, 30, 120, 300, 600, 840, 1200, 1440)]
FORGOTTEN = timedelta(days=4)
KEPT_ANSWER = 500
LOCAL_NAMES = ("localhost", "local", "internal", "localdomain")


# --- endpoints ---------------------------------------------------------------------------------------------------


def create_endpoint(application: Application, url: str) -> tuple[WebhookEndpoint, str]:
    """The endpoint and its secret, which nobody is shown again."""
    check_url(url)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    return WebhookEndpoint.objects.create(application=application, url=url, secret_encrypted=encrypt(secret)), secret


def change_endpoint(endpoint: WebhookEndpoint, url: str | None = None, active: bool | None = None) -> WebhookEndpoint:
    if url is not None:
        check_url(url)
        endpoint.url = url
    if active is not None:
        endpoint.active = active
        endpoint.disabled_reason = ""
    endpoint.resting_until = None
    endpoint.save(update_fields=["url", "active", "disabled_reason", "resting_until"])
    return endpoint


def delete_endpoint(endpoint: WebhookEndpoint) -> None:
    """With what was still to be told, and the log of what was."""
    endpoint.delete()


def check_url(url: str) -> None:
    """What can be told without asking the network. The address itself is looked at again before each call."""
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname or "", parts.port
    except ValueError:
        raise Invalid("Expected an http or https address.", attr="url") from None
    bad = not url.isascii() or any(ord(sign) <= 32 or ord(sign) == 127 for sign in url) or "\\" in url
    if parts.scheme not in ("http", "https") or not host or bad or len(url) > 2000:
        raise Invalid("Expected an http or https address.", attr="url")
    if parts.username is not None or parts.password is not None:
        raise Invalid("An address with a user name is not accepted.", attr="url")
    if not settings.WEBHOOK_ALLOW_PRIVATE and _looks_private(host):
        raise Invalid("Private addresses are refused.", code="private_address", attr="url")


def _looks_private(host: str) -> bool:
    if host.rstrip(".").lower().split(".")[-1] in LOCAL_NAMES:
        return True
    try:
        # Also reads the old spellings of 127.0.0.1: 2130706433, 0x7f.1, 0177.0.0.1.
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return any(is_private(str(entry[4][0])) for entry in found)


def is_private(address: str) -> bool:
    """Anything but a public unicast address, also when it is wrapped into an IPv6 one."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in ipaddress.ip_network("64:ff9b::/96") or ip in ipaddress.ip_network("::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_private(str(inner))
    return not ip.is_global or ip.is_multicast


# --- signing -----------------------------------------------------------------------------------------------------


def signature(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join([webhook_id.encode(), str(timestamp).encode(), body])
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def signed_headers(secret: str, webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "user-agent": "Signalbox-Webhooks/1",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, webhook_id, timestamp, body),
    }


# --- delivering --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    delivery_id: int
    message_id: UUID
    endpoint_id: UUID
    webhook_id: str
    url: str
    secret: str
    body: bytes


@dataclass(frozen=True)
class Result:
    delivery_id: int
    endpoint_id: UUID
    started_at: datetime
    latency_ms: int
    status_code: int | None = None
    error: str = ""
    answer: str = ""

    @property
    def delivered(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


def deliver_due(now: datetime, limit: int = BATCH) -> Counter[str]:
    """One batch: what was told, what is to be tried again, what was given up."""
    lease = uuid4()
    calls = claim_deliveries(now, lease, limit)
    results = asyncio.run(_call_all(calls)) if calls else []
    return record_results(calls, results, lease, now)


# Each endpoint has its share, so that one with a long queue does not keep the others waiting; one that rests is asked
# with a single call. The ORM has neither LATERAL nor a locking CTE.
CLAIM = """
    WITH due AS MATERIALIZED (
        SELECT found.id FROM webhook_endpoints e CROSS JOIN LATERAL (
            SELECT d.id, d.next_attempt_at FROM webhook_deliveries d
             WHERE d.endpoint_id = e.id AND d.delivered_at IS NULL AND d.given_up_at IS NULL
               AND d.next_attempt_at <= %(now)s AND (d.leased_until IS NULL OR d.leased_until <= %(now)s)
             ORDER BY d.next_attempt_at, d.id LIMIT CASE WHEN e.resting_until IS NULL THEN %(share)s ELSE 1 END
             FOR UPDATE SKIP LOCKED) AS found
         WHERE e.active AND (e.resting_until IS NULL OR e.resting_until <= %(now)s)
         ORDER BY found.next_attempt_at, found.id LIMIT %(limit)s)
    UPDATE webhook_deliveries d
       SET lease_id = %(lease)s, leased_until = %(until)s, attempt_count = d.attempt_count + 1
      FROM due WHERE d.id = due.id RETURNING d.id
"""


def claim_deliveries(now: datetime, lease: UUID, limit: int) -> list[Call]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(CLAIM, {"now": now, "share": SHARE, "limit": limit, "lease": lease, "until": now + LEASE})
        keys = [pk for (pk,) in cursor.fetchall()]
        claimed = WebhookDelivery.objects.filter(pk__in=keys).select_related("endpoint").order_by("id")
        return [
            Call(
                delivery_id=row.pk,
                message_id=row.message_id,
                endpoint_id=row.endpoint_id,
                webhook_id=f"msg_{row.webhook_id.hex}",
                url=row.endpoint.url,
                secret=row.endpoint.secret,
                body=_body(row.payload),
            )
            for row in claimed
        ]


def _body(payload: dict[str, Any]) -> bytes:
    # type and timestamp first, as the standard's examples have it; jsonb has its own order.
    ordered = {name: payload[name] for name in ("type", "timestamp", "data")}
    return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()


async def _call_all(calls: Sequence[Call]) -> list[Result]:
    """Results of the calls that were made: none when its endpoint stopped answering, or when the time was up."""
    gate, silent, deadline = asyncio.Semaphore(AT_ONCE), set[UUID](), time.monotonic() + START_WITHIN
    # What happened to one message is told to an endpoint in the order it happened.
    told: dict[tuple[UUID, UUID], list[Call]] = {}
    for call in calls:
        told.setdefault((call.endpoint_id, call.message_id), []).append(call)
    # Not from the environment: a proxy there would resolve the name itself.
    async with httpx.AsyncClient(
        timeout=DEADLINE, follow_redirects=False, trust_env=False, verify=tls_context()
    ) as client:

        async def one_by_one(changes: Sequence[Call]) -> list[Result]:
            results = []
            for call in changes:
                async with gate:
                    if call.endpoint_id in silent or time.monotonic() > deadline:
                        break
                    results.append(await _call(client, call))
                if results[-1].status_code is None:
                    silent.add(call.endpoint_id)
            return results

        return list(chain(*await asyncio.gather(*map(one_by_one, told.values()))))


async def _call(client: httpx.AsyncClient, call: Call) -> Result:
    started_at, started = timezone.now(), time.monotonic()
    status, error, answer = None, "", ""
    try:
        async with asyncio.timeout(DEADLINE):
            status, answer = await _post(client, call)
    except TimeoutError:
        error = "timeout"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, PrivateAddress) as failure:
        error = f"{type(failure).__name__}: {failure}"
    elapsed = round((time.monotonic() - started) * 1000)
    kept = redact(error)[:300], redact(answer)[:KEPT_ANSWER]
    return Result(call.delivery_id, call.endpoint_id, started_at, elapsed, status, *kept)


class PrivateAddress(Exception):
    """The name leads to an address inside; asked anew before every call, so a name that moves does not help."""


async def _post(client: httpx.AsyncClient, call: Call) -> tuple[int, str]:
    """To the very address that was checked: the name is resolved once, and only serves TLS and the Host header."""
    parts = urlsplit(call.url)
    host = str(parts.hostname)
    address = await _public_address(host, parts.port or (443 if parts.scheme == "https" else 80))
    headers = signed_headers(call.secret, call.webhook_id, int(time.time()), call.body)
    request = client.build_request(
        "POST",
        _at_address(parts, address),
        content=call.body,
        headers={**headers, "Host": parts.netloc.rpartition("@")[2]},
        extensions={"sni_hostname": host},
    )
    response = await client.send(request, stream=True)
    try:
        answer = b""
        async for piece in response.aiter_raw():
            answer += piece
            if len(answer) >= KEPT_ANSWER:
                break
        return response.status_code, answer[:KEPT_ANSWER].decode("utf-8", "replace").replace("\x00", "")
    finally:
        await response.aclose()


async def _public_address(host: str, port: int) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not settings.WEBHOOK_ALLOW_PRIVATE and any(map(is_private, addresses)):
        raise PrivateAddress("private addresses are refused")
    return addresses[0]


def _at_address(parts: SplitResult, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    netloc = host if parts.port is None else f"{host}:{parts.port}"
    return urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, ""))


def record_results(calls: Sequence[Call], results: Sequence[Result], lease: UUID, now: datetime) -> Counter[str]:
    """Only what is still ours by the lease: a slow run whose lease ended must not undo another's record."""
    counts: Counter[str] = Counter()
    with transaction.atomic():
        rows = WebhookDelivery.objects.filter(pk__in=[call.delivery_id for call in calls], lease_id=lease)
        held = {row.pk: row for row in rows.select_for_update().order_by("pk")}
        kept = {result.delivery_id: result for result in results if result.delivery_id in held}
        for pk, row in held.items():
            counts[_conclude(row, kept.get(pk), now)] += 1
        WebhookDelivery.objects.bulk_update(
            held.values(),
            ["lease_id", "leased_until", "attempt_count", "delivered_at", "given_up_at", "next_attempt_at"],
        )
        WebhookAttempt.objects.bulk_create(
            WebhookAttempt(
                delivery_id=pk,
                attempt_no=held[pk].attempt_count,
                started_at=result.started_at,
                ended_at=result.started_at + timedelta(milliseconds=result.latency_ms),
                status_code=result.status_code,
                error=result.error,
                answer=result.answer,
                latency_ms=result.latency_ms,
            )
            for pk, result in kept.items()
        )
        _learn(kept.values(), now)
    return counts


def _learn(results: Collection[Result], now: datetime) -> None:
    """Which endpoints are gone for good, which do not answer for the moment, and which do again."""
    gone = {result.endpoint_id for result in results if result.status_code == 410}
    answering = {result.endpoint_id for result in results if result.status_code is not None}
    silent = {result.endpoint_id for result in results} - answering
    WebhookEndpoint.objects.filter(pk__in=gone).update(active=False, disabled_reason="answered 410 Gone")
    WebhookEndpoint.objects.filter(pk__in=answering, resting_until__isnull=False).update(resting_until=None)
    WebhookEndpoint.objects.filter(pk__in=silent).update(resting_until=now + REST)


def _conclude(row: WebhookDelivery, result: Result | None, now: datetime) -> str:
    row.lease_id = row.leased_until = None
    if result is None:
        row.attempt_count -= 1
        return "put_back"
    if result.delivered:
        row.delivered_at = now
        return "delivered"
    if row.attempt_count > len(DELAYS):
        row.given_up_at = now
        return "given_up"
    row.next_attempt_at = now + DELAYS[row.attempt_count - 1]
    return "to_retry"


def would_deliver(now: datetime) -> dict[str, int]:
    return {"due": WebhookDelivery.objects.due(now).filter(endpoint__active=True).count()}


def give_up_forgotten(now: datetime) -> int:
    """What waits for an endpoint that was switched off, or does not answer, for so long will not be news any more."""
    stale = WebhookDelivery.objects.filter(
        Q(endpoint__active=False) | Q(endpoint__resting_until__isnull=False),
        delivered_at__isnull=True,
        given_up_at__isnull=True,
        next_attempt_at__lt=now - FORGOTTEN,
    )
    return stale.update(given_up_at=now, lease_id=None, leased_until=None)


@transaction.atomic
def resend_deliveries(keys: Sequence[int], now: datetime) -> int:
    """By an operator: the same webhook id again, whatever became of it, and at once."""
    rows = WebhookDelivery.objects.filter(Q(leased_until__isnull=True) | Q(leased_until__lte=now), pk__in=keys)
    WebhookEndpoint.objects.filter(pk__in=rows.values("endpoint"), resting_until__isnull=False).update(
        resting_until=None
    )
    return rows.update(delivered_at=None, given_up_at=None, next_attempt_at=now, lease_id=None, leased_until=None)
