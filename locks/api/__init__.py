"""The REST door of locks, and what the doors of other apps need of it."""

from django.urls import include, path, re_path
from rest_framework.routers import SimpleRouter

from locks.api import views
from locks.api.gate import gate_headers, gated

__all__ = ["gate_headers", "gated", "urlpatterns"]

router = SimpleRouter()
router.register("locks", views.LockViewSet, basename="branch-lock")

# A branch's name may hold slashes and words like `start`: it ends where the last word of the path begins.
routes = [
    path("acquire/", views.AcquireView.as_view(), name="lock-acquire"),
    path("force-unlock/", views.ForceUnlockView.as_view(), name="lock-force-unlock"),
    path("check/", views.CheckView.as_view(), name="lock-check"),
    path("dashboard/", views.DashboardView.as_view(), name="lock-dashboard"),
    path("cleanup-expired/", views.CleanupView.as_view(), name="lock-cleanup"),
    re_path(r"^status/(?P<branch>(?s:.+))/\Z", views.StatusView.as_view(), name="branch-status"),
    re_path(r"^indexing/(?P<branch>(?s:.+))/start/\Z", views.StartView.as_view(), name="indexing-start"),
    re_path(r"^indexing/(?P<branch>(?s:.+))/complete/\Z", views.CompleteView.as_view(), name="indexing-complete"),
    *router.urls,
]
urlpatterns = [path("api/v1/branch-locks/", include(routes))]
