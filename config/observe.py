"""Request ids, logs, health, metrics: what the outside sees of the process."""

import logging
import logging.config
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from django.utils.functional import empty
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
CANARY_FRESH = 90
# How `up` introduces itself when it asks, every few seconds, whether the web server answers.
PROBER = "signalbox-up"
PROBED = ("/healthz", "/readyz")
log = structlog.get_logger("http")

# Nothing that names a person or opens a door belongs in a log line.
SECRETS = re.compile(
    r"(?P<ip>\bip=[0-9A-Fa-f.:]*[0-9A-Fa-f])"
    r"|(?P<email>(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.-]+)"
    r"|(?P<phone>\+\d{7,15}\b)"
    r"|(?P<token>(?i:token|bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,})"
    r"|(?P<pair>(?i:\"?(?:password|secret|token|authorization)\"?\s*[=:]\s*)\"?[^\s\",}]+)"
)


# PostgreSQL says in it what the row holds that it refuses: content and address of a message.
DETAIL = re.compile(r"\nDETAIL:.*?(?=\n\nThe above exception|\n\nDuring handling|\Z)", re.DOTALL)


def redact(text: str) -> str:
    return SECRETS.sub(lambda match: f"[{match.lastgroup}]", DETAIL.sub("", text))


def _redact_event(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    # Django's own lines carry the request, whose text is its address with the query string.
    kept = {key: value for key, value in event.items() if key != "request"}
    return {key: redact(value) if isinstance(value, str) else value for key, value in kept.items()}


class FaultsOnly(logging.Filter):
    """Each request has its line from RequestMiddleware: of Django's own only exceptions are news, and their text is
    the path, which may hold a link's token."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = "exception", ()
        return record.exc_info is not None


class Told:
    """A stream whose lines become lines of the log."""

    def __init__(self, name: str) -> None:
        self.log = structlog.get_logger(name)

    def write(self, text: str) -> None:
        if text.strip():
            self.log.info(text.strip())


def configure_logging(config: dict[str, Any]) -> None:
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    json = config["format"] == "json"
    renderer = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    formatter = {
        "()": structlog.stdlib.ProcessorFormatter,
        "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        "foreign_pre_chain": [structlog.stdlib.ExtraAdder(), *shared],
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": formatter},
            "filters": {"faults": {"()": FaultsOnly}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"handlers": ["stderr"], "level": "INFO"},
            "loggers": {
                "django.server": {"handlers": ["stderr"], "propagate": False},
                "django-q": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
                "httpx": {"level": "WARNING"},
                "django.request": {"level": "ERROR", "filters": ["faults"]},
                # Without handlers of their own, which would write past the redaction.
                "django": {"handlers": [], "level": "INFO"},
                "gunicorn.error": {"handlers": [], "level": "WARNING", "propagate": True},
            },
        }
    )
    if settings.SENTRY_DSN:
        import sentry_sdk

        # Local variables hold what is written to people, and their addresses.
        sentry_sdk.init(
            dsn=settings.SENTRY_DSN,
            send_default_pii=False,
            max_request_body_size="never",
            include_local_variables=False,
            before_send=_redact_report,
        )


def _redact_report(report: Any, _hint: Any) -> Any:
    for raised in (report.get("exception") or {}).get("values") or ():
        raised["value"] = redact(str(raised.get("value") or ""))
    return report


def client_of(request: HttpRequest) -> str | None:
    """Who asked, if answering took knowing it: to look it up now is a query more, and without a database a failure."""
    user = getattr(request, "user", None)
    return None if getattr(user, "_wrapped", None) is empty else getattr(user, "username", "") or None


class RequestMiddleware:
    """A request id on every answer and log line, and one line per request."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        asked = request.headers.get("X-Request-ID", "")
        request_id = asked if REQUEST_ID.match(asked) else uuid4().hex
        started = time.monotonic()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            response = self.get_response(request)
            route = getattr(getattr(request, "resolver_match", None), "route", None)
            probe = request.path_info in PROBED and request.headers.get("User-Agent") == PROBER
            client = client_of(request)
            quiet = (probe or client in settings.QUIET_CLIENTS) and response.status_code < 300
            tell = log.debug if quiet else log.info
            tell(
                "request",
                method=request.method,
                route=route,
                status=response.status_code,
                client=client,
                ms=round((time.monotonic() - started) * 1000),
            )
        response["X-Request-ID"] = request_id
        return response


@csrf_exempt
@require_safe
def healthz(_request: HttpRequest) -> HttpResponse:
    return JsonResponse({"status": "ok"})


@csrf_exempt
@require_safe
def readyz(_request: HttpRequest) -> HttpResponse:
    checks = {"database": False, "migrations": False, "worker": False}
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")  # an open connection may be that of a server long gone
        checks["database"] = True
        checks["migrations"] = migrations() <= MigrationRecorder(connection).applied_migrations().keys()
        age = canary_age()
        checks["worker"] = age is not None and age < CANARY_FRESH
    except (DatabaseError, InterfaceError):
        log.warning("not_ready", exc_info=True)
    ready = all(checks.values())
    return JsonResponse(
        {"status": "ok" if ready else "unavailable", "checks": checks},
        status=200 if ready else 503,
        headers={} if ready else {"Retry-After": "5"},
    )


@cache
def migrations() -> frozenset[tuple[str, str]]:
    """Those of this release. Read once: importing all of them is a hundred times what asking the database takes."""
    return frozenset(MigrationLoader(None).disk_migrations)


def canary_age() -> float | None:
    """Seconds since a worker last answered, on any machine."""
    from config.models import Canary

    last = Canary.objects.exclude(answered_at=None).order_by("-answered_at").first()
    return (timezone.now() - last.answered_at).total_seconds() if last and last.answered_at else None


def metrics(_request: HttpRequest) -> HttpResponse:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return HttpResponse(generate_latest(registry), content_type="text/plain; version=0.0.4; charset=utf-8")


class Collector:
    """Computed on scrape, so there is nothing to keep in step; every label value is always present."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        from config.integrity import report

        yield from _states()
        yield from _sweeps()
        yield _gauge(
            "integrity_violations",
            "Rows that break an invariant",
            ["invariant", "severity"],
            [([r.name, r.severity], r.count) for r in report()],
        )
        age = canary_age()
        yield _gauge(
            "worker_canary_age_seconds",
            "Since a worker last answered",
            [],
            [([], age if age is not None else float("inf"))],
        )
        for extra in _contributed():
            yield from extra()


def _contributed() -> Iterator[Callable[[], Iterator[GaugeMetricFamily]]]:
    """Apps add their own gauges as `metrics()` in their integrity.py."""
    from importlib import import_module
    from importlib.util import find_spec

    from django.apps import apps

    for app in apps.get_app_configs():
        if app.name == "config" or not find_spec(f"{app.name}.integrity"):
            continue
        if extra := getattr(import_module(f"{app.name}.integrity"), "metrics", None):
            yield extra


def _gauge(name: str, text: str, labels: list[str], values: list[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"signalbox_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


# Above this a count per state comes from the planner's statistics: a scrape must not read ten million rows.
EXACT_BELOW = 200_000


def _states() -> Iterator[GaugeMetricFamily]:
    from config.statemachine import Swept, graphs

    rows: list[tuple[list[str], float]] = []
    ages: list[tuple[list[str], float]] = []
    for graph in graphs():
        counts = state_counts(graph)
        for state in graph.states:
            rows.append(([graph.model._meta.app_label, graph.name, state], counts.get(state, 0)))
            owner = getattr(graph.model, "liveness", {}).get(state)
            if isinstance(owner, Swept) and counts.get(state):
                age = _oldest(graph, state, owner)
                ages.append(([graph.model._meta.app_label, graph.name, state], age))
    yield _gauge("rows", "Rows per state", ["app", "kind", "state"], rows)
    yield _gauge("oldest_age_seconds", "Age of the oldest row in a state", ["app", "kind", "state"], ages)


def state_counts(graph: Any) -> dict[str, int]:
    table, column = graph.model._meta.db_table, graph.field.column
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [table])
        estimate = cursor.fetchone()[0]
        if estimate < EXACT_BELOW:
            cursor.execute(f'SELECT "{column}", count(*) FROM "{table}" GROUP BY 1')
            return dict(cursor.fetchall())
        cursor.execute(
            "SELECT unnest(most_common_vals::text::text[]), unnest(most_common_freqs) FROM pg_stats"
            " WHERE schemaname = current_schema() AND tablename = %s AND attname = %s",
            [table, column],
        )
        return {state: round(share * estimate) for state, share in cursor.fetchall()}


def _oldest(graph: Any, state: str, owner: Any) -> float:
    rows = graph.model._default_manager.filter(**{graph.field.name: state})
    if owner.oldest is not None:
        found = owner.oldest(rows)
    else:
        found = rows.order_by(owner.since).values_list(owner.since, flat=True).exclude(**{owner.since: None}).first()
    return max(0.0, (timezone.now() - found).total_seconds()) if found else 0.0


def _sweeps() -> Iterator[GaugeMetricFamily]:
    from config.models import SweepRun

    latest = SweepRun.objects.exclude(ended_at=None).order_by("name", "-started_at").distinct("name")
    ended = {run.name: (run, run.ended_at) for run in latest if run.ended_at}
    now = timezone.now()
    ages = [([n], (now - ended[n][1]).total_seconds() if n in ended else float("inf")) for n in settings.SWEEPS]
    known = [(n, *ended[n]) for n in settings.SWEEPS if n in ended]
    seconds = [([n], (ended_at - run.started_at).total_seconds()) for n, run, ended_at in known]
    outcomes = [([n, outcome], count) for n, run, _at in known for outcome, count in run.counts.items()]
    failed = [([n], float(bool(run.error))) for n, run, _at in known]
    lately = SweepRun.objects.filter(started_at__gt=now - timedelta(hours=1))
    runs = lately.values_list("name").annotate(runs=Count("id"), errors=Count("id", filter=~Q(error="")))
    counted = {name: {"ok": total - errors, "error": errors} for name, total, errors in runs}
    ran = [([n, o], counted.get(n, {}).get(o, 0)) for n in settings.SWEEPS for o in ("ok", "error")]
    yield _gauge("sweep_runs", "Runs begun in the last hour", ["sweep", "outcome"], ran)
    yield _gauge("sweep_last_run_age_seconds", "Since the sweep last ended", ["sweep"], ages)
    yield _gauge("sweep_seconds", "How long the last run took", ["sweep"], seconds)
    yield _gauge("sweep_rows", "Outcomes of the last run", ["sweep", "outcome"], outcomes)
    yield _gauge("sweep_failed", "Whether the last run told of an error", ["sweep"], failed)
