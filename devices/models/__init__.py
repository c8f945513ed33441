from devices.models.fleet import MAX_SLOTS, PC, PC_NUMBER, Device, DeviceHistory, PCSummary
from devices.models.work import LEASE, MOST_DEVICES, RUN_LIMIT, Attempt, Event, Task, TaskDevice

__all__ = [
    "LEASE",
    "MAX_SLOTS",
    "MOST_DEVICES",
    "PC",
    "PC_NUMBER",
    "RUN_LIMIT",
    "Attempt",
    "Device",
    "DeviceHistory",
    "Event",
    "PCSummary",
    "Task",
    "TaskDevice",
]
