"""Run a sweep: take one of its slots, work in pages within a budget, isolate poison rows, record the run."""

import inspect
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import UUID

import structlog
from croniter import croniter
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.db import OperationalError, connection, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.module_loading import import_string
from uuid_utils.compat import uuid7

log = structlog.get_logger("sweep")
PAGE = 500
ERRORS_TOLD = 20
CANCELLED = "57014"  # SQLSTATE query_canceled
MARGIN = 10.0  # seconds between the end of the longest statement and the kill of its task


@dataclass
class Sweep:
    """What a sweep function gets: the time to go by, and the loops that keep it bounded, fair and safe."""

    name: str
    now: datetime
    dry_run: bool = False
    pinned: bool = False
    run_id: UUID = field(default_factory=uuid7)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    ends: float = field(default_factory=lambda: time.monotonic() + settings.SWEEP_BUDGET.total_seconds())
    cursor: dict[str, list[str]] = field(default_factory=dict)

    def clock(self) -> datetime:
        """The time it is, for work that goes on while the sweep runs; with --now it stands still."""
        return self.now if self.pinned else timezone.now()

    def has_time(self) -> bool:
        return time.monotonic() < self.ends

    def repeat(self, step: Callable[[], Mapping[str, int]]) -> None:
        """Call `step` until it finds nothing to do or the time is up. For steps that claim their own rows."""
        while self.has_time():
            done = step()
            self.counts.update(done)
            if not sum(done.values()) or self.dry_run:
                return

    def pages(
        self,
        rows: models.QuerySet[Any],
        handle: Callable[[list[Any]], Mapping[str, int]],
        *,
        label: str = "",
        by: str | None = None,
        size: int = PAGE,
        failed: Callable[[Any, Exception], None] | None = None,
    ) -> None:
        """Hand the keys of `rows` to `handle` in pages ordered by (`by`, pk), each in its own transaction.

        `handle` locks what it changes (SKIP LOCKED) and checks the predicate again. When the time is up the next run
        goes on behind the last page, so the same first rows never starve the rest; `by` must not be nullable.
        `failed` is told of a poison row, to put it out of the way.
        """

        def walk(after: Any, until: Any) -> bool:
            return self._walk(rows, lambda keys: self._isolate(keys, handle, failed), label, by, size, after, until)

        resume = self.cursor.pop(label, None)
        if resume and not walk(after=resume, until=None):
            return
        walk(after=None, until=resume)

    def _walk(self, rows: Any, work: Any, label: str, by: str | None, size: int, after: Any, until: Any) -> bool:
        while self.has_time():
            page = list(_keyset(rows, by, after, until).values_list(*([by, "pk"] if by else ["pk"]))[:size])
            if page:
                work([row[-1] for row in page])
                after = [_text(value) for value in page[-1]]
            if len(page) < size:
                return True
        self.cursor[label] = after or []
        self.counts["out_of_time"] += 1
        return False

    def _isolate(
        self,
        keys: list[Any],
        handle: Callable[[list[Any]], Mapping[str, int]],
        failed: Callable[[Any, Exception], None] | None,
    ) -> None:
        """A page that fails is halved until the poison row stands alone; it is recorded and the rest goes on."""
        try:
            with transaction.atomic():
                done = handle(keys)
        except Exception as error:
            if isinstance(error, OperationalError) and not connection.is_usable():
                raise
            if len(keys) > 1 and _cancelled(error) and not self.has_time():
                # Halves of what took so long would take long too: told as one, and the next run goes on behind it.
                self.fail(f"{keys[0]} … {keys[-1]}", error)
                return
            if len(keys) > 1:
                middle = len(keys) // 2
                self._isolate(keys[:middle], handle, failed)
                self._isolate(keys[middle:], handle, failed)
                return
            self.fail(keys[0], error)
            if failed:
                failed(keys[0], error)
        else:
            self.counts.update(done)

    def fail(self, key: Any, error: Exception) -> None:
        self.counts["error"] += 1
        if len(self.errors) < ERRORS_TOLD:
            self.errors.append(f"{key}: {_told(error)}")
        log.exception("poison_row", sweep=self.name, key=str(key), exc_info=error)


