"""Which applications a client acts for."""

from typing import Any

from django.db.models import QuerySet

from config.errors import Invalid
from config.rest import SEE_ALL_TENANTS
from messaging.models import Application
from messaging.services import Sender


def applications_of(user: Any) -> QuerySet[Application]:
    return Application.objects.all() if user.has_perm(SEE_ALL_TENANTS) else Application.objects.filter(members=user)


def sender_of(user: Any) -> Sender:
    return Sender(home=user.pk) if user.has_perm(SEE_ALL_TENANTS) else Sender(user.pk)


def chosen_application(user: Any, slug: str | None) -> Application:
    """The one named, else the client's only one."""
    rows = applications_of(user)
    if slug is not None:
        found = rows.filter(slug=slug).first()
        if found is None:
            raise Invalid("There is no such application.", code="does_not_exist", attr="application")
        return found
    own = list(Application.objects.filter(members=user)[:2]) or list(rows[:2])
    if len(own) != 1:
        raise Invalid("Name the application.", code="required", attr="application")
    return own[0]
