"""Branches, the locks on them, and who waits. Every time is the database's: an application's clock decides nothing."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property, reduce
from operator import and_
from typing import Any

from django.db import models
from django.db.models import Case, Expression, ExpressionWrapper, F, Func, Q, Value, When, Window
from django.db.models.functions import Coalesce, Length, Now, RowNumber
from django.db.models.lookups import Exact, GreaterThan, LessThanOrEqual
from django.utils.translation import gettext_lazy as _
from django_fsm import transition
from uuid_utils.compat import uuid7

from config.statemachine import Rests, StateField, Swept, WaitsFor, state_triggers
from config.triggers import append_only
from locks.triggers import HEARTBEATS_KEPT, EndedAt, FenceOnGrant, FenceOnlyGrows, SilentAfter

NAME, TYPE, RESOURCE, REASON = 200, 100, 255, 2000
LAST = datetime(9999, 12, 30, tzinfo=UTC)
GRACE = 3  # intervals of silence a heartbeat may miss
LONGEST_DELAY = 60  # seconds


class LockType(models.TextChoices):
    INDEXING = "INDEXING", _("indexing")
    MIGRATION = "MIGRATION", _("migration")
    BACKUP = "BACKUP", _("backup")
    MAINTENANCE = "MAINTENANCE", _("maintenance")
    MANUAL = "MANUAL", _("manual")


class Scope(models.TextChoices):
    """From wide to narrow."""

    BRANCH = "BRANCH", _("branch")
    RESOURCE_TYPE = "RESOURCE_TYPE", _("resource type")
    RESOURCE = "RESOURCE", _("resource")


def within(name: str, *bounds: Any) -> Q:
    return Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__range": bounds})


def times_within(*names: str) -> Q:
    """NULL or times that Python can hold: one row with an infinite one would make every list unreadable."""
    return reduce(and_, [within(name, datetime(1, 1, 2, tzinfo=UTC), LAST) for name in names])


class BranchQuerySet(models.QuerySet["Branch"]):
    def unindexed(self) -> "BranchQuerySet":
        """LOCKED_FOR_WRITE, though no full indexing is held: a lock-admin's word, or a lock that ended by SQL."""
        full = BranchLock.objects.active().filter(
            branch=models.OuterRef("pk"), lock_type=LockType.INDEXING, lock_scope=Scope.BRANCH
        )
        return self.filter(~models.Exists(full), state=Branch.State.LOCKED_FOR_WRITE)


