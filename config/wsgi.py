import os
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

from django.conf import settings
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
django = get_wsgi_application()

CHUNK, DRAINED_CHUNKS = 65536, 1024


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Django, with the two things about a request's body that it leaves to its server, and gunicorn to it."""
    body = environ["wsgi.input"]
    ends = environ.get("wsgi.input_terminated")  # only then may one read to the end
    if ends and "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower():
        measure(environ)
    try:
        return django(environ, start_response)
    finally:
        if ends:
            drain(body)


def measure(environ: dict[str, Any]) -> None:
    """Django takes a body without a length for none, and a client that sends in chunks would not be heard."""
    text = environ["wsgi.input"].read(settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1)
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = BytesIO(text), str(len(text))


def drain(body: Any) -> None:
    """What an answer given early (401, 404, 413 …) left unread: gunicorn would hang up on the client, who then sees a
    reset instead of the answer, or of the answer to its next request."""
    for _chunk in range(DRAINED_CHUNKS):
        if not body.read(CHUNK):
            return
