"""What each automatic rule means, for the timelines."""

from typing import Any

from django.utils.translation import gettext_lazy as _

WORDS: dict[str, Any] = {
    "drift": _("The signal for pending work disagreed with the rows and was set right."),
    "stuck": _("A step was in work for too long; its message told how it ended."),
    "orphans": _("Steps of enrollments that have ended were skipped."),
    "stranded": _("Steps waited for a sender that cannot send; they were given to another, put back or skipped."),
    "reverse": _("Called complete although people were never written to."),
    "reverse.stale": _("Called complete although people were never written to; too late for them now, so skipped."),
    "reverse.reopened": _("Called complete although people were never written to; opened again."),
    "forward": _("Nothing was left to do or to wait for."),
    "follow": _("The outcome of the message became the outcome of the step."),
    "advance": _("The lead went on to the next step, or to the end."),
    "sender": _("The provider does not take the sender's address: it sends no more until somebody activates it."),
    "send": _("Steps whose time had come were taken for sending."),
    "reply": _("An answer came, and what was still planned for the lead was dropped."),
    "ended": _("Ended by a person; what was still planned was dropped."),
    "resume": _("A pause was over."),
    "skip_stale": _("A person had the forgotten steps skipped."),
}
