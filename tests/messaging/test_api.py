from datetime import timedelta

import pytest
from django.utils import timezone

from messaging.models import Application, Message, MessageEvent, MessageTemplate, Subscription, Suppression
from tests.messaging.factories import ApplicationFactory, message, message_in, subscribe

pytestmark = pytest.mark.django_db
MESSAGES, SUBSCRIPTIONS = "/api/v1/messages/", "/api/v1/subscriptions/"


@pytest.fixture
def shop():
    return ApplicationFactory(slug="shop")


@pytest.fixture
def login(make_client, shop):
    def make(*groups, application=shop, username=None):
        client = make_client(*groups, username=username or "-".join(groups))
        application.members.add(client.user)
        return client

    return make


@pytest.fixture
def sender(login):
    return login("message-sender")


@pytest.fixture
def app_client(login):
    return login("message-client")


@pytest.fixture
def operator(login):
    return login("operator")


def codes(response):
    return [(error["code"], error["attr"]) for error in response.json()["errors"]]


# --- subscriptions -----------------------------------------------------------------------------------------------


def test_the_same_token_is_the_same_subscription(app_client):
    body = {"type": "Email", "token": "Ann@Example.com", "user_id": "u1", "tags": {"vip": True}}
    first = app_client.post(SUBSCRIPTIONS, body)
    assert (first.status_code, first.json()["status"]) == (201, 1)
    assert "token" not in first.json() and "ann" not in first.json()["token_hint"].lower().replace("@example.com", "")
    again = app_client.post(SUBSCRIPTIONS, {**body, "token": "ann@example.COM", "locale": "ko"})
    assert (again.status_code, again.json()["id"], again.json()["locale"]) == (200, first.json()["id"], "ko")
    assert again.json()["tags"] == {"vip": True}


def test_registering_again_does_not_undo_an_opt_out(app_client):
    body = {"type": "SMS", "token": "+821012345678"}
    pk = app_client.post(SUBSCRIPTIONS, body).json()["id"]
    assert app_client.post(f"{SUBSCRIPTIONS}{pk}/unsubscribe/").json()["status"] == -2
    assert app_client.post(SUBSCRIPTIONS, body).json()["status"] == -2
    refused = app_client.post(f"{SUBSCRIPTIONS}{pk}/enable/")
    assert (refused.status_code, codes(refused)) == (409, [("consent_required", None)])
    assert app_client.post(f"{SUBSCRIPTIONS}{pk}/enable/", {"consent": True}).json()["status"] == 1
    assert app_client.post(f"{SUBSCRIPTIONS}{pk}/disable/").json()["status"] == -31
    assert app_client.post(f"{SUBSCRIPTIONS}{pk}/enable/").json()["status"] == 1


def test_a_device_whose_user_has_left_is_nobodys(app_client):
    body = {"type": "AndroidPush", "token": "tok", "user_id": "u1", "locale": "ko"}
    app_client.post(SUBSCRIPTIONS, body)
    kept = app_client.post(SUBSCRIPTIONS, {"type": "AndroidPush", "token": "tok"}).json()
    assert (kept["user_id"], kept["locale"]) == ("u1", "ko")
    left = app_client.post(SUBSCRIPTIONS, {"type": "AndroidPush", "token": "tok", "user_id": None}).json()
    assert (left["user_id"], left["locale"], left["status"]) == (None, "ko", 1)


def test_a_dead_token_that_registers_again_lives_again(app_client):
    body = {"type": "AndroidPush", "token": "tok"}
    pk = app_client.post(SUBSCRIPTIONS, body).json()["id"]
    Subscription.objects.filter(pk=pk).update(status=-10)
    assert app_client.post(SUBSCRIPTIONS, body).json()["status"] == 1


@pytest.mark.parametrize(
    ("body", "attr"),
    [
        ({"type": "Email", "token": "nobody"}, "token"),
        ({"type": "SMS", "token": "01012345678"}, "token"),
        ({"type": "Fax", "token": "x"}, "type"),
        ({"type": "AndroidPush", "token": "a b"}, "token"),
        ({"type": "AndroidPush", "token": "a", "time_zone": "Mars/Base"}, "time_zone"),
        ({"type": "AndroidPush", "token": "a", "tags": []}, "tags"),
        ({"type": "AndroidPush", "token": "a", "colour": "red"}, "colour"),
        ({"type": "AndroidPush", "token": "a", "status": 1}, "status"),
        ({"type": "AndroidPush", "token": "a", "user_id": "x" * 256}, "user_id"),
        ({"type": "AndroidPush", "token": 5}, "token"),
        ({"type": "AndroidPush", "token": "a", "user_id": 5}, "user_id"),
        ({"type": "AndroidPush", "token": "a", "marketing_consent": "yes"}, "marketing_consent"),
        ({"type": "AndroidPush", "token": "a", "night_consent": 1}, "night_consent"),
        ({"token": "a"}, "type"),
    ],
)
def test_a_bad_registration_names_its_field(app_client, body, attr):
    response = app_client.post(SUBSCRIPTIONS, body)
    assert response.status_code == 400
    assert [error["attr"] for error in response.json()["errors"]] == [attr]
    assert not Subscription.objects.exists()


