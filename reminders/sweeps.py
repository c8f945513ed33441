from config.sweeping import Sweep


def send_due_alarms(sweep: Sweep) -> None:
    pass
