"""Lists over tables of millions: walked by the key, never counted, never waited for long."""

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import DataError, OperationalError, connection, transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _

PATIENCE_MS = 3000
CURSORS = ("after", "before")


class CursorPaginator(Paginator):
    template_name = "admin/messaging/cursor.html"


class CursorChangeList(ChangeList):
    """Newest first. `after` and `before` are the keys at which the page shown ends and begins."""

    older = newer = ""

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in CURSORS}

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Another filter starts at the newest again."""
        return super().get_query_string({**dict.fromkeys(CURSORS), **(new_params or {})}, remove)

    def get_results(self, request: HttpRequest) -> None:
        back = "before" in request.GET
        key = self._key(request.GET.get("before" if back else "after"))
        rows = self._page(request, key, back)
        more = len(rows) > self.list_per_page
        rows = rows[: self.list_per_page]
        self.result_list = rows[::-1] if back else rows
        self.result_count = len(rows)
        self.full_result_count = self.result_count  # unfold shows them where they differ
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.paginator = CursorPaginator(rows, self.list_per_page)
        if rows and (back or more):
            self.older = self.get_query_string({"after": self.result_list[-1].pk})
        if rows and (more if back else key is not None):
            self.newer = self.get_query_string({"before": self.result_list[0].pk})

    def _key(self, text: str | None) -> Any:
        try:
            return None if text is None else self.model._meta.pk.to_python(text)
        except (ValueError, ValidationError) as error:
            raise IncorrectLookupParameters(error) from error

    def _page(self, request: HttpRequest, key: Any, back: bool) -> list[Any]:
        rows: QuerySet[Any] = self.queryset.order_by("pk" if back else "-pk")
        if key is not None:
            rows = rows.filter(**{"pk__gt" if back else "pk__lt": key})
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(PATIENCE_MS)])
                found = list(rows[: self.list_per_page + 1])
                cursor.execute("SELECT set_config('statement_timeout', '0', true)")
                return found
        except OperationalError:
            messages.warning(request, _("So few rows match that looking for them takes too long. Add a filter."))
            return []
        except DataError as error:  # a filter's value that no column can hold
            raise IncorrectLookupParameters(error) from error


def as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text.strip())
    except ValueError:
        return None
