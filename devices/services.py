import re
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction

from config.decisions import decide, record
from config.errors import Invalid
from devices.models import PC, PC_NUMBER


def assign_agent(user: Any, pc_number: str) -> PC:
    """Make the client the agent of the PC, which is created when missing."""
    if not re.match(PC_NUMBER, pc_number):
        raise Invalid(f"{pc_number!r} is not a PC number such as PC-01", attr="pc")
    pc, _created = PC.objects.update_or_create(pc_number=pc_number, defaults={"agent": user})
    return pc


@transaction.atomic
def mark_pcs_offline(ids: list[UUID], now: datetime, run_id: UUID | None = None) -> int:
    """Those of the PCs that are still silent, in one statement; a heartbeat that comes first wins."""
    silent = list(PC.objects.silent(now).filter(pk__in=ids).select_for_update(skip_locked=True, of=("self",)))
    PC.objects.filter(pk__in=[pc.pk for pc in silent]).update(status=PC.Status.OFFLINE)
    record(
        decide(
            "mark_silent_pcs",
            pc,
            before={"status": PC.Status.ONLINE},
            after={"status": PC.Status.OFFLINE},
            inputs={"last_heartbeat_at": pc.last_heartbeat_at.isoformat() if pc.last_heartbeat_at else None},
            run_id=run_id,
        )
        for pc in silent
    )
    return len(silent)