class Branch(models.Model):
    class State(models.TextChoices):
        ACTIVE = "ACTIVE", _("active")
        LOCKED_FOR_WRITE = "LOCKED_FOR_WRITE", _("locked for write")
        READY = "READY", _("ready")
        ARCHIVED = "ARCHIVED", _("archived")
        ERROR = "ERROR", _("error")

    id = models.BigAutoField(primary_key=True)
    name = models.TextField(_("name"), unique=True)
    state = StateField(_("state"), choices=State.choices, default=State.ACTIVE, max_length=20)
    fence = models.BigIntegerField(_("fence"), default=0, db_default=0)
    indexing_started_at = models.DateTimeField(_("indexing started"), null=True, blank=True)
    indexing_completed_at = models.DateTimeField(_("indexing completed"), null=True, blank=True)
    indexing_service = models.TextField(_("indexing service"), null=True, blank=True)
    created_at = models.DateTimeField(_("created"), db_default=Now())

    objects = BranchQuerySet.as_manager()
    liveness = {
        State.ACTIVE: Rests(_("This is where a branch lives.")),
        State.LOCKED_FOR_WRITE: WaitsFor(_("the end of its indexing lock, which the sweeps watch")),
        State.READY: WaitsFor(_("whoever merges or goes on writing")),
        State.ERROR: WaitsFor(_("a lock-admin")),
    }

    class Meta:
        db_table = "branches"
        verbose_name = _("branch")
        verbose_name_plural = _("branches")
        triggers = [*state_triggers("state"), FenceOnlyGrows(name="fence_only_grows")]
        constraints = [
            models.CheckConstraint(
                name="branches_name",
                condition=Q(name__regex=r"^[^/[:space:][:cntrl:]]+(/[^/[:space:][:cntrl:]]+)*$")
                & Q(name__regex=r"^.{1,200}$"),
            ),
            models.CheckConstraint(
                name="branches_times",
                condition=times_within("indexing_started_at", "indexing_completed_at", "created_at"),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_ready(self) -> bool:
        return self.state == self.State.READY

    @transition(field=state, source=[State.ACTIVE, State.ERROR], target=State.LOCKED_FOR_WRITE)
    def lock_for_write(self) -> None: ...

    @transition(field=state, source=State.LOCKED_FOR_WRITE, target=State.READY)
    def complete(self) -> None: ...

    @transition(field=state, source=[State.LOCKED_FOR_WRITE, State.READY, State.ERROR], target=State.ACTIVE)
    def activate(self) -> None: ...

    @transition(field=state, source=[State.ACTIVE, State.READY], target=State.ARCHIVED)
    def archive(self) -> None: ...

    @transition(field=state, source=[State.ACTIVE, State.LOCKED_FOR_WRITE], target=State.ERROR)
    def fail(self) -> None: ...


def overlapping(scope: str, resource_type: str | None, resource_id: str | None) -> Q:
    """Of rows with a scope of their own in the same branch: those that share something with this one.

    Spread out, so that each arm is one look into branch_locks_held however many locks the branch has.
    """
    if scope == Scope.BRANCH:
        return Q()
    whole_branch = Q(resource_type__isnull=True)
    if scope == Scope.RESOURCE_TYPE:
        return whole_branch | Q(resource_type=resource_type)
    whole_type = Q(resource_type=resource_type, resource_id__isnull=True)
    return whole_branch | whole_type | Q(resource_type=resource_type, resource_id=resource_id)


# The time at which the statement reached the server: fresh after a wait for a row, and one for all its rows.
NOW = Now()


def seconds(number: Any) -> Func:
    return Func(
        number,
        function="make_interval",
        template="%(function)s(secs => %(expressions)s)",
        output_field=models.DurationField(),
    )


def truth(condition: Q) -> Any:
    return ExpressionWrapper(condition, output_field=models.BooleanField())


def length_within(name: str, most: int) -> Q:
    """NULL or 1 to `most` characters: bounds what the exclusion's index has to hold."""
    return Q(**{f"{name}__isnull": True}) | Q(GreaterThan(Length(name), 0), LessThanOrEqual(Length(name), most))


SCOPE_FITS = (
    Q(lock_scope="BRANCH", resource_type__isnull=True, resource_id__isnull=True)
    | Q(lock_scope="RESOURCE_TYPE", resource_type__isnull=False, resource_id__isnull=True)
    | Q(lock_scope="RESOURCE", resource_type__isnull=False, resource_id__isnull=False)
)


class Slot(Expression):
    """Where a value goes in a queryset that is compiled once."""

    output_field: Any = models.TextField()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "%s", [self]


class Compiled:
    """The SQL of a queryset with slots, built on first use. On the hot paths building it costs more than running it;
    written by hand instead, the predicates would stand in two places."""

    def __init__(self, make: Callable[[], models.QuerySet[Any]]) -> None:
        self.make = make

    @cached_property
    def parts(self) -> tuple[Any, str, list[Any]]:
        rows = self.make()
        sql, params = rows.query.sql_with_params()
        return rows.model, sql, list(params)

    def __call__(self, **values: Any) -> list[Any]:
        model, sql, params = self.parts
        return list(model.objects.raw(sql, [values[p.name] if isinstance(p, Slot) else p for p in params]))


class LockQuerySet(models.QuerySet["BranchLock"]):
    def active(self) -> "LockQuerySet":
        return self.filter(state=BranchLock.State.ACTIVE)

    def on(self, branch_id: Any) -> "LockQuerySet":
        return self.filter(branch_id=branch_id)

    def sharing(self, scope: str, resource_type: str | None, resource_id: str | None) -> "LockQuerySet":
        return self.filter(overlapping(scope, resource_type, resource_id))

    def clocked(self, now: Any = NOW) -> "LockQuerySet":
        """Both clocks of each lock read: `now`, ttl_expired, heartbeat_expired, heartbeat_health."""
        last = Coalesce("last_heartbeat", "locked_at")
        on = Q(heartbeat_interval__gt=0)
        return self.annotate(
            now=now if hasattr(now, "resolve_expression") else Value(now),
            heard_at=last,
            ttl_expired=truth(Q(expires_at__lt=now)),
            heartbeat_expired=truth(on & Q(heard_at__lt=now - seconds(F("heartbeat_interval") * GRACE))),
            heartbeat_health=Case(
                When(Q(ttl_expired=True) | Q(heartbeat_expired=True), then=Value("critical")),
                When(heartbeat_interval=0, then=Value(None)),
                When(heard_at__gt=now - seconds(F("heartbeat_interval")), then=Value("healthy")),
                default=Value("warning"),
                output_field=models.TextField(null=True),
            ),
        )

    def expired(self, now: Any = NOW) -> "LockQuerySet":
        """Held, but out of time by either clock."""
        return self.active().clocked(now).filter(Q(ttl_expired=True) | Q(heartbeat_expired=True))

    def reapable(self, now: Any = NOW) -> "LockQuerySet":
        """Expired and free for the taking."""
        return self.expired(now).filter(auto_release_enabled=True)

    def blocking(self, now: Any = NOW) -> "LockQuerySet":
        """Held and in force: what stands in the way of others."""
        dead = Q(ttl_expired=True) | Q(heartbeat_expired=True)
        return self.active().clocked(now).filter(Q(auto_release_enabled=False) | ~dead)

    def delaying(self, client: str, now: Any = NOW) -> "LockQuerySet":
        """Expired ones of others whose lock_delay, counted from the instant of expiry, still runs."""
        return (
            self.filter(state=BranchLock.State.EXPIRED, lock_delay__gt=0)
            .exclude(locked_by=client)
            .clocked(now)
            .annotate(delay_ends=F("expired_at") + seconds(F("lock_delay")))
            # The second bound says nothing new, but it is one for the index: of years of expiries the last minute's.
            .filter(delay_ends__gt=now, expired_at__gt=now - seconds(LONGEST_DELAY))
        )

    def foremost(self, most: int, *, of_each: str | None = None) -> "LockQuerySet":
        """Of clocked rows: what is free for the taking, then as they are told: the widest, then the oldest.

        Bounded, because in the way of one request there may be ten thousand. `of_each` bounds per value of a column.
        """
        scopes = [When(lock_scope=scope, then=rank) for rank, scope in enumerate(Scope.values)]
        free = Q(auto_release_enabled=True) & (Q(ttl_expired=True) | Q(heartbeat_expired=True))
        order: list[Any] = [
            Case(When(free, then=0), default=1, output_field=models.IntegerField()),
            Case(*scopes, output_field=models.IntegerField()),
            "locked_at",
            "pk",
        ]
        if of_each is None:
            return self.order_by(*order)[:most]
        return self.annotate(place=Window(RowNumber(), partition_by=of_each, order_by=order)).filter(place__lte=most)

    def worst_first(self) -> "LockQuerySet":
        """Of clocked rows: by health, then by silence."""
        ranks = [When(heartbeat_health=name, then=rank) for rank, name in enumerate(("critical", "warning", "healthy"))]
        return self.order_by(Case(*ranks, default=3, output_field=models.IntegerField()), "heard_at", "pk")  # type: ignore[misc]

    def out_of_ttl(self) -> "LockQuerySet":
        """For the sweep. Served by branch_locks_by_expiry."""
        return self.active().filter(auto_release_enabled=True, expires_at__lt=NOW)

    def maybe_silent(self) -> "LockQuerySet":
        """For the sweep. Served by branch_locks_by_silence: an early bound, so a heartbeat need not move the index."""
        return self.active().filter(auto_release_enabled=True, silent_after__lt=NOW)


class BranchLock(models.Model):
    class State(models.TextChoices):
        ACTIVE = "active", _("active")
        RELEASED = "released", _("released")
        EXPIRED = "expired", _("expired")
        FORCE_RELEASED = "force_released", _("force-released")

    # Set by LockQuerySet.clocked().
    now: Any
    heard_at: Any
    ttl_expired: bool
    heartbeat_expired: bool
    heartbeat_health: str | None

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False, db_default=Func(function="gen_random_uuid"))
    branch = models.ForeignKey(Branch, models.PROTECT, related_name="locks", verbose_name=_("branch"), db_index=False)
    lock_type = models.TextField(_("type"), choices=LockType.choices)
    lock_scope = models.TextField(_("scope"), choices=Scope.choices)
    resource_type = models.TextField(_("resource type"), null=True, blank=True)
    resource_id = models.TextField(_("resource"), null=True, blank=True)
    locked_by = models.TextField(_("holder"))
    reason = models.TextField(_("reason"))
    locked_at = models.DateTimeField(_("locked"), db_default=Now())
    expires_at = models.DateTimeField(_("expires"))
    heartbeat_interval = models.IntegerField(_("heartbeat interval"), default=0, db_default=0)
    last_heartbeat = models.DateTimeField(_("last heartbeat"), null=True, blank=True)
    heartbeat_source = models.TextField(_("heartbeat source"), null=True, blank=True)
    status = models.TextField(_("reported status"), null=True, blank=True)
    progress = models.FloatField(_("progress"), null=True, blank=True)
    estimated_remaining_hours = models.FloatField(_("estimated remaining hours"), null=True, blank=True)
    estimated_at = models.DateTimeField(_("estimated at"), null=True, blank=True)
    auto_release_enabled = models.BooleanField(_("auto-release"), default=True, db_default=True)
    lock_delay = models.FloatField(_("delay after expiry"), default=0, db_default=0)
    fence = models.BigIntegerField(_("fence"), default=0, db_default=0)
    state = StateField(_("state"), choices=State.choices, default=State.ACTIVE, max_length=20)
    released_at = models.DateTimeField(_("ended"), null=True, blank=True)
    released_by = models.TextField(_("ended by"), null=True, blank=True)
    expired_at = models.DateTimeField(_("instant of expiry"), null=True, blank=True)
    metadata: Any = models.JSONField(_("metadata"), default=dict, db_default={}, blank=True)
    ttl_source = models.TextField(_("TTL from"), default="default", db_default="default")
    idempotency_key = models.TextField(null=True, blank=True, editable=False)
    fingerprint = models.TextField(null=True, blank=True, editable=False)
    silent_after = models.DateTimeField(null=True, blank=True, editable=False)

    objects = LockQuerySet.as_manager()
    liveness = {
        State.ACTIVE: Swept("locks.expire_ttls", _("at its expiry, or 3 heartbeats earlier"), since="expires_at"),
    }

    class Meta:
        db_table = "branch_locks"
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        permissions = [
            ("hold_locks", "Can acquire and hold locks"),
            ("administer_locks", "Can force-unlock, take MANUAL locks and act on others' locks"),
        ]
        triggers = [
            *state_triggers("state"),
            FenceOnGrant(name="fence_on_grant"),
            SilentAfter(name="silent_after"),
            EndedAt(name="ended_at"),
        ]
        # The exclusion itself is branch_locks_exclusive of the first migration: ranges over expressions, which Django
        # cannot declare without the extensions we may not need.
        constraints = [
            models.CheckConstraint(
                name="branch_locks_scope_fits",
                condition=SCOPE_FITS,
            ),
            models.CheckConstraint(name="branch_locks_type", condition=Q(lock_type__in=LockType.values)),
            models.CheckConstraint(
                name="branch_locks_ended",
                condition=Q(state="active", released_at__isnull=True)
                | (~Q(state="active") & Q(released_at__isnull=False)),
            ),
            models.CheckConstraint(
                name="branch_locks_limits",
                condition=Q(heartbeat_interval__range=(0, 3600), lock_delay__range=(0, LONGEST_DELAY)) & ~Q(reason=""),
            ),
            models.CheckConstraint(
                name="branch_locks_times",
                condition=times_within(
                    "locked_at", "expires_at", "last_heartbeat", "estimated_at", "released_at", "expired_at"
                ),
            ),
            # No JSON can say NaN or infinity.
            models.CheckConstraint(
                name="branch_locks_progress",
                condition=within("progress", 0, 100) & within("estimated_remaining_hours", 0, 8760),
            ),
            models.CheckConstraint(
                name="branch_locks_lengths",
                condition=length_within("resource_type", TYPE) & length_within("resource_id", RESOURCE),
            ),
        ]
        indexes = [
            models.Index(
                fields=["branch", "resource_type", "resource_id"],
                condition=Q(state="active"),
                name="branch_locks_held",
            ),
            models.Index(
                fields=["expires_at"],
                condition=Q(state="active", auto_release_enabled=True),
                name="branch_locks_by_expiry",
            ),
            models.Index(
                fields=["silent_after"],
                condition=Q(state="active", auto_release_enabled=True, silent_after__isnull=False),
                name="branch_locks_by_silence",
            ),
            models.Index(
                fields=["branch", "expired_at"],
                condition=Q(state="expired", lock_delay__gt=0),
                name="branch_locks_delaying",
            ),
            models.Index(
                fields=["locked_by", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="branch_locks_by_key",
            ),
            models.Index(fields=["branch", "-fence"], name="branch_locks_of_branch"),
        ]

    def __str__(self) -> str:
        parts = [self.lock_type, self.resource_type, self.resource_id]
        return " · ".join(str(part) for part in parts if part)

    @transition(field=state, source=State.ACTIVE, target=State.RELEASED)
    def release(self) -> None: ...

    @transition(field=state, source=State.ACTIVE, target=State.EXPIRED)
    def expire(self) -> None: ...

    @transition(field=state, source=State.ACTIVE, target=State.FORCE_RELEASED)
    def force_release(self) -> None: ...

    @property
    def dead(self) -> bool:
        """Ended or out of time: nothing revives it."""
        return self.state != self.State.ACTIVE or self.ttl_expired or self.heartbeat_expired

    @property
    def reapable(self) -> bool:
        """As the predicate of that name says of rows."""
        return self.state == self.State.ACTIVE and self.auto_release_enabled and self.dead


class EventKind(models.TextChoices):
    ACQUIRED = "ACQUIRED", _("acquired")
    EXTENDED = "EXTENDED", _("extended")
    RELEASED = "RELEASED", _("released")
    EXPIRED_TTL = "EXPIRED_TTL", _("expired (time)")
    EXPIRED_HEARTBEAT = "EXPIRED_HEARTBEAT", _("expired (silence)")
    FORCE_RELEASED = "FORCE_RELEASED", _("force-released")
    CONFLICT = "CONFLICT", _("conflict")
    WAIT_QUEUED = "WAIT_QUEUED", _("queued")
    GRANTED = "GRANTED", _("granted")
    STATE_CHANGED = "STATE_CHANGED", _("state changed")
    HEARTBEAT = "HEARTBEAT", _("heartbeat")


class LockEvent(models.Model):
    Kind = EventKind

    id = models.BigAutoField(primary_key=True)
    branch = models.ForeignKey(Branch, models.PROTECT, related_name="events", verbose_name=_("branch"), db_index=False)
    lock = models.ForeignKey(
        BranchLock, models.PROTECT, related_name="events", verbose_name=_("lock"), null=True, db_index=False
    )
    kind = models.TextField(_("kind"), choices=Kind.choices)
    actor = models.TextField(_("actor"))
    reason = models.TextField(_("reason"), default="", db_default="")
    fence = models.BigIntegerField(_("fence"), null=True)
    details: Any = models.JSONField(_("details"), default=dict, db_default={})
    created_at = models.DateTimeField(_("at"), db_default=Now())

    class Meta:
        db_table = "branch_lock_events"
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")
        triggers = append_only("branch_lock_events", deletable=HEARTBEATS_KEPT)
        constraints = [
            models.CheckConstraint(
                name="branch_lock_events_kind",
                condition=Q(kind__in=EventKind.values),
            ),
            models.CheckConstraint(name="branch_lock_events_times", condition=times_within("created_at")),
        ]
        indexes = [
            models.Index(fields=["lock", "id"], name="branch_lock_events_of_lock"),
            models.Index(fields=["created_at"], condition=Q(kind="CONFLICT"), name="branch_lock_events_conflicts"),
            models.Index(fields=["lock", "-id"], condition=Q(kind="HEARTBEAT"), name="branch_lock_events_beats"),
            models.Index(fields=["branch", "-id"], condition=~Q(kind="HEARTBEAT"), name="branch_lock_events_of_branch"),
        ]

    def __str__(self) -> str:
        return self.kind


# How long a granted lock waits for the request that asked for it, and a place in line for a word of its process.
CLAIM_SECONDS = 10


class WaiterQuerySet(models.QuerySet["LockWaiter"]):
    def queued(self) -> "WaiterQuerySet":
        """Waiting and still wanted; one past its deadline, or whose process died, stands in nobody's way."""
        alive = NOW - seconds(CLAIM_SECONDS)
        return self.filter(state=LockWaiter.State.WAITING, deadline_at__gte=NOW, seen_at__gte=alive)

    def granted(self) -> "WaiterQuerySet":
        """Given a lock that its request has not picked up."""
        return self.filter(state=LockWaiter.State.GRANTED, claimed_at=None)

    def unanswered(self) -> "WaiterQuerySet":
        """In line, or granted in time to be picked up."""
        queued = Q(state=LockWaiter.State.WAITING, deadline_at__gte=NOW)
        ready = Q(state=LockWaiter.State.GRANTED, claimed_at=None, lock__state="active", lock__expires_at__gte=NOW)
        return self.filter(queued | ready)

    def overdue(self) -> "WaiterQuerySet":
        """Past the deadline by more than a living request needs to say so itself."""
        return self.filter(state=LockWaiter.State.WAITING, deadline_at__lt=NOW - seconds(CLAIM_SECONDS))


class LockWaiter(models.Model):
    """A request that waits its turn. `terms` are those of the lock it wants."""

    class State(models.TextChoices):
        WAITING = "waiting", _("waiting")
        GRANTED = "granted", _("granted")
        TIMED_OUT = "timed_out", _("timed out")
        GONE = "gone", _("gone")

    id = models.BigAutoField(primary_key=True)
    branch = models.ForeignKey(Branch, models.PROTECT, related_name="waiters", verbose_name=_("branch"), db_index=False)
    client = models.TextField(_("client"))
    lock_type = models.TextField(_("type"), choices=LockType.choices)
    lock_scope = models.TextField(_("scope"), choices=Scope.choices)
    resource_type = models.TextField(_("resource type"), null=True)
    resource_id = models.TextField(_("resource"), null=True)
    terms: Any = models.JSONField(_("terms"), default=dict, db_default={})
    idempotency_key = models.TextField(null=True)
    state = StateField(
        _("state"),
        choices=State.choices,
        default=State.WAITING,
        max_length=20,
    )
    created_at = models.DateTimeField(_("queued"), db_default=Now())
    deadline_at = models.DateTimeField(_("waits until"))
    seen_at = models.DateTimeField(_("last sign of life"), db_default=Now())
    claimed_at = models.DateTimeField(_("picked up"), null=True)
    lock = models.ForeignKey(
        BranchLock, models.PROTECT, related_name="waiters", verbose_name=_("lock"), null=True, db_index=False
    )

    objects = WaiterQuerySet.as_manager()
    liveness = {
        State.WAITING: Swept("locks.expire_heartbeats", _("10 s after its deadline"), since="deadline_at"),
        State.GRANTED: Rests(_("The lock is its request's; not picked up within 10 s, it expires.")),
    }

    class Meta:
        db_table = "branch_lock_waiters"
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")
        triggers = state_triggers("state")
        # What a waiter asks for must be a lock the database takes: it is granted in others' transactions, and one row
        # that cannot be read or granted would stop every release on its branch.
        constraints = [
            models.CheckConstraint(name="branch_lock_waiters_scope_fits", condition=SCOPE_FITS),
            models.CheckConstraint(name="branch_lock_waiters_type", condition=Q(lock_type__in=LockType.values)),
            models.CheckConstraint(
                name="branch_lock_waiters_lengths",
                condition=length_within("resource_type", TYPE) & length_within("resource_id", RESOURCE),
            ),
            models.CheckConstraint(
                name="branch_lock_waiters_times",
                condition=times_within("created_at", "deadline_at", "seen_at", "claimed_at"),
            ),
            models.CheckConstraint(
                name="branch_lock_waiters_terms",
                condition=Q(Exact(Func("terms", function="jsonb_typeof", output_field=models.TextField()), "object")),
            ),
        ]
        indexes = [
            models.Index(fields=["branch", "id"], condition=Q(state="waiting"), name="branch_lock_waiters_queue"),
            models.Index(fields=["lock"], condition=Q(lock__isnull=False), name="branch_lock_waiters_of_lock"),
            models.Index(
                fields=["client", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="branch_lock_waiters_by_key",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.client}: {self.lock_scope}"

    @transition(field=state, source=State.WAITING, target=State.GRANTED)
    def grant(self) -> None: ...

    @transition(field=state, source=State.WAITING, target=State.TIMED_OUT)
    def time_out(self) -> None: ...

    @transition(field=state, source=[State.WAITING, State.GRANTED], target=State.GONE)
    def vanish(self) -> None: ...
