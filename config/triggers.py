"""Triggers that belong to no state graph."""

import pgtrigger
from django.db import connections

# Every trigger function of pgtrigger asks this first. Its own version runs into an error and catches it: a
# subtransaction per row that also walks all checks deferred to the commit. 200,000 rows in a transaction took minutes.
SHOULD_IGNORE = """
CREATE OR REPLACE FUNCTION "public"._pgtrigger_should_ignore(trigger_name NAME) RETURNS BOOLEAN LANGUAGE sql STABLE
AS $$ SELECT coalesce(trigger_name = ANY (nullif(current_setting('pgtrigger.ignore', true), '')::text[]), false) $$
"""


def ask_cheaply(using: str, **_kwargs: object) -> None:
    """After every migration, because each that makes a trigger brings pgtrigger's own version again."""
    with connections[using].cursor() as cursor:
        cursor.execute(SHOULD_IGNORE)


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
    """Rows change, but go only by `purge_retention`."""
    refusal = (
        f"RAISE EXCEPTION '% of {name} refused: rows go by purge_retention', TG_OP"
        f" USING ERRCODE = 'check_violation', CONSTRAINT = '{name}_kept', TABLE = '{name}';"
    )
    return [
        pgtrigger.Trigger(
            name=f"{name}_kept",
            when=pgtrigger.Before,
            operation=pgtrigger.Delete,
            func=f"IF current_setting('{PURGING}', true) = 'on' THEN RETURN OLD; END IF; {refusal}",
        ),
        pgtrigger.Trigger(
            name=f"{name}_no_truncate",
            level=pgtrigger.Statement,
            when=pgtrigger.Before,
            operation=pgtrigger.Truncate,
            func=refusal,
        ),
    ]
