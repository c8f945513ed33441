"""Who fetched a pixel or followed a link: a person, or a program on the way to them."""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta

# Nobody opens a mail this soon after the hand-over; the scanner at the recipient's gate does.
TOO_SOON = timedelta(seconds=2)

PROXIES = re.compile(r"GoogleImageProxy|YahooMailProxy|ggpht\.com", re.I)
# Apple Mail Privacy Protection and several gateways send nothing but this.
BARE = re.compile(r"Mozilla/[45]\.0\Z", re.I)
SCANNERS = re.compile(
    r"proofpoint|mimecast|barracuda|symantec|messagelabs|fireeye|trend ?micro|sophos|forcepoint|websense|zscaler"
    r"|ironport|\bcisco|mcafee|fortiguard|fortinet|bitdefender|kaspersky|\beset\b|\bavast|cloudmark|\bcyren|safelinks|jiran"
    r"|\batp\b|skypeuripreview|trustwave|\bvipre|virustotal|urlscan|phish|check ?point|cloudflare|appriver|ahnlab"
    r"|palo ?alto|censys|masscan|zgrab|\bnmap|sonicwall|watchguard|vade ?secure|hornetsecurity|spamexperts|spamhaus"
    r"|avanan|abnormal security|mailguard|safe links|protection discovery|google-safety",
    re.I,
)
# Cubot is a maker of telephones. No browser tells an address where to read about it; well-bred robots do.
BOTS = re.compile(
    r"(?<!cu)bots?\b|spider|crawl|slurp|fetcher|preview|facebookexternalhit|^whatsapp|telegrambot|kakaotalk-scrap"
    r"|headless|phantomjs|selenium|puppeteer|playwright|lighthouse|monitor|uptime|pingdom|statuscake|checker|validator"
    r"|archiver|\bscan|scanner|httrack|mediapartners|googleother|\+https?:",
    re.I,
)
PROGRAMS = re.compile(
    r"^(curl|wget|libwww|lwp|python|urllib|aiohttp|httpx|go-http|java/|okhttp|apache-httpclient|node|axios|undici"
    r"|got\b|ruby|php|guzzle|perl|powershell|winhttp|postman|insomnia|httpie|rest-client|dart|fasthttp|scrapy|reqwest"
    r"|hyper)",
    re.I,
)
PREFETCH_HEADERS = ("Purpose", "Sec-Purpose", "X-Purpose", "X-Moz")
PREFETCH_WORDS = re.compile(r"prefetch|preview|prerender|preload", re.I)


def machine_reasons(headers: Mapping[str, str], sent_at: datetime | None, now: datetime) -> list[str]:
    """Why this looks like a program; empty for a person."""
    agent = (headers.get("User-Agent") or "").strip()
    reasons = [name for name, found in _signs(agent) if found]
    if any(PREFETCH_WORDS.search(headers.get(name) or "") for name in PREFETCH_HEADERS):
        reasons.append("prefetch")
    if sent_at is None or now - sent_at < TOO_SOON:
        reasons.append("too_soon")
    return reasons


def _signs(agent: str) -> list[tuple[str, bool]]:
    return [
        ("no_user_agent", not agent),
        ("bare_mozilla", bool(BARE.match(agent))),
        ("proxy", bool(PROXIES.search(agent))),
        ("scanner", bool(SCANNERS.search(agent))),
        ("bot", bool(BOTS.search(agent))),
        ("program", bool(PROGRAMS.search(agent))),
    ]
