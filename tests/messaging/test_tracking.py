"""Links in e-mails: what goes out, what comes back, and who is believed to be a person."""

import re
from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from messaging.models import Message, MessageAttempt, MessageHit, Subscription, TrackedLink
from messaging.services.claiming import claim_batch
from messaging.services.links import (
    click_url,
    link_id,
    make_token,
    open_url,
    prepare_email,
    read_token,
    rewrite,
    store_links,
    unsubscribe_url,
)
from messaging.services.machines import machine_reasons
from messaging.services.tracking import MOST_HITS
from tests.messaging.factories import message, message_in, subscribe

CHROME = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36"
PERSON = {"HTTP_USER_AGENT": CHROME}


def mail(body, kind="notice", tracking=True):
    row = SimpleNamespace(id=uuid4(), subscription_id=uuid4(), kind=kind, body=body)
    return row, prepare_email(row, SimpleNamespace(id=uuid4(), settings={} if tracking else {"tracking": False}))


class TestPreparing:
    def test_links_lead_over_us_and_everything_else_stays(self):
        row, prepared = mail(
            '<html><body>\n<!-- <a href="http://no/"> --><a\n  title=" href=x" HREF=\'https://a.example/?x=1&amp;y=2\''
            ' b=c>go</a><a href=mailto:x@y.example>m</a><a href=https://b.example/p>z</a><a href="#top">t</a>'
            '<script>"<a href=\'http://s/\'>"</script><img src="http://i.example/1.png">\n</BODY></html>'
        )
        assert sorted(prepared.links.values()) == ["https://a.example/?x=1&y=2", "https://b.example/p"]
        html = prepared.html
        for key in prepared.links:
            assert f'"{click_url(row.id, key)}"' in html
        assert f'<img src="{open_url(row.id)}" width="1" height="1" alt=""></BODY>' in html
        restored = html
        for key, url in prepared.links.items():
            restored = restored.replace(f'"{click_url(row.id, key)}"', url)
        restored = re.sub(r'<img src="[^"]*/t/o/[^>]*>', "", restored)
        expected = row.body.replace("'https://a.example/?x=1&amp;y=2'", "https://a.example/?x=1&y=2")
        assert restored == expected

    @pytest.mark.parametrize(
        "href",
        [
            "mailto:a@b.example", "tel:+82", "#x", "/relative", "//host/x", "javascript:alert(1)", "ftp://h/", "http://",
            "https://h:99999/", "http://a b/", "http://a\\b", "http://[::1", "https://h/" + "a" * 2100, "",
        ],
    )  # fmt: skip
    def test_what_leads_nowhere_over_http_stays(self, href):
        _row, prepared = mail(f'<a href="{href}">x</a>')
        assert f'<a href="{href}">x</a>' in prepared.html and prepared.links == {}

    def test_own_links_are_not_wrapped_again(self):
        url = unsubscribe_url(uuid4(), uuid4())
        _row, prepared = mail(f'<a href="{url}">leave</a>')
        assert url in prepared.html and prepared.links == {}

    def test_without_tracking_the_body_is_untouched(self):
        row, prepared = mail('<a href="https://a.example/">x</a>', tracking=False)
        assert prepared.html == row.body and prepared.links == {}
        assert "List-Unsubscribe" in prepared.headers

    def test_a_body_without_markup_gets_the_pixel_at_its_end(self):
        row, prepared = mail("hello")
        assert prepared.html.startswith('hello<img src="')

    @pytest.mark.parametrize("junk", ["<![x[ y ]]>", "<", "<a", "<a href", "<a href=", "<!", "<!-", "</", "<a href='x"])
    def test_no_junk_breaks_it(self, junk):
        _row, prepared = mail(f'<a href="https://a.example/">x</a>{junk}')
        assert list(prepared.links.values()) == ["https://a.example/"]
        assert junk in prepared.html

    @pytest.mark.parametrize("kind", ["notice", "marketing"])
    def test_a_list_can_be_left_by_one_click(self, kind):
        row, prepared = mail("x", kind=kind)
        assert prepared.headers == {
            "List-Unsubscribe": f"<{unsubscribe_url(row.subscription_id, row.id)}>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        }

    def test_a_transactional_mail_belongs_to_no_list(self):
        assert mail("x", kind="transactional")[1].headers == {}


class TestTokens:
    def test_they_mean_what_they_were_made_for_and_nothing_else(self):
        first, second = uuid4(), uuid4()
        token = make_token("click", first, second)
        assert read_token("click", token, 2) == (first, second)
        assert read_token("unsubscribe", token, 2) is None
        assert read_token("click", token, 1) is None
        swapped = make_token("open", first)
        for bad in ("", "é", "\x00", token[:-1], token + "A", token + "=", token.swapcase(), swapped, "A" * 64):
            assert read_token("click", bad, 2) is None, bad

    def test_a_key_that_was_rotated_out_is_still_read(self, settings):
        ident = uuid4()
        token = make_token("open", ident)
        settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "another key" * 5
        assert read_token("open", token, 1) == (ident,)
        settings.SECRET_KEY_FALLBACKS = []
        assert read_token("open", token, 1) is None


NOW = timezone.now()
LONG_AGO = NOW - timedelta(hours=1)


class TestMachines:
    @pytest.mark.parametrize(
        "agent",
        [
            "", "Mozilla/5.0", "curl/8.5.0", "python-requests/2.32", "Go-http-client/2.0", "Wget/1.21",
            "Mozilla/5.0 (Windows NT 5.1; rv:11.0) Gecko Firefox/11.0 (via ggpht.com GoogleImageProxy)",
            "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
            "Mozilla/5.0 (compatible; Barracuda Sentinel (EE))", "Mimecast", "facebookexternalhit/1.1",
            "Mozilla/5.0 (X11; Linux x86_64) HeadlessChrome/120.0", "okhttp/4.9.0", "Java/17", "YahooMailProxy",
            "Mozilla/5.0 (compatible; Yeti/1.1; +https://naver.me/spd)", "MailScanner/5.0", "mozilla/5.0",
            "masscan/1.3", "Mozilla/5.0 (compatible; CensysInspect/1.1)", "Hornetsecurity",
            "Expanse, a Palo Alto Networks company",
        ],
    )  # fmt: skip
    def test_programs_are_told_by_their_name(self, agent):
        assert machine_reasons({"User-Agent": agent}, LONG_AGO, NOW)

    @pytest.mark.parametrize(
        "agent",
        [
            CHROME,
            "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 (KHTML) Mobile/15E148",
            "Mozilla/5.0 (Linux; Android 9; CUBOT NOTE 7) AppleWebKit/537.36 Chrome/80 Mobile Safari/537.36",
            "Mozilla/5.0 (Linux; Android 14) AppleWebKit/537.36 Chrome/126 Mobile Safari/537.36;KAKAOTALK 2410500",
            "Mozilla/5.0 (X11; Linux x86_64; rv:115.0) Gecko/20100101 Thunderbird/115.3",
            "Microsoft Office/16.0 (Windows NT 10.0; Microsoft Outlook 16.0.5430; Pro)",
        ],
    )
    def test_peoples_programs_are_not(self, agent):
        assert machine_reasons({"User-Agent": agent}, LONG_AGO, NOW) == []

    @pytest.mark.parametrize(
        ("name", "value"), [("Purpose", "prefetch"), ("Sec-Purpose", "prefetch;prerender"), ("X-Moz", "prefetch")]
    )
    def test_a_prefetch_is_no_visit(self, name, value):
        assert machine_reasons({"User-Agent": CHROME, name: value}, LONG_AGO, NOW) == ["prefetch"]

    def test_nobody_reads_within_two_seconds(self):
        def reasons(ago):
            return machine_reasons({"User-Agent": CHROME}, None if ago is None else NOW - timedelta(seconds=ago), NOW)

        assert reasons(1.9) == ["too_soon"] and reasons(None) == ["too_soon"]
        assert reasons(2) == []


@pytest.fixture
def sent(db):
    row = message_in("successful", subscribe(type="Email"), at=timezone.now() - timedelta(hours=1))
    link = link_id(row.application_id, "https://shop.example/?a=1")
    store_links({link: (row.application_id, "https://shop.example/?a=1")})
    row.link = link
    return row


def path_of(url):
    return url.removeprefix("http://localhost:8000")


def status_of(row):
    return Message.objects.values_list("status", flat=True).get(pk=row.pk)


@pytest.mark.django_db
class TestHits:
    def test_a_persons_open_converts_and_implies_the_receipt(self, client, sent):
        answer = client.get(path_of(open_url(sent.pk)), headers={"user-agent": CHROME})
        assert answer.status_code == 200 and answer["Content-Type"] == "image/gif"
        assert "no-store" in answer["Cache-Control"] and answer.content.startswith(b"GIF89a")
        row = Message.objects.get(pk=sent.pk)
        assert (row.status, row.receipt_implied, row.conversion) == ("converted", True, {"action": "open"})
        hit = MessageHit.objects.get()
        assert (hit.kind, hit.by, hit.reasons) == ("open", "human", [])

    def test_a_persons_click_goes_on_to_the_stored_address(self, client, sent):
        answer = client.get(path_of(click_url(sent.pk, sent.link)), headers={"user-agent": CHROME})
        assert (answer.status_code, answer["Location"]) == (302, "https://shop.example/?a=1")
        assert status_of(sent) == "converted"
        assert MessageHit.objects.get().link_id == sent.link

    @pytest.mark.parametrize("agent", ["Mozilla/5.0", "curl/8", ""])
    def test_a_machine_is_recorded_and_moves_nothing(self, client, sent, agent):
        assert client.get(path_of(open_url(sent.pk)), headers={"user-agent": agent}).status_code == 200
        assert client.get(path_of(click_url(sent.pk, sent.link)), headers={"user-agent": agent}).status_code == 302
        assert status_of(sent) == "successful"
        assert list(MessageHit.objects.order_by("id").values_list("kind", "by")) == [
            ("open", "machine"),
            ("click", "machine"),
        ]

    def test_a_hit_too_soon_after_sending_is_a_machines(self, client, sent):
        Message.objects.filter(pk=sent.pk).update(sent_at=timezone.now())
        client.get(path_of(open_url(sent.pk)), headers={"user-agent": CHROME})
        assert status_of(sent) == "successful"
        assert MessageHit.objects.get().reasons == ["too_soon"]

    @pytest.mark.parametrize(("tried", "status"), [(3, "converted"), (1, "pending")])
    def test_a_person_who_opens_it_proves_that_it_was_sent(self, client, tried, status):
        row = message(subscribe(type="Email"), body="<p>x</p>", kind="notice")
        at = timezone.now() - timedelta(seconds=tried)
        MessageAttempt.objects.create(message=row, attempt_no=1, started_at=at, ended_at=at, outcome="unknown")
        Message.objects.update(hold_reason="outcome_unknown", attempt_count=1)
        client.get(path_of(open_url(row.pk)), headers={"user-agent": CHROME})
        row = Message.objects.get()
        assert row.status == status
        assert row.hold_reason == (None if status == "converted" else "outcome_unknown")

    def test_head_is_not_recorded(self, client, sent):
        assert client.head(path_of(open_url(sent.pk)), headers={"user-agent": CHROME}).status_code == 200
        answer = client.head(path_of(click_url(sent.pk, sent.link)), headers={"user-agent": CHROME})
        assert answer.status_code == 302
        assert not MessageHit.objects.exists() and status_of(sent) == "successful"

    @pytest.mark.parametrize("status", ["failed", "pending", "errored"])
    def test_a_message_that_cannot_convert_stays_and_the_link_works(self, client, status):
        row = message_in(status, subscribe(type="Email"), at=timezone.now() - timedelta(hours=1))
        link = link_id(row.application_id, "https://shop.example/")
        store_links({link: (row.application_id, "https://shop.example/")})
        answer = client.get(path_of(click_url(row.pk, link)), headers={"user-agent": CHROME})
        assert answer.status_code == 302 and status_of(row) == status
        assert MessageHit.objects.filter(message=row).count() == 1

    def test_again_is_recorded_and_changes_nothing(self, client, sent):
        for _time in range(3):
            client.get(path_of(open_url(sent.pk)), headers={"user-agent": CHROME})
        row = Message.objects.get(pk=sent.pk)
        assert row.status == "converted" and row.version == 3
        assert MessageHit.objects.count() == 3
        assert Subscription.objects.get(pk=sent.subscription_id).total_messages_converted == 1

    def test_a_link_outlives_its_message(self, client, sent):
        url = path_of(click_url(uuid4(), sent.link))
        assert client.get(url, headers={"user-agent": CHROME}).status_code == 302
        assert not MessageHit.objects.exists()

    def test_without_tracking_nothing_is_recorded(self, client, sent):
        sent.application.settings = {"tracking": False}
        sent.application.save(update_fields=["settings"])
        assert client.get(path_of(click_url(sent.pk, sent.link)), headers={"user-agent": CHROME}).status_code == 302
        assert not MessageHit.objects.exists() and status_of(sent) == "successful"

    def test_reloading_does_not_fill_the_table(self, client, sent):
        MessageHit.objects.bulk_create(
            MessageHit(message=sent, kind="open", by="machine", occurred_at=NOW) for _n in range(MOST_HITS)
        )
        client.get(path_of(open_url(sent.pk)), headers={"user-agent": "curl/8"})
        assert MessageHit.objects.count() == MOST_HITS

    @pytest.mark.parametrize(
        "path", ["/t/o/x.gif", "/t/c/x", "/u/x", "/t/o/%00.gif", "/t/c/%00", "/u/%F0%9F", "/t/c/é"]
    )
    def test_a_bad_token_is_404(self, client, path):
        assert client.get(path).status_code == 404

    def test_a_foreign_links_token_is_404(self, client, sent):
        token = make_token("click", sent.pk, uuid4())
        assert client.get(f"/t/c/{token}").status_code == 404
        assert client.get(f"/t/o/{make_token('unsubscribe', sent.pk)}.gif").status_code == 404

    def test_other_methods_are_refused(self, sent):
        client = Client(enforce_csrf_checks=True)
        assert client.post(path_of(open_url(sent.pk))).status_code == 405
        assert client.post(path_of(click_url(sent.pk, sent.link))).status_code == 405


@pytest.mark.django_db
class TestUnsubscribing:
    def test_a_look_changes_nothing_and_a_post_leaves(self, client, sent):
        url = path_of(unsubscribe_url(sent.subscription_id, sent.pk))
        page = client.get(url)
        assert page.status_code == 200 and b"<form" in page.content
        assert Subscription.objects.get(pk=sent.subscription_id).status == 1
        for _time in range(2):
            done = client.post(url, "List-Unsubscribe=One-Click", content_type="application/x-www-form-urlencoded")
            assert done.status_code == 200 and b"<form" not in done.content
            assert Subscription.objects.get(pk=sent.subscription_id).status == -2
        assert b"<form" not in client.get(url).content

    def test_it_needs_no_csrf_token(self, sent):
        url = path_of(unsubscribe_url(sent.subscription_id, sent.pk))
        assert Client(enforce_csrf_checks=True).post(url).status_code == 200

    def test_a_subscription_that_is_gone_has_left(self, client):
        assert client.post(path_of(unsubscribe_url(uuid4(), uuid4()))).status_code == 200


@pytest.mark.django_db
def test_the_dispatcher_sends_tracked_mails_whose_links_are_stored():
    subscription = subscribe(type="Email")
    row = message(subscription, body='<p><a href="https://shop.example/x">x</a></p>', kind="notice")
    batch = claim_batch("Email", "null", 10, now=row.created_at)
    (sent,) = batch.outgoing
    stored = TrackedLink.objects.get()
    assert stored.url == "https://shop.example/x"
    assert click_url(row.pk, stored.pk) in sent.body and open_url(row.pk) in sent.body
    assert sent.headers["List-Unsubscribe"] == f"<{unsubscribe_url(subscription.pk, row.pk)}>"
    assert "/t/c/" not in Message.objects.get(pk=row.pk).body


@pytest.mark.django_db
def test_other_channels_are_left_alone():
    row = message(subscribe(type="SMS"), body="see https://shop.example/x")
    (sent,) = claim_batch("SMS", "null", 10, now=row.created_at).outgoing
    assert (sent.body, sent.headers) == ("see https://shop.example/x", {})


def test_a_declaration_nobody_knows_does_not_stop_the_text_part():
    from messaging.providers.mime import text_of

    assert text_of("<p>before</p><![odd[ after ]]>") == "before"


def test_a_number_that_python_cannot_read_stops_neither_the_links_nor_the_text_part():
    from messaging.providers.mime import text_of

    endless = f"&#{'9' * 5000};"
    html = f'<p>{endless}</p><a href="https://shop.example/{endless}">x</a><a href="https://shop.example/">y</a>'
    rewritten, links = rewrite(html, uuid4(), uuid4())
    assert "https://shop.example/" in links.values()
    assert rewritten.count("/t/c/") == len(links)
    assert text_of(html).endswith("y (https://shop.example/)")
