from django.db import migrations

# A PC's row is aggregated for itself (LATERAL), so asking for one PC reads one PC's devices. running_count comes from
# task_devices, where a run is true; eligible includes busy devices, or refilling would stop at a full PC.
CREATE = """
CREATE VIEW pc_device_summary AS
SELECT pc.id AS pc_id,
       pc.pc_number,
       pc.status,
       pc.last_heartbeat_at AS last_heartbeat,
       device.device_count,
       slot.eligible_device_count,
       run.running_count,
       slot.target,
       greatest(0, slot.target - run.running_count) AS free_slots,
       device.error_count,
       device.offline_count
  FROM pcs AS pc
 CROSS JOIN LATERAL (
       SELECT count(*)::int AS device_count,
              count(*) FILTER (WHERE status IN ('online', 'busy'))::int AS usable_count,
              count(*) FILTER (WHERE status = 'error')::int AS error_count,
              count(*) FILTER (WHERE status = 'offline')::int AS offline_count
         FROM devices WHERE devices.pc_id = pc.id) AS device
 CROSS JOIN LATERAL (
       SELECT count(*)::int AS running_count
         FROM task_devices WHERE claimed_by_id = pc.id AND task_devices.status = 'running') AS run
 CROSS JOIN LATERAL (
       SELECT usable.n AS eligible_device_count, least(20, pc.max_slots, usable.n) AS target
         FROM (SELECT CASE WHEN pc.status = 'online' THEN device.usable_count ELSE 0 END AS n) AS usable) AS slot
"""


class Migration(migrations.Migration):
    dependencies = [("devices", "0001_initial")]

    operations = [migrations.RunSQL(CREATE, "DROP VIEW pc_device_summary")]
