from datetime import datetime
from uuid import UUID

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from uuid_utils.compat import uuid7


def key() -> "models.UUIDField[str | UUID, UUID]":
    """UUIDv7 from the app; SQL written by hand may leave it out."""
    return models.UUIDField(
        primary_key=True, default=uuid7, db_default=models.Func(function="gen_random_uuid"), editable=False
    )


def created() -> "models.DateTimeField[str | datetime, datetime]":
    return models.DateTimeField(_("created"), db_default=Now(), editable=False)
