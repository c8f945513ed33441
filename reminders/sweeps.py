from config.sweeping import Sweep
from reminders.models import AlarmDelivery
from reminders.services import send_batch, settle_deliveries


def send_due_alarms(sweep: Sweep) -> None:
    """Batches until nothing is due or the time is up, then the deliveries nobody will come back to."""
    while sweep.has_time():
        done = send_batch(sweep.now, run_id=sweep.run_id)
        sweep.counts.update(done)
        if not done["claimed"]:
            break
        sweep.counts["batches"] += 1
    sweep.pages(
        AlarmDelivery.objects.abandoned(sweep.now),
        lambda ids: {"settled": settle_deliveries(ids, sweep.now, sweep.run_id)},
        by="claimed_at",
    )
