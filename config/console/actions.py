"""Admin actions that first show what they will touch, then call a service."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import slugify
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminTextareaWidget

from config.console.audit import record_human_actions
from config.console.panels import counts_text
from config.errors import DomainError

SHOWN = 20
BATCH = 500
LIMIT = 50_000

Preview = Callable[[models.QuerySet[Any]], Iterable[Any]]
Run = Callable[[list[Any], Any, str], Mapping[str, int]]


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=500,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 3}),
        help_text=gettext_lazy("Kept with every row in its timeline."),
    )


def confirmed_action(
    description: Any,
    preview: Preview | None,
    run: Run,
    needs_reason: bool = True,
    permissions: Sequence[str] = (),
    name: str = "",
    icon: str = "bolt",
    danger: bool = False,
    when: Callable[[Any], bool] = lambda row: True,
) -> Any:
    """An entry for ModelAdmin.actions. `run(ids, actor, reason)` is a service and gets at most 500 keys at a time.

    `preview(rows)` says a line per row of the (at most 20) rows shown. `permissions` are full names ("app.codename").
    `when(row)` says for which rows it is a button on their page; what it may do is the service's to say.
    The keys are frozen when the page is shown: what was confirmed is what is touched, however the filter's result
    moves meanwhile. Each batch and its audit rows are one transaction, so `run` must not call the network. More rows
    than one batch are worked off in the background, on a page that shows the progress.
    """

    def action(model_admin: Any, request: HttpRequest, queryset: models.QuerySet[Any]) -> HttpResponse | None:
        if not request.user.has_perms(permissions):  # type: ignore[union-attr]
            raise PermissionDenied
        confirmed = request.POST.get("confirmed") == "yes"
        form = ReasonForm(request.POST if confirmed else None) if needs_reason else None
        keys = _confirmed_keys(model_admin, request) if confirmed else _selected_keys(queryset)
        if len(keys) > LIMIT:
            text = _("More than %(limit)s rows are selected: narrow the filter.") % {"limit": f"{LIMIT:,}"}
            messages.error(request, text)
            return None
        if not confirmed or (form is not None and not form.is_valid()):
            return _ask(model_admin, request, keys, form)
        reason = form.cleaned_data["reason"] if form else ""
        # The keys came back from the browser: only rows this person may see are touched.
        allowed = [key for page in _batches(keys) for key in _visible(model_admin, request, page)]
        if len(allowed) > BATCH:
            return _hand_over(request, model_admin, allowed, reason)
        try:
            done = _execute(model_admin, request, allowed, reason)
        except DomainError as error:
            messages.error(request, f"{description}: {error.detail}")
            return _back(request)
        _tell(request, description, done + Counter(gone=len(keys) - len(allowed)))
        return _back(request)

    def _ask(model_admin: Any, request: HttpRequest, keys: list[Any], form: forms.Form | None) -> HttpResponse:
        shown = model_admin.get_queryset(request).filter(pk__in=keys[:SHOWN]).order_by("pk")
        lines = list(preview(shown) if preview else map(str, shown))
        context = {
            **model_admin.admin_site.each_context(request),
            "title": description,
            "opts": model_admin.model._meta,
            "lines": lines,
            "count": len(keys),
            "more": len(keys) - len(lines),
            "keys": ",".join(map(str, keys)),
            "first_key": keys[0] if keys else "",
            "action_name": action.__name__,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "back": request.POST.get("back", ""),
            "form": form,
            "icon": icon,
            "danger": danger,
        }
        return TemplateResponse(request, "admin/console/confirm.html", context)

    @transaction.atomic
    def _execute(model_admin: Any, request: HttpRequest, keys: list[Any], reason: str) -> Counter[str]:
        done = Counter(run(keys, request.user, reason))
        record_human_actions(request.user, model_admin.model, keys, str(description), reason)
        return done

    def _hand_over(request: HttpRequest, model_admin: Any, keys: list[Any], reason: str) -> HttpResponse:
        from config.console import bulk

        started = bulk.start(request, action, model_admin.model, str(description), keys, reason)
        return HttpResponseRedirect(reverse("admin:config_bulkaction_change", args=[started.pk]))

    action.__name__ = name or slugify(f"{run.__module__}.{run.__qualname__}".replace(".", "_")).replace("-", "_")
    action.short_description = description  # type: ignore[attr-defined]
    action.needs = tuple(permissions)  # type: ignore[attr-defined]
    action.run = run  # type: ignore[attr-defined]
    action.when = when  # type: ignore[attr-defined]
    return action


def can_become(*targets: str) -> Callable[[Any], bool]:
    """For `when`: the row's graph leads from where it is to one of these states."""
    from config.console.liveness import state_fields
    from config.statemachine import graph

    def allowed(row: Any) -> bool:
        return any(
            (str(getattr(row, name)), target) in graph(type(row), name).edges
            for name in state_fields(type(row))
            for target in targets
        )

    return allowed


def _batches(keys: list[Any]) -> Iterable[list[Any]]:
    return (keys[start : start + BATCH] for start in range(0, len(keys), BATCH))


def _visible(model_admin: Any, request: HttpRequest, keys: list[Any]) -> Iterable[Any]:
    return model_admin.get_queryset(request).filter(pk__in=keys).order_by("pk").values_list("pk", flat=True)


def _selected_keys(queryset: models.QuerySet[Any]) -> list[Any]:
    return list(queryset.values_list("pk", flat=True)[: LIMIT + 1])


def _confirmed_keys(model_admin: Any, request: HttpRequest) -> list[Any]:
    """One field for all keys: django refuses a form of more than 1,000 fields."""
    field = model_admin.model._meta.pk
    try:
        return [field.to_python(key) for key in request.POST.get("keys", "").split(",") if key]
    except ValidationError:
        raise PermissionDenied from None


def _back(request: HttpRequest) -> HttpResponse | None:
    """To the page whose button was pressed; None is the list."""
    back = request.POST.get("back", "")
    inside = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith(reverse("admin:index"))
    return HttpResponseRedirect(back) if inside else None


def _tell(request: HttpRequest, description: Any, done: Counter[str]) -> None:
    messages.success(request, _("%(action)s: %(counts)s") % {"action": description, "counts": counts_text(done)})
