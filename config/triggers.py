"""Triggers that belong to no state graph."""

import pgtrigger

# `purge_retention` sets this for its transaction; it is the only way to delete from an append-only table.
PURGING = "signalbox.purging"


def append_only(name: str, *, deletable: str = "false") -> list[pgtrigger.Trigger]:
    """Refuse UPDATE and TRUNCATE always, and DELETE but for purges and rows matching the SQL `deletable` (over OLD)."""
    refusal = (
        f"RAISE EXCEPTION '% of {name} refused: it is append-only', TG_OP"
        f" USING ERRCODE = 'check_violation', CONSTRAINT = '{name}_append_only', TABLE = '{name}';"
    )
    return [
        pgtrigger.Trigger(
            name=f"{name}_no_change",
            level=pgtrigger.Statement,
            when=pgtrigger.Before,
            operation=pgtrigger.Update | pgtrigger.Truncate,
            func=refusal,
        ),
        pgtrigger.Trigger(
            name=f"{name}_no_delete",
            when=pgtrigger.Before,
            operation=pgtrigger.Delete,
            func=f"""
                IF current_setting('{PURGING}', true) = 'on' OR ({deletable}) THEN RETURN OLD; END IF;
                {refusal}
            """,
        ),
    ]


def undeletable(name: str) -> list[pgtrigger.Trigger]:
    """Rows change, but go only by `purge_retention`.."""
    return [
        pgtrigger.Trigger(
            name=f"{name}_kept",
            when=pgtrigger.Before,
            operation=pgtrigger.Delete,
            func=f"""
                IF current_setting('{PURGING}', true) = 'on' THEN RETURN OLD; END IF;
                RAISE EXCEPTION 'DELETE of {name} refused: rows go by purge_retention'
                    USING ERRCODE = 'check_violation', CONSTRAINT = '{name}_kept', TABLE = '{name}';
            """,
        )
    ]
