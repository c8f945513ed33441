from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.management import CommandError, call_command
from knox.models import AuthToken
from rest_framework.test import APIClient

from config.apps import GROUPS
from devices.models import PC
from messaging.models import Application

pytestmark = pytest.mark.django_db


def create_client(*args):
    out, err = StringIO(), StringIO()
    call_command("create_client", *args, stdout=out, stderr=err)
    return out.getvalue()


def test_prints_the_token_alone_and_it_opens_the_api():
    token = create_client("prom", "--group", "viewer")
    assert token.count("\n") == 1
    client = APIClient(headers={"Authorization": f"Token {token.strip()}"})
    assert client.get("/api/v1/integrity/").status_code == 200
    assert not get_user_model().objects.get(username="prom").has_usable_password()


def test_makes_the_application_and_the_pc_and_may_be_repeated():
    first = create_client(
        "agent", "--group", "device-agent", "--group", "viewer", "--application", "shop", "--pc", "PC-01"
    )
    second = create_client("agent", "--group", "device-agent", "--application", "shop", "--pc", "PC-01")
    user = get_user_model().objects.get(username="agent")
    assert first != second
    assert set(user.groups.values_list("name", flat=True)) == {"device-agent", "viewer"}
    assert Application.objects.get().members.get() == user
    assert PC.objects.get(pc_number="PC-01").agent == user


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--group", "nope"], "no such group"),
        (["--group", "viewer", "--pc", "PC1"], "not a PC number"),
        (["--group", "viewer", "--application", "a b"], "not a slug"),
        (["--group", "viewer", "--expires", "0"], "from 1 to 36500 days"),
        (["--group", "viewer", "--expires", "99999999"], "from 1 to 36500 days"),
    ],
)
def test_says_what_is_wrong_and_writes_nothing(args, message):
    with pytest.raises(CommandError, match=message):
        create_client("x", *args)
    assert not get_user_model().objects.filter(username="x").exists()


@pytest.mark.parametrize("name", ["", " ", "x" * 151, "a\nb", "a\x00"])
def test_a_name_that_cannot_be_is_refused(name):
    with pytest.raises(CommandError, match="printable"):
        create_client(name, "--group", "viewer")


def test_a_deactivated_client_gets_no_token():
    get_user_model().objects.create_user("left", is_active=False)
    with pytest.raises(CommandError, match="deactivated"):
        create_client("left", "--group", "viewer")
    assert not AuthToken.objects.exists()


def test_the_groups_of_the_interface_exist_after_migrate():
    assert set(GROUPS) <= set(Group.objects.values_list("name", flat=True))
    assert Group.objects.get(name="viewer").permissions.filter(codename="view_integrity").exists()