def _told(error: Exception) -> str:
    """The first line: the database's next ones are what the row holds."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _cancelled(error: Exception) -> bool:
    return getattr(error.__cause__, "sqlstate", None) == CANCELLED


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _keyset(rows: models.QuerySet[Any], by: str | None, after: Any, until: Any) -> models.QuerySet[Any]:
    rows = rows.order_by(*([by, "pk"] if by else ["pk"]))
    if after:
        rows = rows.filter(_beyond(by, after, "gt"))
    if until:
        rows = rows.exclude(_beyond(by, until, "gt"))
    return rows


def _beyond(by: str | None, key: list[str], how: str) -> Q:
    if by is None:
        return Q(**{f"pk__{how}": key[-1]})
    value = parse_datetime(key[0]) or key[0]
    return Q(**{f"{by}__{how}": value}) | Q(**{by: value, f"pk__{how}": key[-1]})


def run(
    name: str, *, now: datetime | None = None, dry_run: bool = False, wait: bool = False, used: float = 0
) -> dict[str, Any] | None:
    """Run one sweep and record it. None when all its slots are taken and `wait` is off.

    `used` are the seconds its task has spent before.
    """
    plan = settings.SWEEPS[name]
    function = import_string(_path(name))
    sweep = Sweep(name, now or timezone.now(), dry_run, pinned=now is not None)
    sweep.ends = time.monotonic() + _budget(name)
    with _slot(name, plan.get("parallel", 1), wait) as slot:
        if slot is None:
            return None
        with structlog.contextvars.bound_contextvars(sweep=name, run_id=str(sweep.run_id)), _patience(name, used):
            return _rehearse(sweep, function) if dry_run else _perform(sweep, function, slot)


def _budget(name: str) -> float:
    budget: timedelta = settings.SWEEPS[name].get("budget", settings.SWEEP_BUDGET)
    return budget.total_seconds()


def _timeout() -> int:
    """Seconds after which django-q2 kills a task."""
    return int(str(settings.Q_CLUSTER["timeout"]))


@contextmanager
def _patience(name: str, used: float) -> Iterator[None]:
    """Whatever statement begins within the budget ends before django-q2 kills the task: a kill would leave the server
    at work on it, and the run without its error."""
    longest = _timeout() - used - _budget(name) - MARGIN
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('statement_timeout', %s, false)", [str(max(1000, int(longest * 1000)))])
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET statement_timeout")


def _rehearse(sweep: Sweep, function: Callable[[Sweep], None]) -> dict[str, Any]:
    """The real work in a transaction that is rolled back; sweeps that call out look at `dry_run` themselves."""
    started_at, error = timezone.now(), ""
    try:
        with transaction.atomic():
            function(sweep)
            transaction.set_rollback(True)
    except Exception as failure:
        error = _told(failure)
        log.exception("sweep_failed")
    return _summary(sweep, started_at, error)


def _perform(sweep: Sweep, function: Callable[[Sweep], None], slot: int) -> dict[str, Any]:
    from config.models import SweepRun

    started_at = timezone.now()
    # We hold the slot, so an unfinished run of it is one whose process died.
    SweepRun.objects.filter(name=sweep.name, slot=slot, ended_at=None).update(ended_at=started_at, error="died")
    last = SweepRun.objects.filter(name=sweep.name, slot=slot).order_by("-started_at").first()
    sweep.cursor = dict(last.cursor) if last else {}
    record = SweepRun.objects.create(
        id=sweep.run_id,
        name=sweep.name,
        now=sweep.now,
        started_at=started_at,
        cursor=sweep.cursor,
        slot=slot,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    error = ""
    try:
        function(sweep)
    except Exception as failure:
        error = _told(failure)
        log.exception("sweep_failed")
    summary = _summary(sweep, started_at, error)
    record.ended_at, record.counts, record.error, record.cursor = (
        timezone.now(),
        dict(sweep.counts),
        summary["error"] or "",
        sweep.cursor,
    )
    record.save(update_fields=["ended_at", "counts", "error", "cursor"])
    tell = log.info if summary["error"] or any(sweep.counts.values()) else log.debug
    tell("sweep_ended", counts=dict(sweep.counts), error=summary["error"])
    return summary


def _summary(sweep: Sweep, started_at: datetime, error: str) -> dict[str, Any]:
    return {
        "sweep": sweep.name,
        "now": sweep.now.isoformat(),
        "dry_run": sweep.dry_run,
        "started_at": started_at.isoformat(),
        "ended_at": timezone.now().isoformat(),
        "counts": dict(sweep.counts),
        "error": "; ".join([error, *sweep.errors] if error else sweep.errors) or None,
    }


@contextmanager
def _slot(name: str, parallel: int, wait: bool) -> Iterator[int | None]:
    """One of the sweep's slots, as a courtesy between runs (SKIP LOCKED is what makes them safe), freed by a crash."""
    slot = _take_slot(name, parallel)
    patience = time.monotonic() + 2 * settings.SWEEP_BUDGET.total_seconds()
    while slot is None and wait and time.monotonic() < patience:
        time.sleep(0.1)
        slot = _take_slot(name, parallel)
    if slot is None and wait:
        # Whoever asked by hand gets an answer; the rows themselves are protected.
        yield parallel
        return
    try:
        yield slot
    finally:
        if slot is not None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtext(%s), %s)", [name, slot])


