"""Leads and their subscriptions; what was waiting for a lead's missing data goes on when it comes."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models.functions import Lower
from django.utils.translation import gettext as _

from campaigns.models import Execution, Lead, Step
from campaigns.models.leads import SUBSCRIPTION_OF
from campaigns.services.completion import reopen
from campaigns.services.rows import Ledger, grouped, lock_sequences, skip_executions
from campaigns.services.texts import missing
from campaigns.services.windows import opening
from config.errors import Conflict, Missing
from config.sweeping import nudge
from messaging.models import Application
from messaging.services import SubscriptionSpec, upsert_subscriptions
from messaging.services.content import address_problem
from messaging.services.subscriptions import time_zones

LINKS = [name for name, _type, _field in SUBSCRIPTION_OF.values()]


@transaction.atomic
def create_lead(application: Application, fields: Mapping[str, Any], now: datetime) -> Lead:
    lead = Lead(application=application, **fields)
    _save(lead, force_insert=True)
    subscribe([lead], now)
    return lead


def _save(lead: Lead, **how: Any) -> None:
    try:
        with transaction.atomic():
            lead.save(**how)
    except IntegrityError as error:
        if "leads_email_once" not in str(error):
            raise
        raise Conflict(_("Another lead has this e-mail address."), code="duplicate_lead", attr="email") from None


@transaction.atomic
def create_leads(
    application: Application, entries: Sequence[Mapping[str, Any]], now: datetime
) -> list[tuple[Lead, bool]]:
    """Each lead and whether it is new; one with the same e-mail address is the one that is there."""
    leads = [Lead(application=application, **fields) for fields in entries]
    wanted = {lead.email.lower() for lead in leads if lead.email}
    there = _by_email(application, wanted)
    first: dict[str, Lead] = {}
    for lead in leads:
        if lead.email and lead.email.lower() not in there:
            first.setdefault(lead.email.lower(), lead)
    fresh = [lead for lead in leads if not lead.email or first.get(lead.email.lower()) is lead]
    # In the order of the addresses: two imports of the same people wait for each other, not in a circle.
    Lead.objects.bulk_create(sorted(fresh, key=lambda lead: (lead.email or "").lower()), ignore_conflicts=True)
    # Another request may have been quicker with the same address: its row is the one.
    stored = _by_email(application, wanted)
    made = [lead for lead in fresh if not lead.email or stored[lead.email.lower()].pk == lead.pk]
    subscribe(made, now)
    new = {lead.pk for lead in made}
    return [(lead, True) if lead.pk in new else (stored[(lead.email or "").lower()], False) for lead in leads]


def _by_email(application: Application, wanted: set[str]) -> dict[str, Lead]:
    rows = Lead.objects.filter(application=application).alias(lowered=Lower("email")).filter(lowered__in=wanted)
    return {(row.email or "").lower(): row for row in rows}


class Overtaken(Exception):
    """A step began to wait for the lead while its sequences were being locked."""


def change_lead(lead_id: UUID, changes: Mapping[str, Any], now: datetime) -> Lead:
    while True:
        try:
            return _change_lead(lead_id, changes, now)
        except Overtaken:
            continue


@transaction.atomic
def _change_lead(lead_id: UUID, changes: Mapping[str, Any], now: datetime) -> Lead:
    # Sequences before the lead: the same order as everywhere, and enrollments cannot change under us.
    affected = Execution.objects.filter(enrollment__lead=lead_id, status="awaiting_enrichment")
    owners = affected.values_list("enrollment__sequence_id", flat=True)
    locked = lock_sequences(set(owners))
    lead = Lead.objects.select_for_update().filter(pk=lead_id).first()
    if lead is None:
        raise Missing(_("There is no such lead."))
    if set(owners.all()) - {row.pk for row in locked}:
        raise Overtaken
    for name, value in changes.items():
        setattr(lead, name, value)
    _save(lead, update_fields=list(changes))
    subscribe([lead], now)
    enrich([lead], [row.pk for row in locked], now)
    return lead


def enrich(leads: Sequence[Lead], sequence_ids: Sequence[UUID], now: datetime) -> None:
    """Executions whose lead has now all they need become pending; those of ended enrollments are orphans."""
    rows = list(
        Execution.objects.of(sequence_ids)
        .filter(enrollment__lead__in=[lead.pk for lead in leads], status="awaiting_enrichment")
        .select_related("step", "enrollment__lead", "enrollment__sender")
        .order_by("pk")
        .select_for_update(of=("self",))
    )
    ready = [row for row in rows if can_be_written(row.step, row.enrollment.lead)]
    if not ready:
        return
    ledger = Ledger(now)
    over = [row.pk for row in ready if not row.enrollment.is_live]
    ledger.skipped("enrich", skip_executions(Execution.objects.filter(pk__in=over), "orphaned"), "orphaned")
    live = [row for row in ready if row.enrollment.is_live]
    for row in live:
        start, sender = max(row.scheduled_at, now), row.enrollment.sender
        row.scheduled_at = opening(sender, row.enrollment.lead.time_zone, start) if sender else start
        row.deferred_until = None
    Execution.objects.bulk_update(live, ["scheduled_at", "deferred_until"])
    Execution.objects.filter(pk__in=[row.pk for row in live]).update(status="pending")
    keys = grouped((row.enrollment.sequence_id, row.pk) for row in live)
    before, after = {"status": "awaiting_enrichment"}, {"status": "pending"}
    ledger.bulk("enrich.pending", keys, before=before, after=after)
    reopen(sequence_ids, now, ledger)
    nudge("campaigns.send_due_steps")


def look_again(waiting: Collection[Execution]) -> None:
    """Whoever completes a lead while a step of it is put to wait finds nothing to wake: so whoever puts it there looks
    once more, under the lead's lock."""
    if not waiting:
        return
    keys = {row.enrollment.lead_id for row in waiting}
    leads = {lead.pk: lead for lead in Lead.objects.select_for_update().filter(pk__in=keys).order_by("pk")}
    ready = [row.pk for row in waiting if can_be_written(row.step, leads[row.enrollment.lead_id])]
    if ready:
        Execution.objects.filter(pk__in=ready).update(status="pending")


