"""What must hold of locks. The clock is the database's, so the time handed in decides nothing here."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, TextField, Value
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _
from prometheus_client.core import GaugeMetricFamily

from config.integrity import Invariant
from locks import services
from locks.models import NOW, Branch, BranchLock, LockEvent, LockType, LockWaiter, Scope

# Both sweeps have passed twice by then.
UNSWEPT = timedelta(minutes=11)
PAGE = 500


def expired_but_blocking(_now: datetime) -> QuerySet[BranchLock]:
    return BranchLock.objects.expired().filter(auto_release_enabled=False)


def unswept(_now: datetime) -> QuerySet[BranchLock]:
    return BranchLock.objects.reapable(NOW - UNSWEPT)


def fence_going_back(_now: datetime) -> QuerySet[Branch]:
    """Served by branch_locks_of_branch: one look per branch, one per active lock."""
    locks = BranchLock.objects.filter(branch=OuterRef("pk"))
    twin = BranchLock.objects.filter(branch=OuterRef("branch"), fence=OuterRef("fence")).exclude(pk=OuterRef("pk"))
    return Branch.objects.filter(
        Exists(locks.filter(fence__gt=OuterRef("fence"))) | Exists(locks.active().filter(Exists(twin)))
    )


def lock_on_closed_branch(_now: datetime) -> QuerySet[BranchLock]:
    """A whole ERROR branch may be locked for its repair, but not by a lock from before the error."""
    change = LockEvent.objects.filter(branch=OuterRef("branch"), kind=LockEvent.Kind.STATE_CHANGED).order_by("-id")
    rows = BranchLock.objects.active().annotate(
        last_state=Coalesce(
            Subquery(change.values_list(KeyTextTransform("to", "details"))[:1]), Value("", TextField())
        ),
        changed_at=Subquery(change.values("created_at")[:1]),
    )
    repair = Q(lock_scope=Scope.BRANCH, branch__state=Branch.State.ERROR, last_state=Branch.State.ERROR)
    closed = Q(branch__state__in=[Branch.State.ARCHIVED, Branch.State.ERROR])
    return rows.filter(closed).exclude(repair & Q(changed_at__lte=F("locked_at")))


def locked_without_indexing(_now: datetime) -> QuerySet[Branch]:
    return Branch.objects.unindexed()


def waiter_past_deadline(_now: datetime) -> QuerySet[LockWaiter]:
    return LockWaiter.objects.overdue()


def _pages(rows: QuerySet[Any]) -> Iterator[list[Any]]:
    keys = list(rows.order_by("pk").values_list("pk", flat=True))
    for start in range(0, len(keys), PAGE):
        yield keys[start : start + PAGE]


def expire_unswept(now: datetime) -> Counter[str]:
    done: Counter[str] = Counter()
    for page in _pages(unswept(now)):
        done.update(services.reap(page))
    return done


def free_closed_branches(now: datetime) -> Counter[str]:
    done: Counter[str] = Counter()
    for page in _pages(lock_on_closed_branch(now)):
        ended = services.force_unlock("integrity", "the branch is closed", lock_ids=page)
        done["force_released"] += len(ended)
    return +done


def reactivate_branches(now: datetime) -> Counter[str]:
    done: Counter[str] = Counter()
    for page in _pages(locked_without_indexing(now)):
        done["activated"] += services.reactivate_unindexed(page, "integrity", "no indexing lock is held")
    return +done


def drop_waiters(now: datetime) -> Counter[str]:
    done: Counter[str] = Counter()
    for page in _pages(waiter_past_deadline(now)):
        done["gone"] += services.drop_overdue_waiters(page)
    return +done


INVARIANTS = [
    Invariant(
        "locks.expired_but_blocking",
        "warning",
        _("A lock without auto-release has expired and still blocks: its holder or a lock-admin must end it."),
        expired_but_blocking,
    ),
    Invariant(
        "locks.expired_unswept",
        "warning",
        _("An expired lock blocks nobody, but no sweep has written its end down for more than 11 minutes."),
        unswept,
        expire_unswept,
        _("write their expiry down"),
    ),
    Invariant(
        "locks.fence_going_back",
        "error",
        _("A branch has granted a fence above its own, or one fence twice: a stale holder could pass for a new one."),
        fence_going_back,
    ),
    Invariant(
        "locks.lock_on_closed_branch",
        "error",
        _("An ARCHIVED or ERROR branch holds a lock from before it was closed."),
        lock_on_closed_branch,
        free_closed_branches,
        _("force-unlock them"),
    ),
    Invariant(
        "locks.locked_without_indexing",
        "warning",
        _("A branch is LOCKED_FOR_WRITE, but no indexing lock is held whose end would change that."),
        locked_without_indexing,
        reactivate_branches,
        _("set it ACTIVE"),
    ),
    Invariant(
        "locks.waiter_past_deadline",
        "warning",
        _("A waiter is past its deadline and its request never said so: its process died."),
        waiter_past_deadline,
        drop_waiters,
        _("take them out of the line"),
    ),
]


def metrics() -> Iterator[GaugeMetricFamily]:
    active = BranchLock.objects.active()
    by_type = dict(active.values_list("lock_type").annotate(count=Count("pk")))
    yield _gauge(
        "locks_active", "Locks held, by type", "type", {kind: by_type.get(kind, 0) for kind in LockType.values}
    )
    health = active.clocked().values_list("heartbeat_health")  # type: ignore[misc]
    by_health = dict(health.annotate(count=Count("pk")))
    names = {"healthy": "healthy", "warning": "warning", "critical": "critical", None: "off"}
    yield _gauge("locks_health", "Locks held, by health", "health", {n: by_health.get(k, 0) for k, n in names.items()})
    whole = active.filter(lock_scope=Scope.BRANCH).values("branch").distinct().count()
    yield _gauge("locks_branches_locked", "Branches with a lock on all of them", None, {"": whole})
    yield _gauge("locks_waiting", "Requests in line", None, {"": LockWaiter.objects.queued().count()})
    hour = LockEvent.objects.filter(kind=LockEvent.Kind.CONFLICT, created_at__gt=NOW - timedelta(hours=1))
    yield _gauge("locks_conflicts_last_hour", "Acquires refused in the last hour", None, {"": hour.count()})


def _gauge(name: str, text: str, label: str | None, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"signalbox_{name}", text, labels=[label] if label else [])
    for value, number in values.items():
        family.add_metric([value] if label else [], number)
    return family
