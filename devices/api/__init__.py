from django.urls import include, path
from rest_framework.routers import SimpleRouter

from devices.api.fleet import DeviceViewSet, PCViewSet
from devices.api.work import TaskDeviceViewSet, TaskViewSet

router = SimpleRouter()
router.register("pcs", PCViewSet)
router.register("devices", DeviceViewSet)
router.register("tasks", TaskViewSet)
router.register("task-devices", TaskDeviceViewSet)

urlpatterns = [path("api/v1/", include(router.urls))]
