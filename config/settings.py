"""All settings, in one file. The environment is read by strict parsers: a bad value stops the start with its name."""

import json
import os
import re
import secrets
import ssl
from collections.abc import Callable
from datetime import timedelta
from email.utils import parseaddr
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit
from zoneinfo import ZoneInfo

import dj_database_url
import psycopg
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from csp.constants import NONE, SELF, UNSAFE_EVAL, UNSAFE_INLINE
from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static
from django.urls import reverse_lazy
from django.utils.translation import gettext_lazy as _
from psycopg.conninfo import make_conninfo

BASE_DIR = Path(__file__).resolve().parent.parent
T = TypeVar("T")


# --- the environment ---------------------------------------------------------------------------------------------


def env(name: str, parse: Callable[[str], T], default: T) -> T:
    text = os.environ.get(name)
    if text is None or text.strip() == "":
        return default
    try:
        return parse(text.strip())
    except (ValueError, KeyError, OSError) as error:
        raise ImproperlyConfigured(f"{name}: {error}") from None


def boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"expected on or off, not {text!r}")
    return words[text.lower()]


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}, not {text!r}")
        return int(text)

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, not {text!r}")
        return text

    return parse


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def hosts(text: str) -> list[str]:
    found = words(text)
    for word in found:
        if not re.fullmatch(r"\*|\.?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]", word, re.IGNORECASE):
            raise ValueError(f"expected host names without scheme and port, not {word!r}")
    if not found:
        raise ValueError("expected at least one host name")
    return found


def url(*schemes: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        parts = urlsplit(text)
        if parts.scheme not in schemes or not parts.hostname or re.search(r"[\s\x00-\x1f]", text):
            raise ValueError(f"expected a URL with the scheme {' or '.join(schemes)} and a host")
        refuse_port_zero(parts)
        return text.rstrip("/")

    return parse


def refuse_port_zero(parts: SplitResult) -> None:
    if parts.port == 0:  # and the question raises ValueError for a port that is none
        raise ValueError("expected a port from 1 to 65535")


def web_url(text: str) -> str:
    """Scheme and host in lower case, as browsers send them and as we compare them."""
    parts = urlsplit(url("http", "https")(text))
    return parts._replace(netloc=parts.netloc.lower()).geturl()


def public_url(text: str) -> str:
    """What paths are appended to."""
    if "@" in urlsplit(text).netloc or "?" in text or "#" in text:
        raise ValueError("expected scheme, host and perhaps a port and a path, such as https://signalbox.example")
    return web_url(text)


def origins(text: str) -> list[str]:
    found = [web_url(word) for word in words(text)]
    for origin in found:
        if not re.fullmatch(r"https?://[^/?#@]+", origin):
            raise ValueError(f"expected scheme, host and perhaps a port, not {origin!r}")
    if not found:
        raise ValueError("expected at least one origin such as https://signalbox.example")
    return found


def redis_url(text: str) -> str:
    """The driver takes a database that is no number for 0, and looks at its options only when it connects."""
    import redis

    clean = url("redis", "rediss")(text)
    name = urlsplit(clean).path.strip("/")
    if name and not (name.isascii() and name.isdigit()):
        raise ValueError(f"expected the number of a database after the host, not {name!r}")
    try:
        redis.ConnectionPool.from_url(clean).make_connection()
    except TypeError as error:
        raise ValueError(f"an option is not known: {error}") from None
    return clean


def directory(text: str) -> Path:
    try:
        return Path(text).expanduser().resolve()
    except RuntimeError as error:  # ~nobody, a loop of links
        raise ValueError(f"{text!r} is no directory: {error}") from None


def sentry_dsn(text: str) -> str:
    from sentry_sdk.utils import BadDsn, Dsn

    url("http", "https")(text)
    try:
        Dsn(text)
    except BadDsn as error:
        raise ValueError(f"not a DSN: {error}") from None
    return text


def time_zone(text: str) -> str:
    try:
        return ZoneInfo(text).key
    except Exception:
        raise ValueError(f"{text!r} is not an IANA time zone") from None


def rate(text: str) -> tuple[int, int]:
    """'12000/min' as (requests, seconds)."""
    count, _slash, period = text.partition("/")
    names = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60}
    names |= {"h": 3600, "hour": 3600, "d": 86400, "day": 86400}
    seconds = names.get(period)
    if not count.isascii() or not count.isdigit() or int(count) < 1 or seconds is None:
        raise ValueError(f"expected a rate such as 12000/min, not {text!r}")
    return int(count), seconds


