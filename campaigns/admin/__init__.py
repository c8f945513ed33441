from campaigns.admin.enrollments import EnrollmentAdmin, ExecutionAdmin, ReplyAdmin
from campaigns.admin.panels import campaigns_panel
from campaigns.admin.senders import LeadAdmin, SenderAdmin
from campaigns.admin.sequences import SequenceAdmin

__all__ = [
    "EnrollmentAdmin",
    "ExecutionAdmin",
    "LeadAdmin",
    "ReplyAdmin",
    "SenderAdmin",
    "SequenceAdmin",
    "campaigns_panel",
]
