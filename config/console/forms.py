"""Forms that services write: what a service refuses stands in the form, beside what was typed."""

from io import BytesIO
from typing import Any

from django import forms
from django.contrib import messages
from django.db import models, transaction
from django.forms.fields import InvalidJSONInput
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from rest_framework.exceptions import APIException

from config.console.base import ConsoleAdmin
from config.errors import DomainError
from config.rest import StrictJSONParser


class StorableJSON(forms.JSONField):
    """What the REST API takes as JSON, which is what PostgreSQL can store; anything else is shown again as typed."""

    def to_python(self, value: Any) -> Any:
        if value in self.empty_values:
            return None
        try:
            return StrictJSONParser().parse(BytesIO(value.encode()))
        except APIException:
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid") from None

    def bound_data(self, data: Any, initial: Any) -> Any:
        return data if data is None else InvalidJSONInput(data)


class RefusableForm(forms.ModelForm):  # type: ignore[type-arg]
    refusal: DomainError | None = None

    def clean(self) -> dict[str, Any]:
        found: dict[str, Any] = super().clean() or self.cleaned_data
        if self.refusal is not None:
            self.add_error(self.refusal.attr if self.refusal.attr in self.fields else None, str(self.refusal.detail))
        return found


class ServiceAdmin(ConsoleAdmin):
    """`create` and `change` call the services; a write gate, a conflict or a bad value is told in the form."""

    form = RefusableForm

    def create(self, request: HttpRequest, fields: dict[str, Any]) -> models.Model:
        raise NotImplementedError

    def change(self, request: HttpRequest, obj: Any, changes: dict[str, Any]) -> None:
        raise NotImplementedError

    def remove(self, request: HttpRequest, obj: Any) -> None:
        raise NotImplementedError

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form = super().get_form(request, obj, change=change, **kwargs)
        form.refusal = getattr(request, "refusal", None)
        return form

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """A refusal has rolled everything back: the same request once more, and the form is found wanting."""
        try:
            return super().changeform_view(request, *args, **kwargs)  # type: ignore[no-any-return]
        except DomainError as refusal:
            request.refusal = refusal  # type: ignore[attr-defined]
            return super().changeform_view(request, *args, **kwargs)  # type: ignore[no-any-return]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if change:
            self.change(request, obj, {name: form.cleaned_data[name] for name in form.changed_data})
        else:
            obj.pk = self.create(request, dict(form.cleaned_data)).pk
            obj._state.adding = False

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self._told(request, super().delete_view, *args, **kwargs)

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self._told(request, super().changelist_view, *args, **kwargs)

    def _told(self, request: HttpRequest, view: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return view(request, *args, **kwargs)  # type: ignore[no-any-return]
        except DomainError as refusal:
            messages.error(request, str(refusal.detail))
            return HttpResponseRedirect(request.get_full_path())

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        self.remove(request, obj)

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> None:
        """All of them or, where one is refused, none."""
        for obj in queryset:
            self.remove(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """What goes along is the service's concern."""
        return [str(obj) for obj in objs], {}, set(), []
