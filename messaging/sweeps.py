from config.sweeping import Sweep
from messaging.services import analytics, webhooks


def dispatch_due_messages(sweep: Sweep) -> None: ...
def retry_errored_messages(sweep: Sweep) -> None: ...
def resolve_unknown_attempts(sweep: Sweep) -> None: ...
def expire_messages(sweep: Sweep) -> None: ...
def archive_messages(sweep: Sweep) -> None: ...


def deliver_webhooks(sweep: Sweep) -> None:
    webhooks.give_up_forgotten(sweep.now)
    if sweep.dry_run:
        sweep.counts.update(webhooks.would_deliver(sweep.now))
    else:
        sweep.repeat(lambda: webhooks.deliver_due(sweep.now))


def fold_rollups(sweep: Sweep) -> None:
    sweep.repeat(lambda: {"folded": analytics.fold_deltas()})
