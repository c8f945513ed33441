from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from knox.models import AuthToken

from config.errors import DomainError
from devices.services import assign_agent
from messaging.services import join_application

MOST_DAYS = 36_500
NAME_LENGTH = 150


class Command(BaseCommand):
    help = "Create or extend an API client and print a new token, alone, on stdout."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--group", action="append", required=True, metavar="G")
        parser.add_argument("--application", action="append", default=[], metavar="SLUG")
        parser.add_argument("--pc", metavar="PC-01")
        parser.add_argument("--expires", type=int, default=365, metavar="DAYS")

    def handle(self, *args: Any, **options: Any) -> None:
        groups = {group.name: group for group in Group.objects.all()}
        if unknown := [name for name in options["group"] if name not in groups]:
            raise CommandError(f"no such group: {', '.join(unknown)}; there are {', '.join(sorted(groups))}")
        if not 1 <= options["expires"] <= MOST_DAYS:
            raise CommandError(f"--expires: from 1 to {MOST_DAYS} days")
        if not options["name"].strip() or len(options["name"]) > NAME_LENGTH or not options["name"].isprintable():
            raise CommandError(f"a client's name has 1 to {NAME_LENGTH} printable characters")
        try:
            token = self._create(options, [groups[name] for name in options["group"]])
        except DomainError as error:
            raise CommandError(str(error)) from None
        self.stderr.write(f"client {options['name']}: {', '.join(options['group'])}; the token is shown once")
        self.stdout.write(token)

    @transaction.atomic
    def _create(self, options: dict[str, Any], groups: list[Group]) -> str:
        user, created = get_user_model().objects.get_or_create(username=options["name"])
        if not user.is_active:
            raise CommandError(f"{options['name']} is deactivated: a token would open nothing")
        if created:
            user.set_unusable_password()
            user.save(update_fields=["password"])
        user.groups.add(*groups)
        for slug in options["application"]:
            join_application(user, slug)
        if options["pc"]:
            assign_agent(user, options["pc"])
        _row, token = AuthToken.objects.create(user, expiry=timedelta(days=options["expires"]))
        return str(token)
