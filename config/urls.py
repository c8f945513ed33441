from django.contrib import admin
from django.urls import include, path, re_path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from config import api, observe

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("i18n/", include("django.conf.urls.i18n")),
    re_path("^healthz/?$", observe.healthz),
    re_path("^readyz/?$", observe.readyz),
    re_path("^metrics/?$", api.metrics),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs/", SpectacularSwaggerSplitView.as_view(url_name="schema"), name="docs"),
    path("api/v1/", include(api.urlpatterns)),
    path("", include("locks.api")),
    path("", include("messaging.api")),
    path("", include("campaigns.api")),
    path("", include("reminders.api")),
    path("", include("devices.api")),
]

handler400 = "config.api.bad_request"
handler404 = "config.api.not_found"
handler500 = "config.api.server_error"
