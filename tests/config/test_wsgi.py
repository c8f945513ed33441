"""Bodies as a server hands them over: in chunks, or left unread by an answer given early."""

import json
from io import BytesIO

import pytest
from django.test import RequestFactory

from config.wsgi import application


class Body(BytesIO):
    """Like gunicorn's: ends by itself."""

    def left(self):
        return len(self.getvalue()) - self.tell()


def post(body: Body, **environ):
    told = []
    request = RequestFactory().post("/api/v1/branch-locks/check/", content_type="application/json", **environ).environ
    request |= {"wsgi.input": body, "wsgi.input_terminated": True}
    answer = b"".join(application(request, lambda status, headers: told.append(int(status.split()[0]))))
    return told[0], json.loads(answer)


@pytest.fixture
def authorization(make_client, keeps_its_connection):
    return make_client("lock-holder")._credentials


def test_reads_a_body_sent_in_chunks(authorization):
    status, answer = post(
        Body(b'{"branch_name": "main", "nope": 1}'),
        CONTENT_LENGTH="",
        HTTP_TRANSFER_ENCODING="chunked",
        **authorization,
    )
    assert (status, answer["errors"][0]["attr"]) == (400, "nope")


def test_refuses_a_body_in_chunks_beyond_the_limit(authorization, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    body = Body(b'"' + b"x" * 200_000)
    assert post(body, CONTENT_LENGTH="", HTTP_TRANSFER_ENCODING="chunked", **authorization)[0] == 413
    assert body.left() == 0


def test_reads_to_the_end_what_a_refusal_left_unread(db, keeps_its_connection):
    body = Body(b"x" * 200_000)
    assert post(body, CONTENT_LENGTH="200000")[0] == 401
    assert body.left() == 0
