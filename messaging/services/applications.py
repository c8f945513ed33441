from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_slug

from config.errors import Invalid
from messaging.models import Application


def join_application(user: Any, slug: str) -> Application:
    """Make the client a member of the application, which is created when missing."""
    try:
        validate_slug(slug)
    except ValidationError:
        raise Invalid(f"{slug!r} is not a slug: letters, digits, - and _ only", attr="application") from None
    if len(slug) > 64:
        raise Invalid("an application's slug has at most 64 characters", attr="application")
    application, _created = Application.objects.get_or_create(slug=slug, defaults={"name": slug})
    application.members.add(user)
    return application