def database(text: str) -> dict[str, Any]:
    if urlsplit(text).scheme not in ("postgres", "postgresql") or re.search(r"[\x00-\x1f]", unquote(text)):
        raise ValueError("expected postgresql://user:password@host:port/name")
    refuse_port_zero(urlsplit(text))
    parsed: dict[str, Any] = dict(dj_database_url.parse(text))
    if not parsed.get("NAME"):
        raise ValueError("the database's name is missing")
    parsed["OPTIONS"] = {"connect_timeout": 10, **parsed.get("OPTIONS", {})}
    try:
        make_conninfo(**parsed["OPTIONS"])
    except psycopg.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    return parsed


def secret_key() -> str:
    """Required; under DEBUG or with the embedded database one is made once and kept in DATA_DIR."""
    if key := env("SECRET_KEY", str, ""):
        if len(key) < 32 and not DEBUG:
            raise ImproperlyConfigured("SECRET_KEY: at least 32 characters are needed")
        return key
    if DATABASE["ENGINE"] != "config.embedded" and not DEBUG:
        raise ImproperlyConfigured("SECRET_KEY: required when DATABASE_URL is set and DEBUG is off")
    from config.embedded.keeper import open_private

    path = DATA_DIR / "secret-key"
    try:
        DATA_DIR.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Several processes may start at once: the first link wins and all read the same key.
            draft = DATA_DIR / f".secret-key.{os.getpid()}"
            with open(open_private(draft, os.O_WRONLY), "w") as file:
                file.write(secrets.token_urlsafe(60))
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return path.read_text().strip()
    except OSError as error:
        raise ImproperlyConfigured(f"DATA_DIR: cannot keep the secret key there: {error}") from None


DEBUG = env("DEBUG", boolean, False)
DATA_DIR = env("DATA_DIR", directory, BASE_DIR / "var")
DATABASE = env("DATABASE_URL", database, {"ENGINE": "config.embedded", "NAME": "signalbox", "DATA_DIR": DATA_DIR})
SECRET_KEY = secret_key()
SECRET_KEY_FALLBACKS: list[str] = env("SECRET_KEY_FALLBACKS", words, [])
PORT = env("PORT", whole(1, 65535), 8000)
WEB_WORKERS = env("WEB_WORKERS", whole(1, 64), 2)
WEB_THREADS = 80  # of each worker; each may keep a connection, and the embedded server has 200
Q_WORKERS = env("Q_WORKERS", whole(1, 64), 4)
PUBLIC_URL = env("PUBLIC_URL", public_url, f"http://localhost:{PORT}")
ALLOWED_HOSTS = env("ALLOWED_HOSTS", hosts, ["localhost", "127.0.0.1", "[::1]", str(urlsplit(PUBLIC_URL).hostname)])
CSRF_TRUSTED_ORIGINS = env("CSRF_TRUSTED_ORIGINS", origins, ["{0.scheme}://{0.netloc}".format(urlsplit(PUBLIC_URL))])
REDIS_URL = env("REDIS_URL", redis_url, "")
LOG_FORMAT = env("LOG_FORMAT", one_of("console", "json"), "console")
QUIET_CLIENTS: list[str] = env("QUIET_CLIENTS", words, [])  # what they do well leaves no line in the log
SENTRY_DSN = env("SENTRY_DSN", sentry_dsn, "")
API_RATE = env("API_RATE", rate, (12000, 60))


# --- Django ------------------------------------------------------------------------------------------------------

INSTALLED_APPS = [
    "unfold",
    "unfold.contrib.filters",
    "unfold.contrib.forms",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "knox",
    "django_filters",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "drf_standardized_errors",
    "pgtrigger",
    "django_q",
    "axes",
    "csp",
    "config",
    "locks",
    "messaging",
    "campaigns",
    "reminders",
    "devices",
]

