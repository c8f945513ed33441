from config.sweeping import Sweep
from devices.models import PC
from devices.services import mark_pcs_offline


def mark_silent_pcs(sweep: Sweep) -> None:
    sweep.pages(PC.objects.silent(sweep.now), lambda ids: {"offline": mark_pcs_offline(ids, sweep.now, sweep.run_id)})
