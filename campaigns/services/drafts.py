"""Executions as drafts of messages."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from email.utils import quote
from typing import Any
from uuid import UUID

from campaigns.models import Execution, Lead, Sender
from campaigns.services.leads import can_be_written, subscribe_missing
from campaigns.services.texts import parameters, rendered
from messaging.models import MessageTemplate
from messaging.services import Draft


class Drafts:
    """What is needed to write to many leads, read at once: their subscriptions, and the approved Kakao templates."""

    def __init__(self, rows: Sequence[Execution], now: datetime) -> None:
        leads: dict[UUID, Lead] = {row.enrollment.lead_id: row.enrollment.lead for row in rows}
        subscribe_missing(list(leads.values()), now)
        # A lead may have been loaded once per row; the one with the fresh subscriptions serves all.
        self.leads = leads
        self.complete: list[Execution] = []
        self.incomplete: list[Execution] = []
        for row in rows:
            whole = can_be_written(row.step, leads[row.enrollment.lead_id])
            (self.complete if whole else self.incomplete).append(row)
        self.templates = _kakao_templates(rows)

    def of(self, row: Execution, at: datetime, now: datetime) -> Draft:
        lead, step, sequence = self.leads[row.enrollment.lead_id], row.step, row.enrollment.sequence
        title, body = rendered(step, lead)
        template = self.templates.get((sequence.application_id, step.subject)) if step.channel == "kakao_talk" else None
        return Draft(
            application_id=sequence.application_id,
            subscription_id=lead.subscription_id(step.channel),
            title=title,
            body=body,
            kind=sequence.kind,
            campaign=f"sequence:{sequence.pk}",
            from_address=from_address(row.enrollment.sender, step.channel),
            scheduled_at=at if at > now else None,
            idempotency_key=f"step-execution:{row.pk}",
            **(_kakao(template, step, lead) if template else {}),
        )

    def as_test(self, row: Execution, now: datetime) -> Draft:
        """Told apart from the campaign's own messages, and repeatable."""
        return replace(self.of(row, now, now), idempotency_key=None, campaign=f"test:{row.enrollment.sequence_id}")


def from_address(sender: Sender | None, channel: str) -> str:
    """A mailbox with its name, or a number. A KakaoTalk sender is a profile, which is part of the provider's set-up."""
    if sender is None or sender.channel != channel or channel == "kakao_talk":
        return ""
    name, address = one_line(sender.display_name), one_line(sender.address)
    return f'"{quote(name)}" <{address}>' if name and channel == "email" else address


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _kakao(template: MessageTemplate, step: Any, lead: Lead) -> dict[str, Any]:
    return {
        "template_id": template.pk,
        "template_version": template.version,
        "template_code": template.provider_code,
        "template_parameters": parameters(step, lead),
    }


def _kakao_templates(rows: Sequence[Execution]) -> dict[tuple[UUID, str], MessageTemplate]:
    """KakaoTalk carries approved templates only: the step's subject is the template's name."""
    wanted = {row.step.subject for row in rows if row.step.channel == "kakao_talk"}
    if not wanted:
        return {}
    found = MessageTemplate.objects.existing().filter(channel="kakao_talk", active=True, approval="approved")
    return {(row.application_id, row.name): row for row in found.filter(name__in=wanted).exclude(provider_code="")}