def subscribe(leads: Sequence[Lead], now: datetime) -> None:
    """Upsert the subscriptions of the leads' addresses, all at once per application, and keep their ids."""
    by_application: dict[UUID, list[tuple[Lead, str]]] = {}
    for lead in leads:
        for channel in SUBSCRIPTION_OF:
            if reachable(lead, channel):
                by_application.setdefault(lead.application_id, []).append((lead, channel))
            else:
                setattr(lead, SUBSCRIPTION_OF[channel][0], None)
    for pairs in by_application.values():
        specs = [_spec(lead, channel) for lead, channel in pairs]
        rows = upsert_subscriptions(pairs[0][0].application, specs, now=now)
        for (lead, channel), row in zip(pairs, rows, strict=True):
            setattr(lead, SUBSCRIPTION_OF[channel][0], row)
    Lead.objects.bulk_update(leads, LINKS)


def _spec(lead: Lead, channel: str) -> SubscriptionSpec:
    return SubscriptionSpec(
        type=SUBSCRIPTION_OF[channel][1],
        token=lead.address(channel) or "",
        user_id=str(lead.pk),
        locale=lead.locale or None,
        time_zone=lead.time_zone if lead.time_zone in time_zones() else None,
    )


def subscribe_missing(leads: Sequence[Lead], now: datetime) -> None:
    """Leads written by hand have no subscriptions yet."""
    without = [
        lead
        for lead in leads
        if any(reachable(lead, channel) and not lead.subscription_id(channel) for channel in SUBSCRIPTION_OF)
    ]
    if without:
        subscribe(without, now)


def can_be_written(step: Step, lead: Lead) -> bool:
    return reachable(lead, step.channel) and not missing(step, lead)


def reachable(lead: Lead, channel: str) -> bool:
    """Has an address of the channel that can be one; a row written by hand may hold anything."""
    address = lead.address(channel)
    return bool(address) and address_problem(channel, str(address)) is None