MIDDLEWARE = [
    "config.observe.RequestMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "config.api.SlashesForReaders",
    "config.api.PagesWithoutDatabase",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# One connection per thread for good: reconnecting costs django-q2 a factor of ten. No pool: it does not survive fork().
DATABASES = {
    "default": {
        **DATABASE,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }
}

CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

LANGUAGE_CODE = env("LANGUAGE_CODE", one_of("en", "ko"), "en")
LANGUAGES = [("en", "English"), ("ko", "한국어")]
LOCALE_PATHS = [BASE_DIR / "config" / "locale"]
FORMAT_MODULE_PATH = ["config.formats"]
TIME_ZONE = env("TIME_ZONE", time_zone, "UTC")
USE_TZ = True

STATIC_URL = "static/"
# Straight from the packages: no collectstatic step, no second server.
WHITENOISE_USE_FINDERS = True
WHITENOISE_MAX_AGE = 3600

AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = reverse_lazy("admin:login")
LOGIN_REDIRECT_URL = reverse_lazy("admin:index")


# --- security ----------------------------------------------------------------------------------------------------

# Cookies and redirects follow the public address: `make run` serves plain http on localhost, production is https.
HTTPS = PUBLIC_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS
SECURE_REDIRECT_EXEMPT = [r"^healthz/?$", r"^readyz/?$", r"^metrics/?$"]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_HSTS_SECONDS = env("HSTS_SECONDS", whole(0, 63_072_000), 31_536_000 if HTTPS else 0)
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = SECURE_HSTS_SECONDS > 0
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_HTTPONLY = True
X_FRAME_OPTIONS = "DENY"
# A page of a million characters, each escaped by the client as a pair of \uXXXX.
DATA_UPLOAD_MAX_MEMORY_SIZE = 13 * 1024 * 1024

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        # The admin's Alpine.js evaluates its attributes; scripts themselves come only from here.
        "script-src": [SELF, UNSAFE_EVAL],
        "style-src": [SELF, UNSAFE_INLINE],
        "img-src": [SELF, "data:"],
        "font-src": [SELF, "data:"],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    }
}

AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = timedelta(minutes=15)
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_VERBOSE = False


# --- REST --------------------------------------------------------------------------------------------------------

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "config.rest.tokens.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["config.rest.ModelPermissions"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["config.rest.StrictJSONParser"],
    "DEFAULT_FILTER_BACKENDS": ["config.rest.StrictFilterBackend"],
    "DEFAULT_PAGINATION_CLASS": "config.rest.CursorPages",
    "DEFAULT_THROTTLE_CLASSES": ["config.rest.ClientThrottle"],
    "DEFAULT_SCHEMA_CLASS": "config.rest.Schema",
    "EXCEPTION_HANDLER": "config.rest.exception_handler",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
REST_KNOX = {"TOKEN_TTL": timedelta(days=365), "AUTO_REFRESH": False}
SPECTACULAR_SETTINGS = {
    "TITLE": "Signalbox",
    "DESCRIPTION": "Outreach that heals itself: messages, campaigns, device jobs, locks and reminders.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    "SCHEMA_PATH_PREFIX": r"/api/v1/",
    "ENUM_NAME_OVERRIDES": {
        "PCStatusEnum": "devices.models.PC.Status",
        "DeviceStatusEnum": "devices.models.Device.Status",
        "RunStatusEnum": "devices.models.TaskDevice.Status",
        "BranchStateEnum": "locks.models.Branch.State",
        "LockStateEnum": "locks.models.BranchLock.State",
        "LockScopeEnum": "locks.models.Scope",
        "ErrorTypeEnum": "config.rest.schema.ErrorType",
        "LockEventKindEnum": "locks.models.LockEvent.Kind",
        "HeartbeatStatusEnum": "locks.api.serializers.REPORTED",
        "ChannelEnum": "messaging.models.Channel.choices",
        "SenderChannelEnum": "campaigns.models.CHANNELS",
        "SenderStatusEnum": "campaigns.models.Sender.Status",
        "SequenceStatusEnum": "campaigns.models.Sequence.Status",
        "EnrollmentStatusEnum": "campaigns.models.Enrollment.Status",
        "ExecutionStatusEnum": "campaigns.models.Execution.Status",
        "ReplyKindEnum": "campaigns.models.Reply.Kind",
        "MessageStatusEnum": "messaging.models.Message.Status",
        "MessageKindEnum": "messaging.models.Kind.choices",
        "SubscriptionTypeEnum": "messaging.models.subscriptions.TYPES",
        "ValidationErrorEnum": "drf_standardized_errors.openapi_serializers.ValidationErrorEnum.choices",
        "ClientErrorEnum": "drf_standardized_errors.openapi_serializers.ClientErrorEnum.choices",
        "ServerErrorEnum": "drf_standardized_errors.openapi_serializers.ServerErrorEnum.choices",
        "ErrorCode401Enum": "drf_standardized_errors.openapi_serializers.ErrorCode401Enum.choices",
        "ErrorCode403Enum": "drf_standardized_errors.openapi_serializers.ErrorCode403Enum.choices",
        "ErrorCode404Enum": "drf_standardized_errors.openapi_serializers.ErrorCode404Enum.choices",
        "ErrorCode405Enum": "drf_standardized_errors.openapi_serializers.ErrorCode405Enum.choices",
        "ErrorCode406Enum": "drf_standardized_errors.openapi_serializers.ErrorCode406Enum.choices",
        "ErrorCode415Enum": "drf_standardized_errors.openapi_serializers.ErrorCode415Enum.choices",
        "ErrorCode429Enum": "drf_standardized_errors.openapi_serializers.ErrorCode429Enum.choices",
        "ErrorCode500Enum": "drf_standardized_errors.openapi_serializers.ErrorCode500Enum.choices",
    },
    "POSTPROCESSING_HOOKS": ["drf_standardized_errors.openapi_hooks.postprocess_schema_enums"],
}
DRF_STANDARDIZED_ERRORS = {
    "ALLOWED_ERROR_STATUS_CODES": ["400", "401", "403", "404", "409", "413", "415", "429", "503"]
}
IDEMPOTENCY_WINDOW = timedelta(hours=24)
# What our own idempotency keys begin with: a client's key must not meet one.
RESERVED_KEYS = ("reminder:", "step-execution:")


