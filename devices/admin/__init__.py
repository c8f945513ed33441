from devices.admin.fleet import DeviceAdmin, PCAdmin
from devices.admin.work import TaskAdmin, TaskDeviceAdmin

__all__ = ["DeviceAdmin", "PCAdmin", "TaskAdmin", "TaskDeviceAdmin"]