def test_a_subscription_can_be_changed_and_its_token_renewed(app_client, shop):
    row, other = subscribe(shop), subscribe(shop)
    url = f"{SUBSCRIPTIONS}{row.pk}/"
    changed = app_client.patch(url, {"user_id": "u2", "marketing_consent": True, "token": "fresh"})
    assert (changed.status_code, changed.json()["user_id"]) == (200, "u2")
    assert Subscription.objects.get(pk=row.pk).token == "fresh"
    taken = app_client.patch(url, {"token": other.token})
    assert (taken.status_code, codes(taken)) == (409, [("duplicate_subscription", "token")])
    assert list(row.events.order_by("id").values_list("event_type", flat=True)) == [
        "created",
        "token_updated",
        "user_linked",
    ]


# --- creating ----------------------------------------------------------------------------------------------------


def test_a_message_is_its_columns(sender, shop):
    row = subscribe(shop, user_id="u1")
    answer = sender.post(MESSAGES, {"subscription_id": str(row.pk), "title": "Hi", "data": {"a": 1}, "campaign": "c"})
    assert answer.status_code == 201
    body = answer.json()
    assert (body["application"], body["user_id"], body["channel_type"], body["kind"]) == (
        "shop",
        "u1",
        "push",
        "notice",
    )
    assert (body["status"], body["priority"], body["retry_counts"]["network"]) == ("pending", 5, 0)
    detail = sender.get(f"{MESSAGES}{body['id']}/").json()
    assert [event["event_type"] for event in detail["events"]] == ["created"]
    assert detail["attempts"] == detail["hits"] == []
    assert {key: detail[key] for key in body} == body


def test_a_user_and_a_channel_pick_the_last_active_sendable_subscription(sender, shop):
    now = timezone.now()
    subscribe(shop, user_id="u1", now=now - timedelta(days=2))
    best = subscribe(shop, user_id="u1", now=now - timedelta(days=1))
    subscribe(shop, user_id="u1", now=now, status=-10)
    body = {"user_id": "u1", "channel": "push", "title": "Hi"}
    assert sender.post(MESSAGES, body).json()["subscription_id"] == str(best.pk)
    nobody = sender.post(MESSAGES, {**body, "user_id": "u2"})
    assert (nobody.status_code, codes(nobody)) == (400, [("does_not_exist", "user_id")])
    Subscription.objects.update(status=-10)
    assert sender.post(MESSAGES, body).status_code == 409


@pytest.mark.parametrize(
    ("kind", "body", "attr"),
    [
        ("AndroidPush", {}, "body"),
        ("AndroidPush", {"title": "x" * 500, "body": "y" * 4096}, "body"),
        ("Email", {"body": "x"}, "title"),
        ("Email", {"title": "x"}, "body"),
        ("Email", {"title": "x\r\nBcc: y", "body": "x"}, "title"),
        ("SMS", {"title": "x"}, "body"),
        ("SMS", {"body": "가" * 1001}, "body"),
        ("KakaoTalk", {"body": "x"}, "template_id"),
        ("KakaoTalk", {"body": "x", "kind": "marketing"}, "kind"),
        ("InAppMessage", {"title": "x"}, "data"),
        ("InAppMessage", {"title": "x", "data": {"layout_type": "poster"}}, "data"),
        ("AndroidPush", {"title": "x", "variables": {}}, "variables"),
        ("AndroidPush", {"title": "x", "user_id": "u", "channel": "push"}, "subscription_id"),
        ("AndroidPush", {"title": "x", "priority": 10}, "priority"),
        ("AndroidPush", {"title": "x", "priority": "5"}, "priority"),
        ("AndroidPush", {"title": 5}, "title"),
        ("AndroidPush", {"title": "x", "scheduled_at": "tomorrow"}, "scheduled_at"),
        ("AndroidPush", {"title": "x", "scheduled_at": "2026-12-01T09:00:00"}, "scheduled_at"),
        ("AndroidPush", {"title": "x", "campaign": "c" * 256}, "campaign"),
        ("AndroidPush", {"title": "x", "status": "sent"}, "status"),
        ("AndroidPush", {"title": "x\x00"}, "title"),
    ],
)
def test_a_bad_message_names_its_field_and_leaves_nothing(sender, shop, kind, body, attr):
    response = sender.post(MESSAGES, {"subscription_id": str(subscribe(shop, kind).pk), **body})
    assert response.status_code == 400, response.json()
    assert [error["attr"] for error in response.json()["errors"]] == [attr]
    assert not Message.objects.exists()