# --- background work ---------------------------------------------------------------------------------------------

# Why each value: research on django-q2. It ticks the sweeps and carries no work, so nothing is prefetched, nothing
# retried (the next tick is the retry), nothing caught up, and few results are kept.
Q_CLUSTER = {
    "name": "signalbox",
    "workers": Q_WORKERS,
    "bulk": 1,
    "queue_limit": Q_WORKERS,
    "timeout": 90,
    "retry": 300,
    "max_attempts": 1,
    "ack_failures": True,
    "catch_up": False,
    "save_limit": 20,
    "recycle": 500,
    "max_rss": 400_000,
    "poll": 0.2,
    "guard_cycle": 0.5,
    "label": _("Background work"),
    "broker_class": f"config.supervisor.broker.{'LaneRedis' if REDIS_URL else 'LaneORM'}",
    **({"redis": REDIS_URL} if REDIS_URL else {"orm": "default"}),
}

HALF_MINUTE, MINUTE, FIVE_MINUTES = "* * * * * */30", "* * * * *", "*/5 * * * *"

# name → when it ticks; `parallel` runs may work side by side, `budget` bounds one run. The name is <app>.<function of
# its sweeps.py>. The check in config/sweeping.py refuses to start when a model relies on a sweep missing here.
SWEEPS: dict[str, dict[str, Any]] = {
    "config.purge_expired": {"cron": FIVE_MINUTES},
    "devices.time_out_attempts": {"cron": MINUTE},
    "devices.expire_leases": {"cron": MINUTE},
    "devices.mark_silent_pcs": {"cron": MINUTE},
    "devices.promote_next_task": {"cron": MINUTE},
    "config.measure_integrity": {"cron": FIVE_MINUTES},
    "config.run_bulk_actions": {"cron": MINUTE},
    "reminders.send_due_alarms": {"cron": MINUTE, "budget": timedelta(seconds=50), "parallel": 2},
    # The budget bounds when a batch may start; with the longest batch after it a run stays below Q_CLUSTER's timeout.
    # Half of the workers at most: a provider that hangs must leave room for the other sweeps.
    "messaging.dispatch_due_messages": {
        "cron": MINUTE,
        "parallel": max(1, Q_WORKERS // 2),
        "budget": timedelta(seconds=10),
    },
    "messaging.retry_errored_messages": {"cron": MINUTE},
    "messaging.resolve_unknown_attempts": {"cron": MINUTE},
    "messaging.expire_messages": {"cron": FIVE_MINUTES},
    "messaging.archive_messages": {"cron": FIVE_MINUTES},
    "messaging.deliver_webhooks": {"cron": MINUTE, "budget": timedelta(seconds=30)},
    "messaging.apply_parked_events": {"cron": MINUTE},
    "messaging.fold_rollups": {"cron": MINUTE},
    "locks.expire_heartbeats": {"cron": HALF_MINUTE, "parallel": 8},
    "locks.expire_ttls": {"cron": FIVE_MINUTES, "parallel": 8},
    "campaigns.send_due_steps": {"cron": MINUTE},
    "campaigns.follow_message_results": {"cron": MINUTE},
    "campaigns.resume_paused_enrollments": {"cron": MINUTE},
    "campaigns.reconcile_sequences": {"cron": FIVE_MINUTES},
}
SWEEP_BUDGET = timedelta(seconds=20)
SWEEP_RUNS_KEPT = timedelta(days=7)
BULK_ACTIONS_KEPT = timedelta(days=90)


# --- domain knobs ------------------------------------------------------------------------------------------------

PC_STALE_AFTER = timedelta(seconds=90)
PC_OFFLINE_AFTER = timedelta(seconds=180)
# A PC or device away for longer no longer holds up the queue.
PC_AWAY_AFTER = timedelta(minutes=20)
# A running task nobody works on, or a row nobody claims, for longer is given up.
TASK_STALLED_AFTER = timedelta(hours=24)
# How late a sweep may be before the integrity report calls a task stuck.
STUCK_AFTER = timedelta(minutes=5)
# A claim older than this belongs to a worker that died: far beyond any batch, so a slow one is never robbed.
ALARM_CLAIM_KEPT = timedelta(hours=6)

# Messages. Not sent after MESSAGE_LIFE from the later of created_at and scheduled_at: never sent.
MESSAGE_LIFE = timedelta(hours=24)
# Longer than any batch takes (a dispatcher's batches end within its task's timeout), so a living call is never doubted.
MESSAGE_LEASE = timedelta(minutes=3)
# Accepted by the provider but no receipt; None where no receipt is to be expected and accepted is final.
RECEIPT_TIMEOUT: dict[str, timedelta | None] = {
    "push": timedelta(hours=72),
    "email": None,
    "sms": timedelta(hours=72),
    "kakao_talk": timedelta(hours=72),
    "in_app": timedelta(hours=72),
}
CONVERSION_WINDOW = timedelta(days=30)
FAILED_KEPT = timedelta(days=90)
CIRCUIT_OPEN = timedelta(minutes=5)
CIRCUIT_FAILURES = 10
MESSAGES_KEPT = timedelta(days=730)


# --- providers of messages ---------------------------------------------------------------------------------------

# The e-mail services that django-anymail speaks to; their credentials are ANYMAIL_… under its documented names.
ESPS = (
    "anymail-brevo", "anymail-mailersend", "anymail-mailgun", "anymail-mailjet", "anymail-mailtrap", "anymail-mandrill",
    "anymail-postal", "anymail-postmark", "anymail-resend", "anymail-sendgrid", "anymail-sparkpost",
    "anymail-unisender_go",
)  # fmt: skip
# Who can carry which type of subscription; `console` and `null` carry any. InAppMessage needs nobody.
CARRIERS: dict[str, tuple[str, ...]] = {
    "iOSPush": ("apns", "fcm"),
    "AndroidPush": ("fcm",),
    "Email": ("smtp", *ESPS),
    "SMS": ("twilio", "nhn", "solapi"),
    "KakaoTalk": ("nhn", "solapi"),
    "InAppMessage": (),
}


def providers(text: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for word in words(text):
        kind, _equals, name = (part.strip() for part in word.partition("="))
        if kind not in CARRIERS or kind in chosen:
            raise ValueError(f"expected each of {', '.join(CARRIERS)} at most once, not {word!r}")
        known = (*CARRIERS[kind], "console", "null")
        if name not in known:
            raise ValueError(f"{kind} is carried by one of {', '.join(known)}, not {name!r}")
        chosen[kind] = name
    return chosen


def loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(text: str) -> str:
    clean = url("http", "https")(text)
    parts = urlsplit(clean)
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc or "?" in text or "#" in text:
        raise ValueError("expected scheme and host only, such as https://api.example.com")
    if parts.scheme == "http" and not loopback(str(parts.hostname)):
        raise ValueError("plain http only to loopback; expected https")
    return clean


def credential(text: str) -> str:
    """Goes into a header or a path, so it holds neither blanks nor control characters."""
    if not re.fullmatch(r"[!-~]{1,500}", text):
        raise ValueError("expected printable characters without blanks")
    return text


def mailbox(text: str) -> str:
    address = parseaddr(text)[1]
    if not text.isprintable() or not re.fullmatch(r"[^@\s<>]+@[^@\s<>]+", address):
        raise ValueError("expected an e-mail address, with or without a name before it")
    return text


def smtp_url(text: str) -> dict[str, Any]:
    parts = urlsplit(text)
    query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    if (
        parts.scheme not in ("smtp", "smtps")
        or not parts.hostname
        or parts.path.strip("/")
        or query.keys() - {"starttls"}
    ):
        raise ValueError("expected smtp[s]://[user:password@]host:port[?starttls=1]")
    refuse_port_zero(parts)
    starttls = boolean(query["starttls"][0]) if query else False
    if starttls and parts.scheme == "smtps":
        raise ValueError("smtps is encrypted from the start, starttls does not go with it")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if bool(user) != bool(password):
        raise ValueError("user and password come together")
    # A password never crosses a network in the clear.
    starttls = starttls or (parts.scheme == "smtp" and bool(password) and not loopback(parts.hostname))
    port = parts.port or {"smtps": 465, "smtp": 587 if starttls else 25}[parts.scheme]
    tls = "smtps" if parts.scheme == "smtps" else "starttls" if starttls else ""
    return {"host": parts.hostname, "port": port, "user": user, "password": password, "tls": tls}


def contents(text: str) -> str:
    """The value itself or the path of a file that holds it."""
    if text.startswith(("{", "-----BEGIN")):
        return text.replace("\\n", "\n") if text.startswith("-") else text
    try:
        return Path(text).expanduser().read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"neither the value itself nor a readable file: {getattr(error, 'strerror', error)}") from None


def service_account(text: str) -> dict[str, str]:
    try:
        account = json.loads(contents(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    wanted = ("project_id", "client_email", "private_key", "token_uri")
    if not isinstance(account, dict) or not all(isinstance(account.get(key), str) and account[key] for key in wanted):
        raise ValueError(f"expected a service account with {', '.join(wanted)}")
    _private_key(account["private_key"], rsa.RSAPrivateKey, "an RSA")
    target = urlsplit(url("http", "https")(account["token_uri"]))
    if target.scheme == "http" and not loopback(str(target.hostname)):
        raise ValueError("token_uri: plain http only to loopback")
    return account


def signing_key(text: str) -> str:
    pem = contents(text)
    _private_key(pem, ec.EllipticCurvePrivateKey, "an elliptic-curve")
    return pem


def _private_key(pem: str, kind: type, name: str) -> None:
    try:
        key = load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("the private key is not readable PEM") from None
    if not isinstance(key, kind):
        raise ValueError(f"the private key is not {name} key")


def ca_file(text: str) -> str:
    try:
        ssl.create_default_context(cafile=text)
    except (OSError, ssl.SSLError):
        raise ValueError(f"{text!r} is not a readable file of certificates") from None
    return text


def seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text, re.ASCII) or not low <= float(text) <= high:
            raise ValueError(f"expected seconds from {low:g} to {high:g}, not {text!r}")
        return float(text)

    return parse


PROVIDERS: dict[str, str] = env("PROVIDERS", providers, {})
FCM_BASE_URL = env("FCM_BASE_URL", base_url, "https://fcm.googleapis.com")
FCM_CREDENTIALS: dict[str, str] = env("FCM_CREDENTIALS", service_account, {})
APNS_BASE_URL = env("APNS_BASE_URL", base_url, "https://api.push.apple.com")
APNS_KEY = env("APNS_KEY", signing_key, "")
APNS_KEY_ID = env("APNS_KEY_ID", credential, "")
APNS_TEAM_ID = env("APNS_TEAM_ID", credential, "")
APNS_TOPIC = env("APNS_TOPIC", credential, "")
SMTP_URL: dict[str, Any] = env("SMTP_URL", smtp_url, {})
EMAIL_FROM = env("EMAIL_FROM", mailbox, f"no-reply@{urlsplit(PUBLIC_URL).hostname}")
TWILIO_BASE_URL = env("TWILIO_BASE_URL", base_url, "https://api.twilio.com")
TWILIO_ACCOUNT_SID = env("TWILIO_ACCOUNT_SID", credential, "")
TWILIO_AUTH_TOKEN = env("TWILIO_AUTH_TOKEN", credential, "")
TWILIO_FROM = env("TWILIO_FROM", credential, "")
NHN_KAKAO_BASE_URL = env("NHN_KAKAO_BASE_URL", base_url, "https://kakaotalk-bizmessage.api.nhncloudservice.com")
NHN_KAKAO_APPKEY = env("NHN_KAKAO_APPKEY", credential, "")
NHN_KAKAO_SECRET = env("NHN_KAKAO_SECRET", credential, "")
NHN_KAKAO_SENDER_KEY = env("NHN_KAKAO_SENDER_KEY", credential, "")
NHN_SMS_BASE_URL = env("NHN_SMS_BASE_URL", base_url, "https://sms.api.nhncloudservice.com")
NHN_SMS_APPKEY = env("NHN_SMS_APPKEY", credential, "")
NHN_SMS_SECRET = env("NHN_SMS_SECRET", credential, "")
NHN_SMS_FROM = env("NHN_SMS_FROM", credential, "")
NHN_WEBHOOK_SIGNATURE = env("NHN_WEBHOOK_SIGNATURE", credential, "")
SOLAPI_BASE_URL = env("SOLAPI_BASE_URL", base_url, "https://api.solapi.com")
SOLAPI_API_KEY = env("SOLAPI_API_KEY", credential, "")
SOLAPI_API_SECRET = env("SOLAPI_API_SECRET", credential, "")
SOLAPI_FROM = env("SOLAPI_FROM", credential, "")
SOLAPI_PF_ID = env("SOLAPI_PF_ID", credential, "")
SOLAPI_WEBHOOK_SECRET = env("SOLAPI_WEBHOOK_SECRET", credential, "")
PROVIDER_CA_FILE = env("PROVIDER_CA_FILE", ca_file, "")
PROVIDER_TIMEOUT = env("PROVIDER_TIMEOUT", seconds(0.1, 30), 15.0)
WEBHOOK_ALLOW_PRIVATE = env("WEBHOOK_ALLOW_PRIVATE", boolean, False)
ANYMAIL = {name[8:]: value for name, value in os.environ.items() if name.startswith("ANYMAIL_") and value.strip()}

NEEDED = {
    "fcm": ["FCM_CREDENTIALS"],
    "apns": ["APNS_KEY", "APNS_KEY_ID", "APNS_TEAM_ID", "APNS_TOPIC"],
    "smtp": ["SMTP_URL"],
    "twilio": ["TWILIO_ACCOUNT_SID", "TWILIO_AUTH_TOKEN", "TWILIO_FROM"],
    "KakaoTalk=nhn": ["NHN_KAKAO_APPKEY", "NHN_KAKAO_SECRET", "NHN_KAKAO_SENDER_KEY"],
    "SMS=nhn": ["NHN_SMS_APPKEY", "NHN_SMS_SECRET", "NHN_SMS_FROM"],
    "solapi": ["SOLAPI_API_KEY", "SOLAPI_API_SECRET"],
    "SMS=solapi": ["SOLAPI_FROM"],
    "KakaoTalk=solapi": ["SOLAPI_PF_ID"],
}
for _kind, _carrier in PROVIDERS.items():
    for _name in (*NEEDED.get(_carrier, ()), *NEEDED.get(f"{_kind}={_carrier}", ())):
        if not globals()[_name]:
            raise ImproperlyConfigured(f"{_name}: required by {_kind}={_carrier} of PROVIDERS")


# --- the admin ---------------------------------------------------------------------------------------------------

UNFOLD = {
    "SITE_TITLE": "Signalbox",
    "SITE_HEADER": "Signalbox",
    "SITE_SUBHEADER": _("Outreach that heals itself"),
    "SITE_SYMBOL": "cell_tower",
    # A little lighter than its own, which as text on a dark ground is short of WCAG's contrast.
    "COLORS": {"primary": {"500": "oklch(66.5% .235 304.5)"}},
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("console/favicon.svg")}],
    "SHOW_HISTORY": True,
    "SHOW_VIEW_ON_SITE": False,
    "SHOW_LANGUAGES": True,
    "DASHBOARD_CALLBACK": "config.console.dashboard",
    "SIDEBAR": {"show_search": True, "show_all_applications": False, "navigation": "config.console.navigation"},
}


# --- logs --------------------------------------------------------------------------------------------------------

LOGGING_CONFIG = "config.observe.configure_logging"
LOGGING = {"format": LOG_FORMAT}
