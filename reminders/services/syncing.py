"""What clients push and pull: pages in, changed alarms and tombstones out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from config.errors import Missing
from messaging.models import Application
from reminders.models import Alarm, DeletedAlarm, Page
from reminders.triggers import CHANGES, CHANGES_EPOCH

# As many alarms and as many tombstones does one pull bring, and those that share the last one's time.
PULLED = 5000


@dataclass(frozen=True)
class PageText:
    id: str
    title: str | None = None
    body: str | None = None


@dataclass(frozen=True)
class PageChanges:
    user_id: str
    created: Sequence[PageText] = field(default_factory=list)
    updated: Sequence[PageText] = field(default_factory=list)
    deleted: Sequence[str] = field(default_factory=list)

    def texts(self) -> Iterator[tuple[str, PageText]]:
        for name in ("created", "updated"):
            for index, item in enumerate(getattr(self, name)):
                yield f"{name}.{index}.id", item


@transaction.atomic
def sync_pages(application: Application, changes: PageChanges) -> dict[str, int]:
    """All or nothing. Counts what happened to pages, whichever list asked for it."""
    made = make_missing(application, changes)
    pages = lock_pages(application, changes)
    done = Counter(created=0, updated=0)
    for attr, item in changes.texts():
        page = pages.get(item.id)
        if page is None:
            raise Missing(_("There is no such page."), attr=attr)
        done["created" if item.id in made or page.deleted_at else "updated"] += 1
        made.discard(item.id)
        page.title = page.title if item.title is None else item.title
        page.body = page.body if item.body is None else item.body
        page.deleted_at = None
    gone = [key for key in dict.fromkeys(changes.deleted) if key in pages and not pages[key].deleted_at]
    write_texts([pages[key] for key in {item.id for _attr, item in changes.texts()} - set(gone)])
    return {**done, "deleted": delete_pages(gone)}


def make_missing(application: Application, changes: PageChanges) -> set[str]:
    """Empty pages for the ids nobody has, and which those are; RETURNING after DO NOTHING is beyond bulk_create.

    In the order of the ids, so two clients with the same pages wait for each other and not in a circle.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO pages (id, application_id, user_id) SELECT DISTINCT id, %s::uuid, %s"
            " FROM unnest(%s::text[]) AS wanted (id) ORDER BY id ON CONFLICT DO NOTHING RETURNING id",
            [application.pk, changes.user_id, [item.id for _attr, item in changes.texts()]],
        )
        return {key for (key,) in cursor.fetchall()}


def lock_pages(application: Application, changes: PageChanges) -> dict[str, Page]:
    wanted = {*changes.deleted, *(item.id for _attr, item in changes.texts())}
    owned = Page.objects.filter(pk__in=wanted, application=application, user_id=changes.user_id)
    return {page.pk: page for page in owned.select_for_update().order_by("pk")}


def write_texts(pages: list[Page]) -> None:
    """One statement; a CASE per page, as bulk_update would write it, is slow for pages of a megabyte."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE pages"
            " SET title = given.title, body = given.body, deleted_at = NULL, updated_at = statement_timestamp()"
            " FROM unnest(%s::text[], %s::text[], %s::text[]) AS given (id, title, body) WHERE pages.id = given.id",
            [[page.pk for page in pages], [page.title for page in pages], [page.body for page in pages]],
        )


def delete_pages(ids: list[str]) -> int:
    """The page stays as a mark that its id is its user's; its alarm goes."""
    # Locked in the order in which a batch records them: a DELETE takes them as they lie.
    alarms = list(Alarm.objects.filter(page__in=ids).select_for_update().order_by("pk").values_list("pk", flat=True))
    Alarm.objects.filter(pk__in=alarms)._raw_delete(connection.alias)  # type: ignore[attr-defined]
    return Page.objects.filter(pk__in=ids).update(title="", body="", deleted_at=Now(), updated_at=Now())


@dataclass(frozen=True)
class Pull:
    changed: list[Alarm]
    deleted: list[UUID]
    until: datetime


def pull_changes(applications: Any, user_id: str | None, since: datetime | None, most: int = PULLED) -> Pull:
    """Alarms and tombstones after `since`, of these applications or, with None, of all.

    What is too much for one pull is left for the next: `until` then ends with what was brought.
    """
    until = settled_until()
    mine = Q() if applications is None else Q(application__in=applications)
    if user_id is not None:
        mine &= Q(user_id=user_id)
    changed = Alarm.objects.filter(mine & (Q(updated_at__gt=since) if since else Q()))
    # An id that was deleted and made again is alive.
    alive = Alarm.objects.filter(pk=OuterRef("pk"))
    deleted = DeletedAlarm.objects.filter(mine & (Q(deleted_at__gt=since) if since else Q())).exclude(Exists(alive))
    full = [*nth_time(changed, "updated_at", most), *nth_time(deleted, "deleted_at", most)]
    if full:
        changed, deleted = changed.filter(updated_at__lte=min(full)), deleted.filter(deleted_at__lte=min(full))
    return Pull(
        list(changed.order_by("updated_at", "pk")),
        list(deleted.order_by("deleted_at", "pk").values_list("pk", flat=True)),
        min([until, *full]),
    )


def nth_time(rows: QuerySet[Any], name: str, n: int) -> list[datetime]:
    """The time of the n-th row, none where there are fewer."""
    return list(rows.order_by(name).values_list(name, flat=True)[n - 1 : n])


def settled_until() -> datetime:
    """A time before every change that is not committed yet, so whoever asks again from there misses nothing.

    The clock is read before the locks: a writer that holds none yet will stamp its rows later than that.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
        cursor.execute(
            "SELECT min(objid::bigint) FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND objsubid = 2"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND pid IS DISTINCT FROM pg_backend_pid()",
            [CHANGES],
        )
        second = cursor.fetchone()[0]
    if second is not None:
        now = min(now, datetime.fromtimestamp(CHANGES_EPOCH + second, UTC))
    return now - timedelta(microseconds=1)
