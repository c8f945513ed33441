from campaigns.models.enrollments import Enrollment
from campaigns.models.executions import EFFECTIVE_DUE, Execution, SkipReason
from campaigns.models.leads import Lead
from campaigns.models.replies import Reply
from campaigns.models.senders import CHANNELS, Sender
from campaigns.models.sequences import DisplayState, Sequence, SequenceSender
from campaigns.models.steps import Step

__all__ = [
    "CHANNELS",
    "EFFECTIVE_DUE",
    "DisplayState",
    "Enrollment",
    "Execution",
    "Lead",
    "Reply",
    "Sender",
    "Sequence",
    "SequenceSender",
    "SkipReason",
    "Step",
]
