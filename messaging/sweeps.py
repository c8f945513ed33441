from config.sweeping import Sweep, nudge
from messaging.models import Message, MessageAttempt, WebhookInbox
from messaging.services import analytics, ending, incoming, resolving, webhooks
from messaging.services.creating import DISPATCH
from messaging.services.dispatching import dispatch, lanes


def dispatch_due_messages(sweep: Sweep) -> None:
    """Several run side by side; each message is claimed by one. Calls go out, so a dry run only counts."""
    if sweep.dry_run:
        types = [lane.subscription_type for lane in lanes()]
        sweep.counts["due"] += Message.objects.due(sweep.now).filter(subscription_type__in=types).count()
        return
    sweep.counts.update(dispatch(sweep.clock, sweep.has_time, sweep.fail))
    if not sweep.has_time() and Message.objects.due(sweep.clock()).exists():
        nudge(DISPATCH)


def retry_errored_messages(sweep: Sweep) -> None:
    due = Message.objects.retryable(sweep.now)
    sweep.pages(due, lambda ids: {"retried": ending.retry_errored(ids, now=sweep.now)}, by="next_attempt_at")
    if sweep.counts["retried"]:
        nudge(DISPATCH)


def resolve_unknown_attempts(sweep: Sweep) -> None:
    """Providers are asked, so a dry run only counts."""
    if sweep.dry_run:
        sweep.counts["lost"] += MessageAttempt.objects.lost(sweep.now).count()
        sweep.counts["unresolved"] += Message.objects.unresolved(sweep.now).count()
        return
    sweep.repeat(lambda: {"lost": resolving.close_lost_attempts(now=sweep.now)})
    sweep.repeat(lambda: resolving.resolve_page(now=sweep.now))


def expire_messages(sweep: Sweep) -> None:
    rows, now, run_id = Message.objects, sweep.now, sweep.run_id
    # In the order of its own index: by key, all that wait for later would be read to find the few whose day is over.
    sweep.pages(
        rows.overdue(now),
        lambda ids: {"expired": ending.expire_unsent(ids, now=now, run_id=run_id)},
        label="unsent",
        by="clock_start",
    )
    sweep.pages(
        rows.unreceipted(now),
        lambda ids: {"receipt_timeout": ending.time_out_receipts(ids, now=now, run_id=run_id)},
        label="receipt",
    )
    sweep.pages(
        rows.unconverted(now),
        lambda ids: {"received_expired": ending.expire_received(ids, now=now, run_id=run_id)},
        label="received",
    )


def archive_messages(sweep: Sweep) -> None:
    ripe = Message.objects.archivable(sweep.now)
    sweep.pages(
        ripe,
        lambda ids: {"archived": ending.archive_failed(ids, now=sweep.now, run_id=sweep.run_id)},
        by="failed_at",
    )


def deliver_webhooks(sweep: Sweep) -> None:
    webhooks.give_up_forgotten(sweep.now)
    if sweep.dry_run:
        sweep.counts.update(webhooks.would_deliver(sweep.now))
    else:
        sweep.repeat(lambda: webhooks.deliver_due(sweep.now))


def fold_rollups(sweep: Sweep) -> None:
    sweep.repeat(lambda: {"folded": analytics.fold_deltas()})


def apply_parked_events(sweep: Sweep) -> None:
    """Provider events that came before the message's own result, or about messages nobody knows."""
    sweep.pages(WebhookInbox.objects.parked(), lambda keys: incoming.apply_events(keys, now=sweep.now))
