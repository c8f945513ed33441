"""Who may do what, and which rows are theirs."""

from typing import Any
from uuid import UUID

from django.db.models import Model, QuerySet
from django.http import Http404
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from config.rest.bodies import StrictSerializer

SEE_ALL_TENANTS = "config.see_all_tenants"
VERBS = {"POST": "add", "PUT": "change", "PATCH": "change", "DELETE": "delete"}


class ModelPermissions(BasePermission):
    """Django's permissions of the view's model, reading included.

    `required_permissions = {action: "app.codename"}` of the view wins; without actions the key is the method ("post").
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        if not (request.user and request.user.is_authenticated):
            return False
        required = getattr(view, "required_permissions", None) or {}
        method = "get" if request.method == "HEAD" else str(request.method).lower()
        action = getattr(view, "action", None) or method
        if action in required:
            return request.user.has_perm(required[action])
        if not callable(getattr(view, action, None)) or action in ("options", "metadata"):
            return True  # nothing to protect: a 405, or the description of the endpoint
        model = model_of(view)
        if model is not None:
            return request.user.has_perm(f"{model._meta.app_label}.{verb(request, view)}_{model._meta.model_name}")
        return not required

    # Rows that are not the client's are absent from the queryset: 404, not 403.


def model_of(view: Any) -> type[Model] | None:
    queryset = getattr(view, "queryset", None)
    return getattr(view, "model", None) if queryset is None else queryset.model


def verb(request: Request, view: Any) -> str:
    if request.method in SAFE_METHODS:
        return "view"
    # POST …/{id}/<transition>/ changes a row, it does not add one.
    if request.method == "POST" and getattr(view, "detail", None):
        return "change"
    return VERBS[str(request.method)]


class UUIDLookup:
    """An id that is no UUID is an unknown row. Checked after 401 and 403, for every detail action."""

    lookup_value_regex = "[^/]+"
    lookup_field: str
    lookup_url_kwarg: str | None
    kwargs: dict[str, Any]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        name = self.lookup_url_kwarg or self.lookup_field
        if name in self.kwargs and not is_uuid(self.kwargs[name]):
            raise Http404

    def bare_object(self) -> Any:
        """The row, for an action whose body may be left out and has nothing in it."""
        row = self.get_object()  # type: ignore[attr-defined]
        StrictSerializer().run_validation(self.request.data)  # type: ignore[attr-defined]
        return row


def is_uuid(text: Any) -> bool:
    try:
        return str(UUID(str(text))) == str(text).lower()
    except ValueError:
        return False


class TenantQuerysetMixin:
    """Only rows of the user's applications, reached over `tenant_path` ("" when the row is the application)."""

    tenant_path = "application"
    request: Any

    def get_queryset(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset()  # type: ignore[misc]
        if getattr(self, "swagger_fake_view", False):
            return rows.none()
        user = self.request.user
        if user.has_perm(SEE_ALL_TENANTS):
            return rows
        path = f"{self.tenant_path}__members" if self.tenant_path else "members"
        return rows.filter(**{path: user})