def test_bytes_are_counted_as_the_carriers_count_them(sender, shop):
    push, sms = subscribe(shop), subscribe(shop, "SMS")
    overhead = len('{"title":"","body":"","data":{}}')
    fits = "가" * ((4096 - overhead) // 3)
    assert sender.post(MESSAGES, {"subscription_id": str(push.pk), "body": fits}).status_code == 201
    assert sender.post(MESSAGES, {"subscription_id": str(push.pk), "body": fits + "가"}).status_code == 400
    assert sender.post(MESSAGES, {"subscription_id": str(sms.pk), "body": "가" * 999 + "😀"}).status_code == 201
    assert sender.post(MESSAGES, {"subscription_id": str(sms.pk), "body": "가" * 1000 + "x"}).status_code == 400
    # One of the syllables EUC-KR lacks, which Python would spell with eight bytes.
    assert sender.post(MESSAGES, {"subscription_id": str(sms.pk), "body": "똠" * 1000}).status_code == 201
    assert sender.post(MESSAGES, {"subscription_id": str(sms.pk), "body": "똠" * 1000 + "x"}).status_code == 400


def test_a_foreign_and_an_unknown_id_are_the_same_400(sender):
    foreign = subscribe()
    answers = [
        sender.post(MESSAGES, {"subscription_id": pk, "title": "x"})
        for pk in (str(foreign.pk), "01900000-0000-7000-8000-000000000000")
    ]
    assert {answer.status_code for answer in answers} == {400}
    assert answers[0].json() == answers[1].json()
    assert codes(answers[0]) == [("does_not_exist", "subscription_id")]


@pytest.mark.parametrize(
    ("change", "body", "code"),
    [
        ({"status": -2}, {}, "unsubscribed"),
        ({"status": -10}, {}, "not_sendable"),
        ({}, {"kind": "marketing"}, "no_consent"),
    ],
)
def test_a_recipient_who_must_not_be_written_to_is_a_409(sender, shop, change, body, code):
    row = subscribe(shop)
    Subscription.objects.filter(pk=row.pk).update(**change) if change else None
    response = sender.post(MESSAGES, {"subscription_id": str(row.pk), "title": "x", **body})
    assert (response.status_code, response.json()["errors"][0]["code"]) == (409, code)


def test_a_channel_without_a_provider_is_a_409(sender, shop, settings):
    settings.PROVIDERS = {}
    response = sender.post(MESSAGES, {"subscription_id": str(subscribe(shop).pk), "title": "x"})
    assert (response.status_code, codes(response)) == (409, [("channel_not_configured", None)])
    in_app = {"subscription_id": str(subscribe(shop, "InAppMessage").pk), "title": "x"}
    assert sender.post(MESSAGES, {**in_app, "data": {"layout_type": "popup"}}).status_code == 201


def test_an_advertisement_to_a_korean_number_says_so_and_how_to_leave(sender, shop):
    Application.objects.update(settings={"opt_out_number": "0801234567"})
    row = subscribe(shop, "SMS", marketing_consent=True)
    answer = sender.post(MESSAGES, {"subscription_id": str(row.pk), "body": "Sale", "kind": "marketing"}).json()
    assert answer["body"].startswith("(광고)Sale") and answer["body"].endswith("0801234567")
    abroad = subscribe(shop, "SMS", token="+4915112345678", marketing_consent=True)
    body = {"subscription_id": str(abroad.pk), "body": "Sale", "kind": "marketing"}
    assert sender.post(MESSAGES, body).json()["body"] == "Sale"


@pytest.mark.parametrize("body", [{}, {"body": " "}])
def test_a_label_alone_is_no_advertisement(sender, shop, body):
    row = subscribe(shop, "SMS", marketing_consent=True)
    refused = sender.post(MESSAGES, {"subscription_id": str(row.pk), "kind": "marketing", **body})
    assert (refused.status_code, codes(refused)) == (400, [("required", "body")])


def test_an_operators_own_application_comes_first(operator, shop):
    """As for everything an operator makes without naming the application."""
    own, foreign = subscribe(shop, user_id="ann"), subscribe(ApplicationFactory(slug="other"), user_id="ann")
    body = {"user_id": "ann", "channel": "push", "title": "x"}
    assert operator.post(MESSAGES, body).json()["subscription_id"] == str(own.pk)
    assert operator.post(MESSAGES, {**body, "application": "other"}).json()["subscription_id"] == str(foreign.pk)
    foreign.application.members.add(operator.user)
    assert codes(operator.post(MESSAGES, body)) == [("required", "application")]


# --- idempotency and quota ---------------------------------------------------------------------------------------


def test_a_key_gives_the_first_answer_again_for_good(sender, shop):
    body = {"subscription_id": str(subscribe(shop).pk), "title": "x", "data": {"n": 1}}
    first = sender.post(MESSAGES, body, headers={"Idempotency-Key": "k"})
    Message.objects.update(status="successful", sent_at=timezone.now())
    again = sender.post(MESSAGES, {**body, "data": {"n": 1.0}}, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())
    other = sender.post(MESSAGES, {**body, "title": "y"}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, codes(other)) == (409, [("idempotency_conflict", "Idempotency-Key")])
    assert Message.objects.get().idempotency_key == "k"


def test_a_refusal_is_not_remembered(sender, shop):
    row = subscribe(shop, status=-10)
    body = {"subscription_id": str(row.pk), "title": "x"}
    assert sender.post(MESSAGES, body, headers={"Idempotency-Key": "k"}).status_code == 409
    Subscription.objects.update(status=1)
    assert sender.post(MESSAGES, body, headers={"Idempotency-Key": "k"}).status_code == 201


def test_the_quota_is_charged_and_a_cancelled_message_gives_back(sender, shop):
    Application.objects.update(daily_quota=2)
    body = {"subscription_id": str(subscribe(shop).pk), "title": "x"}
    first = sender.post(MESSAGES, body)
    assert sender.post(MESSAGES, body).status_code == 201
    over = sender.post(MESSAGES, body)
    assert (over.status_code, codes(over)) == (429, [("quota_exceeded", None)])
    assert 0 < int(over.headers["Retry-After"]) <= 86400
    cancelled = sender.post(f"{MESSAGES}{first.json()['id']}/cancel/")
    assert (cancelled.status_code, cancelled.json()["error_reason"]) == (200, "cancelled")
    assert sender.post(MESSAGES, body).status_code == 201
    assert sender.post(MESSAGES, body).status_code == 429


@pytest.mark.parametrize("quota", ["daily_quota", "monthly_quota"])
def test_a_quota_set_later_counts_what_was_sent_before(sender, shop, quota):
    body = {"subscription_id": str(subscribe(shop).pk), "title": "x"}
    assert [sender.post(MESSAGES, body).status_code for _ in range(2)] == [201, 201]
    Application.objects.update(**{quota: 3})
    assert [sender.post(MESSAGES, body).status_code for _ in range(2)] == [201, 429]
    Application.objects.update(**{quota: None})
    assert sender.post(MESSAGES, body).status_code == 201
    Application.objects.update(**{quota: 5})
    assert [sender.post(MESSAGES, body).status_code for _ in range(2)] == [201, 429]


@pytest.mark.parametrize(("quota", "back"), [("daily_quota", 1), ("monthly_quota", 40)])
def test_a_message_moved_to_another_day_is_charged_to_that_day(sender, shop, quota, back):
    Application.objects.update(**{quota: 2})
    body = {"subscription_id": str(subscribe(shop).pk), "title": "x"}
    assert [sender.post(MESSAGES, body).status_code for _ in range(3)] == [201, 201, 429]
    Message.objects.update(created_at=timezone.now() - timedelta(days=back))
    assert [sender.post(MESSAGES, body).status_code for _ in range(3)] == [201, 201, 429]
    Message.objects.update(created_at=timezone.now())
    assert sender.post(MESSAGES, body).status_code == 429


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_an_odd_key_spoils_its_own_item_alone(sender, shop, key):
    item = {"subscription_id": str(subscribe(shop).pk), "title": "x"}
    items = [item, {**item, "idempotency_key": key}, {**item, "idempotency_key": "k"}]
    results = sender.post(f"{MESSAGES}bulk/", {"messages": items}).json()["results"]
    assert [result["status"] for result in results] == [201, 400, 201]
    assert results[1]["errors"][0]["attr"] == "idempotency_key"
    (other,) = sender.post(f"{MESSAGES}bulk/", {"messages": [{**items[2], "title": "y"}]}).json()["results"]
    assert (other["status"], other["errors"][0]["attr"]) == (409, "idempotency_key")


def test_bulk_answers_each_item_in_order(sender, shop):
    Application.objects.update(daily_quota=2)
    good, gone = str(subscribe(shop).pk), str(subscribe(shop, status=-2).pk)
    items = [
        {"subscription_id": good, "title": "1", "idempotency_key": "a"},
        {"subscription_id": gone, "title": "2"},
        {"subscription_id": good, "colour": "red"},
        {"subscription_id": good, "title": "1", "idempotency_key": "a"},
        {"subscription_id": good, "title": "5"},
        {"subscription_id": good, "title": "6"},
        {"subscription_id": good},
        "nonsense",
        None,
    ]
    response = sender.post(f"{MESSAGES}bulk/", {"messages": items})
    assert response.status_code == 200
    results = response.json()["results"]
    assert [result["index"] for result in results] == list(range(9))
    assert [result["status"] for result in results] == [201, 409, 400, 201, 201, 429, 400, 400, 400]
    assert results[0]["id"] == results[3]["id"]
    assert [result["errors"][0]["code"] for result in results if "errors" in result] == [
        "unsubscribed",
        "unknown_field",
        "quota_exceeded",
        "required",
        "invalid",
        "null",
    ]
    assert Message.objects.count() == 2


@pytest.mark.parametrize("items", [[], [{"title": "x"}] * 501, "x", None])
def test_bulk_takes_one_to_five_hundred(sender, items):
    response = sender.post(f"{MESSAGES}bulk/", {"messages": items})
    assert (response.status_code, response.json()["errors"][0]["attr"]) == (400, "messages")


def test_bulk_of_500_takes_at_most_twenty_queries(sender, shop, django_assert_max_num_queries):
    Application.objects.update(daily_quota=1000)
    rows = [str(subscribe(shop, user_id=f"u{n}").pk) for n in range(50)]
    items = [{"subscription_id": rows[n % 50], "title": "x", "idempotency_key": f"k{n}"} for n in range(400)]
    items += [{"user_id": f"u{n % 50}", "channel": "push", "title": "x"} for n in range(100)]
    with django_assert_max_num_queries(20):
        response = sender.post(f"{MESSAGES}bulk/", {"messages": items})
    assert {result["status"] for result in response.json()["results"]} == {201}


# --- receipts and operators --------------------------------------------------------------------------------------


def test_receipts_are_counted_once_and_a_conversion_implies_one(app_client, shop):
    subscription = subscribe(shop)
    row = message_in("successful", subscription, at=timezone.now())
    for _ in range(2):
        assert app_client.post(f"{MESSAGES}{row.pk}/receive/").json()["status"] == "received"
    for _ in range(2):
        answer = app_client.post(f"{MESSAGES}{row.pk}/convert/", {"action": "click", "data": {"url": "x"}})
        assert (answer.status_code, answer.json()["status"]) == (200, "converted")
    again = app_client.post(f"{MESSAGES}{row.pk}/receive/")
    assert (again.status_code, again.json()["status"]) == (200, "converted")
    implied = message_in("successful", subscription, at=timezone.now())
    assert app_client.post(f"{MESSAGES}{implied.pk}/convert/").json()["receipt_implied"] is True
    subscription.refresh_from_db()
    assert (subscription.total_messages_received, subscription.total_messages_converted) == (2, 2)
    kinds = MessageEvent.objects.filter(message=implied).order_by("id").values_list("event_type", "metadata")
    assert list(kinds)[2:] == [("received", {"implied": True}), ("converted", {})]
    assert MessageEvent.objects.get(message=row, event_type="converted").metadata == {
        "action": "click",
        "data": {"url": "x"},
    }


@pytest.mark.parametrize("verb", ["receive", "convert"])
def test_a_report_before_the_send_is_503_and_after_the_failure_409(app_client, shop, verb):
    for status, code in (("pending", 503), ("errored", 503), ("failed", 409)):
        row = message_in(status, subscribe(shop))
        response = app_client.post(f"{MESSAGES}{row.pk}/{verb}/")
        assert response.status_code == code
        assert ("Retry-After" in response.headers) == (code == 503)
        assert Message.objects.get(pk=row.pk).status == status


def test_a_devices_clock_is_believed_within_reason(app_client, shop):
    now = timezone.now()
    row = message_in("successful", subscribe(shop), at=now)
    url = f"{MESSAGES}{row.pk}/receive/"
    ahead = app_client.post(url, {"occurred_at": (now + timedelta(minutes=6)).isoformat()})
    assert (ahead.status_code, codes(ahead)) == (400, [("invalid", "occurred_at")])
    early = app_client.post(url, {"occurred_at": (now - timedelta(days=1)).isoformat()})
    assert early.status_code == 200
    assert Message.objects.get().received_at == now


def test_an_expired_message_cannot_be_converted(app_client, shop):
    row = message_in("received", subscribe(shop))
    Message.objects.update(expired_at=timezone.now())
    response = app_client.post(f"{MESSAGES}{row.pk}/convert/")
    assert (response.status_code, codes(response)) == (409, [("expired", None)])


def test_cancel_ends_what_is_not_being_sent(sender, shop):
    from messaging.services.claiming import claim_batch

    subscription = subscribe(shop)
    waiting, errored = message(subscription), message_in("errored", subscription)
    for row in (waiting, errored, waiting):
        answer = sender.post(f"{MESSAGES}{row.pk}/cancel/")
        assert (answer.status_code, answer.json()["status"], answer.json()["error_reason"]) == (
            200,
            "failed",
            "cancelled",
        )
    for status in ("successful", "failed"):
        row = message_in(status, subscription)
        assert sender.post(f"{MESSAGES}{row.pk}/cancel/").status_code == 409
    flying = message(subscription, now=timezone.now())
    claim_batch("AndroidPush", "null", 1, now=timezone.now())
    refused = sender.post(f"{MESSAGES}{flying.pk}/cancel/")
    assert (refused.status_code, codes(refused)) == (409, [("in_flight", None)])


def test_a_failed_message_is_sent_anew_once(operator, sender, shop):
    row = message_in("failed", subscribe(shop))
    url = f"{MESSAGES}{row.pk}/retry/"
    assert sender.post(url).status_code == 403
    first = operator.post(url)
    assert (first.status_code, first.json()["retry_of"], first.json()["status"]) == (201, str(row.pk), "pending")
    again = operator.post(url)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert operator.post(f"{MESSAGES}{first.json()['id']}/retry/").status_code == 409


def test_sent_anew_it_is_from_the_same(operator, shop):
    row = message_in("failed", subscribe(shop, "Email"), from_address='"Kim" <kim@shop.example>')
    again = operator.post(f"{MESSAGES}{row.pk}/retry/").json()
    assert Message.objects.get(pk=again["id"]).from_address == row.from_address
    assert "from_address" not in again


def test_resolve_is_the_operators(operator, sender, shop):
    row = message(subscribe(shop))
    url = f"{MESSAGES}{row.pk}/resolve/"
    assert sender.post(url, {"outcome": "accepted"}).status_code == 403
    assert operator.post(url, {"outcome": "maybe"}).status_code == 400
    assert operator.post(url, {"outcome": "accepted"}).status_code == 409
    Message.objects.update(hold_reason="outcome_unknown")
    assert operator.post(url, {"outcome": "accepted"}).json()["status"] == "successful"


@pytest.mark.parametrize("verb", ["receive", "convert"])
def test_a_repeated_report_gets_the_same_answer(app_client, shop, verb):
    """With the history in it, which a trigger writes."""
    url = f"{MESSAGES}{message_in('successful', subscribe(shop)).pk}/{verb}/"
    first, again = app_client.post(url), app_client.post(url)
    assert first.json() == again.json()
    assert [step["to"] for step in first.json()["version_history"].values()][-1] == first.json()["status"]


@pytest.mark.parametrize(("verb", "status"), [("receive", "received"), ("convert", "converted")])
def test_whoever_reports_a_message_of_unknown_outcome_has_it(app_client, shop, verb, status):
    row = message(subscribe(shop))
    Message.objects.update(hold_reason="outcome_unknown")
    answer = app_client.post(f"{MESSAGES}{row.pk}/{verb}/")
    assert (answer.status_code, answer.json()["status"]) == (200, status)
    row = Message.objects.get()
    assert (row.hold_reason, row.sent_at is not None) == (None, True)


def test_the_inbox_shows_what_is_unread_newest_first(app_client, shop, login):
    subscription, now = subscribe(shop, "InAppMessage"), timezone.now()
    rows = [
        message_in("successful", subscription, at=now - timedelta(hours=n), now=now - timedelta(hours=n))
        for n in (3, 2, 1)
    ]
    Message.objects.filter(pk=rows[1].pk).update(status="received", received_at=now)
    message(subscription, now=now)
    message_in("converted", subscription, at=now)
    old = message_in("received", subscription, at=now - timedelta(days=31))
    url = f"/api/v1/inbox/?subscription_id={subscription.pk}"
    assert [row["id"] for row in app_client.get(url).json()["results"]] == [str(r.pk) for r in reversed(rows)]
    assert str(old.pk) not in app_client.get(url).content.decode()
    assert Message.objects.get(pk=rows[0].pk).status == "successful"
    assert app_client.get("/api/v1/inbox/").status_code == 400
    stranger = login("message-client", application=ApplicationFactory(), username="stranger")
    assert stranger.get(url).json()["results"] == []


# --- lists and access --------------------------------------------------------------------------------------------


def test_lists_filter_and_stay_within_the_tenant(sender, shop):
    now = timezone.now()
    mine = subscribe(shop, user_id="u1")
    rows = [message(mine, now=now - timedelta(hours=n), campaign=f"c{n}", kind="transactional") for n in range(3)]
    message(subscribe(shop, "SMS"), now=now - timedelta(hours=5))
    message(subscribe())
    ids = lambda query: [row["id"] for row in sender.get(f"{MESSAGES}?{query}").json()["results"]]  # noqa: E731
    assert len(ids("")) == 4
    assert ids("")[:3] == [str(row.pk) for row in rows]
    assert ids("campaign=c1") == [str(rows[1].pk)]
    assert len(ids("user_id=u1")) == len(ids("kind=transactional")) == len(ids(f"subscription_id={mine.pk}")) == 3
    assert len(ids("channel_type=sms")) == 1
    after = (now - timedelta(minutes=90)).isoformat().replace("+", "%2B")
    assert ids(f"created_after={after}") == ids(f"created_after={after.replace('%2B', '+')}")
    assert len(ids(f"created_after={after}")) == 2 and len(ids(f"created_before={after}")) == 2
    assert sender.get(f"{MESSAGES}?status=sent").status_code == 400
    assert sender.get(f"{MESSAGES}?nope=1").status_code == 400
    page = sender.get(f"{MESSAGES}?page_size=3").json()
    assert len(page["results"]) == 3 and len(sender.get(page["next"]).json()["results"]) == 1


@pytest.mark.parametrize("url", ["/api/v1/templates/?active=", "/api/v1/suppressions/?active="])
def test_a_filter_that_is_neither_true_nor_false_does_not_answer_with_everything(sender, url):
    assert {sender.get(f"{url}{word}").status_code for word in ("true", "False", "1", "0", "")} == {200}
    refused = sender.get(f"{url}maybe")
    assert (refused.status_code, codes(refused)) == (400, [("invalid", "active")])


def test_a_foreign_message_is_a_404(login, shop):
    row = message_in("failed")
    for group, verb in (("message-sender", "cancel"), ("message-client", "receive"), ("message-client", "convert")):
        assert login(group).post(f"{MESSAGES}{row.pk}/{verb}/").status_code == 404
    assert login("message-sender").get(f"{MESSAGES}{row.pk}/").status_code == 404
    assert login("message-sender").get(f"{MESSAGES}nonsense/").status_code == 404


def test_who_may_do_what(login, shop):
    subscription = subscribe(shop)
    row = message(subscription)
    sending = {"subscription_id": str(subscription.pk), "title": "x"}
    suppression = {"channel": "email", "address": "a@example.com", "reason": "manual"}
    everybody = {"message-sender", "message-client", "operator", "viewer"}
    calls = [
        ("post", MESSAGES, sending, {"message-sender", "operator"}),
        ("post", f"{MESSAGES}bulk/", {"messages": [sending]}, {"message-sender", "operator"}),
        ("get", MESSAGES, None, {"message-sender", "operator", "viewer"}),
        ("get", f"{MESSAGES}{row.pk}/", None, {"message-sender", "operator", "viewer"}),
        ("get", SUBSCRIPTIONS, None, {"message-sender", "operator", "viewer"}),
        ("get", f"{SUBSCRIPTIONS}{subscription.pk}/", None, everybody),
        ("patch", f"{SUBSCRIPTIONS}{subscription.pk}/", {}, {"message-sender", "message-client", "operator"}),
        ("post", "/api/v1/suppressions/", suppression, {"message-sender", "operator"}),
        ("get", "/api/v1/templates/", None, {"message-sender", "operator", "viewer"}),
        ("get", f"/api/v1/inbox/?subscription_id={subscription.pk}", None, everybody),
        ("post", f"{MESSAGES}{row.pk}/receive/", {}, {"message-client", "operator"}),
        ("post", f"{MESSAGES}{row.pk}/retry/", {}, {"operator"}),
        ("post", f"{MESSAGES}{row.pk}/resolve/", {"outcome": "accepted"}, {"operator"}),
    ]
    for group in ("message-sender", "message-client", "operator", "viewer", "lock-holder"):
        client = login(group)
        for method, url, body, allowed in calls:
            status = getattr(client, method)(url, body).status_code
            assert (status != 403) == (group in allowed), (group, method, url, status)


# --- suppressions ------------------------------------------------------------------------------------------------


def test_a_suppressed_address_is_refused_until_it_is_lifted(sender, operator, shop):
    row = subscribe(shop, "Email", token="Bob@example.com", user_id="bob")
    body = {"channel": "email", "address": "bob@EXAMPLE.com", "reason": "manual", "evidence": {"ticket": 7}}
    made = operator.post("/api/v1/suppressions/", {**body, "application": "shop"})
    assert made.status_code == 201 and "bob@" not in made.content.decode()
    assert sender.post("/api/v1/suppressions/", body).status_code == 200
    sending = {"subscription_id": str(row.pk), "title": "x", "body": "y"}
    refused = sender.post(MESSAGES, sending)
    assert (refused.status_code, codes(refused)) == (409, [("suppressed", None)])
    assert refused.json()["errors"][0]["detail"] == "The address is suppressed: manual."
    by_user = sender.post(MESSAGES, {**sending, "subscription_id": None, "user_id": "bob", "channel": "email"})
    assert by_user.content == refused.content
    url = f"/api/v1/suppressions/{made.json()['id']}/lift/"
    assert sender.post(url, {"note": "ok"}).status_code == 403
    assert operator.post(url, {}).status_code == 400
    assert operator.post(url, {"note": "asked for it"}).json()["lifted_at"]
    assert operator.post(url, {"note": "again"}).status_code == 409
    assert sender.post(MESSAGES, sending).status_code == 201
    assert Suppression.objects.get().lift_note == "asked for it"
    assert sender.post("/api/v1/suppressions/", {**body, "evidence": "550 no such user"}).json()["evidence"] == (
        "550 no such user"
    )


# --- templates ---------------------------------------------------------------------------------------------------

TEMPLATES = "/api/v1/templates/"


@pytest.fixture
def welcome(sender):
    body = {
        "name": "welcome",
        "channel": "email",
        "title_template": "Hi {{ name }}",
        "body_template": "<p>{{name}} {{order.id}}</p>",
        "data_template": {"deep": [{"{{key}}": "{{name}}"}], "n": 1},
    }
    return sender.post(TEMPLATES, body).json()


def test_a_template_renders_once_escapes_html_and_names_all_that_is_missing(sender, welcome):
    url = f"{TEMPLATES}{welcome['id']}/render-test/"
    missing = sender.post(url, {"variables": {"spare": 1}})
    assert missing.status_code == 400
    assert "name" in missing.json()["errors"][0]["detail"] and "order.id" in missing.json()["errors"][0]["detail"]
    done = sender.post(url, {"variables": {"name": "<b>{{order.id}}</b>", "order": {"id": 5}}}).json()
    assert done["title"] == "Hi <b>{{order.id}}</b>"
    assert done["body"] == "<p>&lt;b&gt;{{order.id}}&lt;/b&gt; 5</p>"
    assert done["data"] == {"deep": [{"{{key}}": "<b>{{order.id}}</b>"}], "n": 1}


def test_a_message_keeps_its_templates_version(sender, shop, welcome):
    row = subscribe(shop, "Email")
    body = {"subscription_id": str(row.pk), "template_id": welcome["id"], "variables": {"name": "A", "order.id": 1}}
    first = sender.post(MESSAGES, body).json()
    assert (first["title"], first["template_version"]) == ("Hi A", 1)
    edited = sender.patch(f"{TEMPLATES}{welcome['id']}/", {"title_template": "Hello {{name}}"})
    assert (edited.status_code, edited.json()["version"]) == (200, 2)
    assert sender.post(MESSAGES, body).json()["title"] == "Hello A"
    versions = sender.get(f"{TEMPLATES}{welcome['id']}/versions/").json()["results"]
    assert [(v["version"], v["title_template"]) for v in versions] == [(2, "Hello {{name}}"), (1, "Hi {{ name }}")]
    assert sender.post(MESSAGES, {**body, "title": "x"}).status_code == 400
    sender.patch(f"{TEMPLATES}{welcome['id']}/", {"active": False})
    inactive = sender.post(MESSAGES, body)
    assert (inactive.status_code, codes(inactive)) == (400, [("template_inactive", "template_id")])


def test_names_are_taken_once_and_free_after_deletion(sender, welcome):
    body = {"name": "welcome", "channel": "push", "body_template": "x"}
    taken = sender.post(TEMPLATES, body)
    assert (taken.status_code, codes(taken)) == (409, [("name_taken", "name")])
    assert sender.delete(f"{TEMPLATES}{welcome['id']}/").status_code == 204
    assert sender.get(f"{TEMPLATES}{welcome['id']}/").status_code == 404
    assert sender.post(TEMPLATES, body).status_code == 201


@pytest.mark.parametrize("subject", ["Hi\nBcc: x", "Hi\r", "\n"])
def test_a_templates_subject_has_one_line(sender, welcome, subject):
    body = {"name": "x", "channel": "email", "title_template": subject, "body_template": "x"}
    for response in (
        sender.post(TEMPLATES, body),
        sender.patch(f"{TEMPLATES}{welcome['id']}/", {"title_template": subject}),
    ):
        assert (response.status_code, codes(response)) == (400, [("invalid", "title_template")])
    assert sender.post(TEMPLATES, {**body, "channel": "push"}).status_code == 201


@pytest.mark.parametrize(
    "text", ["{{", "{{ 1x }}", "{{a b}}", "{{a|upper}}", "{{}}", "{{{a}}}", "{% if %}{{", "{{a.b-c}}"]
)
@pytest.mark.parametrize("place", ["title_template", "body_template", "data_template"])
def test_any_other_double_brace_is_refused_on_save(sender, text, place):
    value = {"k": [text]} if place == "data_template" else text
    response = sender.post(TEMPLATES, {"name": "x", "channel": "push", "body_template": "ok", place: value})
    assert (response.status_code, codes(response)) == (400, [("invalid_template", place)])
    assert not MessageTemplate.objects.exists()


def test_kakao_needs_an_approved_template_and_sends_its_code_and_values(sender, shop, carrier):
    from tests.messaging.test_dispatching import dispatch

    body = {"name": "k", "channel": "kakao_talk", "body_template": "{{name}}님", "provider_code": "WELCOME_1"}
    template = sender.post(TEMPLATES, body).json()
    assert template["approval"] == "requested"
    sending = {"subscription_id": str(subscribe(shop, "KakaoTalk").pk), "template_id": template["id"]}
    sending["variables"] = {"name": "민수"}
    refused = sender.post(MESSAGES, sending)
    assert (refused.status_code, codes(refused)) == (400, [("template_not_approved", "template_id")])
    MessageTemplate.objects.update(approval="approved")
    assert sender.post(MESSAGES, sending).json()["body"] == "민수님"
    dispatch(timezone.now())
    assert (carrier.sent[0].template_code, carrier.sent[0].template_parameters) == ("WELCOME_1", {"name": "민수"})
    assert sender.post(TEMPLATES, {**body, "name": "l", "provider_code": "x" * 21}).status_code == 400


def test_a_locked_template_is_written_by_the_locks_holder_alone(sender, welcome):
    from locks.services import LockRequest, acquire_lock

    name = sender.user.get_username()
    asked = LockRequest("main", "MAINTENANCE", "RESOURCE", name, "editing", "template", welcome["id"])
    lock, _replayed = acquire_lock(asked)
    url, held = f"{TEMPLATES}{welcome['id']}/", {"X-Lock-Id": str(lock.pk), "X-Lock-Fence": str(lock.fence)}
    assert sender.patch(url, {"active": True}).status_code == 423
    assert sender.patch(url, {"colour": "red"}).status_code == 423, "the gate comes before the body"
    assert sender.delete(url).status_code == 423
    assert sender.patch(url, {"active": True}, headers={**held, "X-Lock-Fence": str(lock.fence + 1)}).status_code == 409
    assert sender.patch(url, {"active": True}, headers={**held, "X-Lock-Id": "x"}).status_code == 400
    assert sender.patch(url, {"active": True}, headers={"X-Lock-Id": str(lock.pk)}).status_code == 400
    assert sender.patch(url, {"nonsense": 1}).status_code == 423, "the gate comes before other validation"
    assert sender.patch(url, {"nonsense": 1}, headers=held).status_code == 400
    assert MessageTemplate.objects.get().version == 1
    assert sender.patch(url, {"active": True}, headers=held).json()["version"] == 2
