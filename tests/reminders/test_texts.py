"""A page's HTML as plain words, and the words as each channel can carry them."""

from types import SimpleNamespace
from uuid import uuid4

import pytest

from messaging.services.content import PUSH_BYTES, push_bytes
from reminders.services.sending import compose, fit_push
from reminders.services.texts import Words, plain_body, plain_start, plain_title, words_of


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain", "plain"),
        ("<p>Hello <b>world</b></p>", "Hello world"),
        ("1 < 2 and <3", "1 < 2 and <3"),
        ("a <b", "a <b"),
        ("ends with <", "ends with <"),
        ("<a title=\"x > y\" href='>'>link</a>", "link"),
        ("<a title=it's>it's</a>", "it's"),
        ("<script>if (a < b) { '</p>' }</script>after", "after"),
        ("<STYLE type='text/css'>p > a {}</Style >after", "after"),
        ("<script>never ends", ""),
        ("<scripted>kept</scripted>", "kept"),
        ("a<!-- <b>hidden</b> -->b<!DOCTYPE html><?xml?>c", "abc"),
        ("&lt;b&gt; &amp;amp; &#44; &eacute;", "<b> &amp; , é"),
        ("  two\n lines  ", "two\n lines"),
        ("&nbsp;", ""),
        ("<br/>", ""),
        ("a&#" + "9" * 5000 + ";b", "a\ufffdb"),
        ("a&#" + "0" * 900 + "65;b", "aAb"),
    ],
)
def test_markup_goes_and_words_stay(html, text):
    assert plain_body(html) == text


def test_blanks_in_a_title_become_one_space():
    assert plain_title(" a\t\n b&nbsp;<b> c</b> ") == "a b c"


def test_cut_by_code_point_after_stripping():
    assert plain_body("<b>" + "😀" * 2001 + "</b>") == "😀" * 2000
    assert plain_title("&amp;" * 2001) == "&" * 2000


def test_words_are_empty_when_nothing_is_left():
    assert not words_of("<br>", " <script>x</script> ")
    assert words_of("", "x") and words_of("x", "")


@pytest.mark.parametrize("html", ["<a " * 300_000 + '="x>y"', "<" * 500_000, "</script" * 120_000, "<a ='\"" * 140_000])
def test_hostile_markup_is_read_once(html):
    """These take hours where each `<` is followed to the end of the text."""
    assert len(plain_body(html)) == 2000


@pytest.mark.parametrize("tail", ["", "<b", "&am", "<!-- x", "<script>", '<a title="'])
def test_a_beginning_tells_the_same_words_as_the_whole(tail):
    whole = "<p>" + "word &amp; " * 1000 + tail
    assert plain_start(whole) == plain_body(whole + "rest")
    assert plain_start("<i>" * 5000 + "short") is None
    assert plain_start("<i title='" + "x" * 10_000) is None


def composed(channel, title, body, page_id="p"):
    claim = SimpleNamespace(alarm_id=uuid4(), page_id=page_id, application_id=uuid4(), key="reminder:x:1")
    return compose(claim, Words(title, body), SimpleNamespace(pk=uuid4(), channel_type=channel))


def test_push_fits_its_payload_to_the_last_code_point():
    draft = composed("push", "제목", "가" * 2000)
    assert draft.title == "제목"
    assert push_bytes(draft.title, draft.body, draft.data) <= PUSH_BYTES
    assert push_bytes(draft.title, draft.body + "가", draft.data) > PUSH_BYTES


def test_push_cuts_the_title_when_the_body_alone_does_not_help():
    title, body = fit_push("😀" * 2000, "body", {"page_id": "p" * 255})
    assert body == ""
    assert (
        push_bytes(title, "", {"page_id": "p" * 255})
        <= PUSH_BYTES
        < push_bytes(title + "😀", "", {"page_id": "p" * 255})
    )


def test_push_without_a_title_has_no_heading():
    assert (composed("push", "", "body").title, composed("push", "title", "").body) == ("", "")


def test_mail_is_escaped_and_always_has_subject_and_body():
    draft = composed("email", "a < b", "x < y & z")
    assert (draft.title, draft.body) == ("a < b", "x &lt; y &amp; z")
    draft = composed("email", "", "first\nline " + "x" * 100)
    assert draft.title == ("first line " + "x" * 100)[:78]
    assert composed("email", "<only>", "").body == "&lt;only&gt;"


def test_the_inbox_shows_a_banner():
    assert composed("in_app", "t", "b").data["layout_type"] == "banner"
