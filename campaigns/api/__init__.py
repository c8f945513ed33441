from django.urls import include, path
from rest_framework.routers import SimpleRouter

from campaigns.api.enrollments import EnrollmentViewSet, ExecutionViewSet, ReplyViewSet
from campaigns.api.leads import LeadViewSet
from campaigns.api.senders import SenderViewSet
from campaigns.api.sequences import SequenceViewSet
from campaigns.api.steps import StepViewSet

router = SimpleRouter()
router.register("senders", SenderViewSet)
router.register("leads", LeadViewSet)
router.register("sequences", SequenceViewSet)
router.register(r"sequences/(?P<sequence_id>[^/]+)/steps", StepViewSet, basename="step")
router.register("enrollments", EnrollmentViewSet)
router.register("step-executions", ExecutionViewSet, basename="step-execution")
router.register("replies", ReplyViewSet)

urlpatterns = [path("api/v1/", include(router.urls))]
