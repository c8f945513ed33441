from devices.services.attempts import (
    ack_task_device,
    claim_task_devices,
    claim_token,
    complete_task_device,
    expire_leases,
    fail_task_device,
    give_up_rows,
    renew_lease,
    time_out_attempts,
)
from devices.services.fleet import (
    assign_agent,
    create_pc,
    mark_pcs_offline,
    quarantine_devices,
    recover_devices,
    set_max_slots,
    take_offline,
)
from devices.services.heartbeats import DeviceReport, record_heartbeat
from devices.services.queue import advance_queue, cancel_task, create_task, promote_next_task, retry_task

__all__ = [
    "DeviceReport",
    "ack_task_device",
    "advance_queue",
    "assign_agent",
    "cancel_task",
    "claim_task_devices",
    "claim_token",
    "complete_task_device",
    "create_pc",
    "create_task",
    "expire_leases",
    "fail_task_device",
    "give_up_rows",
    "mark_pcs_offline",
    "promote_next_task",
    "quarantine_devices",
    "record_heartbeat",
    "recover_devices",
    "renew_lease",
    "retry_task",
    "set_max_slots",
    "take_offline",
    "time_out_attempts",
]
