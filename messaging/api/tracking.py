"""What e-mails link to: public, signed, outside /api/. Plain django views: no token, no session, no JSON."""

from base64 import b64decode
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.urls import path
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_safe

from messaging.models import Subscription
from messaging.services import tracking
from messaging.services.links import read_token

PIXEL = b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")
UNSEEN = {"Cache-Control": "no-store, no-cache, must-revalidate, private, max-age=0", "Referrer-Policy": "no-referrer"}


def ids_in(purpose: str, token: str, count: int) -> tuple[UUID, ...]:
    ids = read_token(purpose, token, count)
    if ids is None:
        raise Http404
    return ids


@csrf_exempt
@require_safe
def open_pixel(request: HttpRequest, token: str) -> HttpResponse:
    (message_id,) = ids_in("open", token, 1)
    if request.method == "GET":
        tracking.record_hit(message_id, "open", request.headers, now=timezone.now())
    return HttpResponse(PIXEL, content_type="image/gif", headers=UNSEEN)


@csrf_exempt
@require_safe
def follow_link(request: HttpRequest, token: str) -> HttpResponse:
    message_id, link_id = ids_in("click", token, 2)
    url = tracking.destination(link_id)
    if url is None:
        raise Http404
    if request.method == "GET":
        tracking.record_hit(message_id, "click", request.headers, now=timezone.now(), link_id=link_id)
    return HttpResponseRedirect(url, headers=UNSEEN)


@csrf_exempt
@require_http_methods(["GET", "HEAD", "POST"])
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """GET only shows a page, because scanners follow links; POST (RFC 8058) does it, as often as it comes."""
    subscription_id, _message_id = ids_in("unsubscribe", token, 2)
    done = request.method == "POST"
    if done:
        row = tracking.leave_list(subscription_id, now=timezone.now())
    else:
        row = Subscription.objects.filter(pk=subscription_id).first()
    done = done or row is None or row.status == Subscription.OPTED_OUT
    shown = {"done": done, "hint": row.token_hint if row else ""}
    return HttpResponse(render_to_string("public/unsubscribe.html", shown, request), headers=UNSEEN)


urlpatterns = [
    path("t/o/<str:token>.gif", open_pixel, name="open_pixel"),
    path("t/c/<str:token>", follow_link, name="follow_link"),
    path("u/<str:token>", unsubscribe, name="unsubscribe"),
]