def _take_slot(name: str, parallel: int) -> int | None:
    with connection.cursor() as cursor:
        for slot in range(parallel):
            cursor.execute("SELECT pg_try_advisory_lock(hashtext(%s), %s)", [name, slot])
            if cursor.fetchone()[0]:
                return slot
    return None


def tick(name: str) -> None:
    """The task django-q2 runs. A nudge that came while the sweep ran is honoured before leaving.

    Within the budget, and while another run fits in: a task that ran on and on under load would be killed at its
    timeout in the middle of its work, so a later nudge gets a task of its own.
    """
    began, used = time.monotonic(), 0.0
    enough = min(_budget(name), _timeout() - _budget(name) - 2 * MARGIN)
    while True:
        _take_nudge(name)
        ran = run(name, used=used) or _handed_over(name, used)
        if ran is None or ran["error"] is not None or not _nudged(name):
            return
        used = time.monotonic() - began
        if used >= enough:
            _enqueue(name)
            return


def _handed_over(name: str, used: float) -> dict[str, Any] | None:
    """All slots are taken: put the nudge back for whoever holds them, who looks for it after letting go of the slot.

    Hence the second try: had they looked before, their slot is free now.
    """
    from config.models import Nudge

    Nudge.objects.filter(name=name).update(asked=True)
    return run(name, used=used)


def nudge(name: str) -> None:
    """Ask for a tick right after the commit. Asked once however many commits ask; the schedule is the guarantee.

    After the commit, because a tick that starts before it would not see the rows; not inside it, because the flag's
    row would make every writer wait for every other.
    """
    transaction.on_commit(lambda: _ask(name), robust=True)


def _ask(name: str) -> None:
    # Under load somebody has asked already. Whoever takes that request does so after our commit, so it is ours as well.
    if _nudged(name):
        return
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO sweep_nudges (name, asked) VALUES (%s, true)"
            " ON CONFLICT (name) DO UPDATE SET asked = true WHERE NOT sweep_nudges.asked",
            [name],
        )
        if cursor.rowcount:
            _enqueue(name)


def _enqueue(name: str) -> None:
    from django_q.tasks import async_task

    async_task("config.sweeping.tick", name, task_name=f"nudge {name}")


def _take_nudge(name: str) -> None:
    from config.models import Nudge

    Nudge.objects.filter(name=name, asked=True).update(asked=False)


def _nudged(name: str) -> bool:
    """By hand: every write that nudges asks this, and the ORM takes longer to build the question than to ask it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM sweep_nudges WHERE name = %s AND asked", [name])
        return cursor.fetchone() is not None


def _path(name: str) -> str:
    app, _dot, function = name.partition(".")
    return f"{app}.sweeps.{function}"


def written() -> Iterator[str]:
    """The names of the sweeps there are: what in an app's sweeps.py takes a Sweep."""
    for app in apps.get_app_configs():
        if not find_spec(f"{app.name}.sweeps"):
            continue
        module = import_module(f"{app.name}.sweeps")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            first = next(iter(inspect.signature(function).parameters.values()), None)
            if function.__module__ == module.__name__ and name[0] != "_" and first and first.annotation is Sweep:
                yield f"{app.name}.{name}"


@register()
def check_sweeps(**_kwargs: Any) -> list[CheckMessage]:
    """Each name in settings.SWEEPS is a function, each cron a schedule, and no sweep is forgotten."""
    errors: list[CheckMessage] = [
        Error(f"SWEEPS: {name} is missing, so nobody would run it", id="config.E009")
        for name in written()
        if name not in settings.SWEEPS
    ]
    for name, plan in settings.SWEEPS.items():
        try:
            import_string(_path(name))
        except ImportError as error:
            errors.append(Error(f"SWEEPS: {name}: {error}", id="config.E006"))
        if not croniter.is_valid(plan["cron"]):
            errors.append(Error(f"SWEEPS: {name}: {plan['cron']!r} is not a cron schedule", id="config.E007"))
        if _timeout() - _budget(name) <= 2 * MARGIN:
            text = f"SWEEPS: {name}: the budget must leave {2 * MARGIN:g} s of Q_CLUSTER's timeout"
            errors.append(Error(text, id="config.E008"))
    return errors
