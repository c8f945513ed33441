"""One graph per model: the @transition decorators. The trigger, the diagram and the liveness check derive from it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import pgtrigger
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.utils.functional import Promise
from django_fsm import FSMField, FSMFieldMixin


@dataclass(frozen=True)
class Swept:
    """A state that a sweep resolves once its deadline, counted from the column `since`, has passed.

    `oldest` finds the longest waiting of the rows in the state, where only a look of its own has an index to use or
    where not all of them wait. `instead` names who has a row that the sweep leaves alone.
    """

    sweep: str
    deadline: str | Promise
    since: str = "created_at"
    oldest: Callable[[Any], datetime | None] | None = None
    instead: "Callable[[Any], WaitsFor | Rests | None] | None" = None


@dataclass(frozen=True)
class WaitsFor:
    """A state that time alone does not end: who ends it, in words shown in the admin."""

    whom: str | Promise


@dataclass(frozen=True)
class Rests:
    """A state that may last: it is left by what happens, and nobody is late when nothing does."""

    why: str | Promise


class StateField(FSMField):
    """Protected in Python, with a default in the database; Django would write that back into the protected field.

    Migrations know it as the text it is: each FSMField looks for transitions in every class that is ever made, and
    migrating makes thousands.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"protected": True, **kwargs})

    @property
    def db_returning(self) -> bool:
        return False

    def deconstruct(self) -> Any:
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.CharField", args, {k: v for k, v in kwargs.items() if k != "protected"}


class Refreshable(models.Model):
    """A protected state may not be assigned, yet a row read anew has the state that is stored."""

    class Meta:
        abstract = True

    def refresh_from_db(self, using: Any = None, fields: Any = None, from_queryset: Any = None) -> None:
        if fields is None:
            deferred = self.get_deferred_fields()
            fields = [field.attname for field in self._meta.concrete_fields if field.attname not in deferred]
            self._prefetched_objects_cache: dict[str, Any] = {}
        states = [field.name for field in self._meta.concrete_fields if isinstance(field, FSMFieldMixin)]
        held = {name: self.__dict__.pop(name) for name in states if name in fields and name in self.__dict__}
        try:
            super().refresh_from_db(using=using, fields=fields, from_queryset=from_queryset)
        finally:
            for name in held.keys() - self.__dict__.keys():
                self.__dict__[name] = held[name]


@dataclass(frozen=True)
class Graph:
    model: type[models.Model]
    field: FSMFieldMixin

    @cached_property
    def edges(self) -> frozenset[tuple[str, str]]:
        found = set()
        for transition in self.field.get_all_transitions(self.model):
            if not isinstance(transition.target, str) or transition.source in ("*", "+"):
                raise ImproperlyConfigured(f"{self.model.__name__}.{transition.name}: literal states only")
            found.add((str(transition.source), str(transition.target)))
        if not found:
            raise ImproperlyConfigured(f"{self.model.__name__}.{self.field.name} has no transitions")
        return frozenset(found)

    @cached_property
    def states(self) -> tuple[str, ...]:
        return tuple(str(value) for value, _label in self.field.flatchoices)

    @cached_property
    def initial(self) -> tuple[str, ...]:
        """States a row may be born in: the model's `born`, else the field's default."""
        return tuple(str(state) for state in getattr(self.model, "born", (self.field.default,)))

    @cached_property
    def terminal(self) -> frozenset[str]:
        return frozenset(self.states) - {source for source, _target in self.edges}

    @property
    def name(self) -> str:
        return f"{self.model._meta.db_table}.{self.field.column}"

    def targets(self, source: str) -> list[str]:
        return sorted(target for start, target in self.edges if start == source and target != source)

    def mermaid(self) -> str:
        born = [f"    [*] --> {state}" for state in self.initial]
        moves = [f"    {s} --> {t}" for s in self.states for t in self.states if (s, t) in self.edges and s != t]
        ends = [f"    {state} --> [*]" for state in self.states if state in self.terminal]
        return "\n".join(["stateDiagram-v2", *born, *moves, *ends])


def graph(model: type[models.Model], field_name: str) -> Graph:
    return Graph(model, model._meta.get_field(field_name))  # type: ignore[arg-type]


def graphs() -> Iterator[Graph]:
    """The graph of every FSM field of the project."""
    for model in apps.get_models():
        for field in model._meta.concrete_fields:
            if isinstance(field, FSMFieldMixin):
                yield Graph(model, field)


def quoted(states: Any) -> str:
    return ", ".join(f"'{state}'" for state in states)


class _GraphTrigger(pgtrigger.Trigger):
    """The condition holds only for an illegal row, so a legal write never pays for a function call."""

    when = pgtrigger.Before

    def __init__(self, field: str, **kwargs: Any) -> None:
        self.field = field
        super().__init__(**kwargs)

    def graph(self, model: type[models.Model]) -> Graph:
        # Migrations hand over a model without methods, hence without transitions: ask the registry for the real one.
        return graph(apps.get_model(model._meta.label), self.field)

    def refusal(self, model: type[models.Model], message: str) -> str:
        table, column = model._meta.db_table, self.graph(model).field.column
        return (
            f"RAISE EXCEPTION {message} USING ERRCODE = 'check_violation',"
            f" CONSTRAINT = '{table}_{column}_graph', TABLE = '{table}', COLUMN = '{column}';"
        )


class BornTrigger(_GraphTrigger):
    operation = pgtrigger.Insert

    def get_condition(self, model: Any) -> pgtrigger.Condition:
        found = self.graph(model)
        return pgtrigger.Condition(f'NEW."{found.field.column}" NOT IN ({quoted(found.initial)})')

    def get_func(self, model: Any) -> str:
        column = self.graph(model).field.column
        return self.refusal(model, f"'a new row of {model._meta.db_table} cannot be %', NEW.\"{column}\"")


class EdgeTrigger(_GraphTrigger):
    operation = pgtrigger.Update

    def get_condition(self, model: Any) -> pgtrigger.Condition:
        found = self.graph(model)
        old, new = f'OLD."{found.field.column}"', f'NEW."{found.field.column}"'
        legal = " OR ".join(
            f"({old} = '{state}' AND {new} IN ({quoted(found.targets(state))}))"
            for state in found.states
            if found.targets(state)
        )
        return pgtrigger.Condition(f"{old} IS DISTINCT FROM {new} AND NOT ({legal})")

    def get_func(self, model: Any) -> str:
        column = self.graph(model).field.column
        message = f'\'{model._meta.db_table} cannot go from % to %\', OLD."{column}", NEW."{column}"'
        return self.refusal(model, message)


def state_triggers(field: str = "status") -> list[pgtrigger.Trigger]:
    """For Meta.triggers: the database refuses a birth or a move that no @transition allows."""
    return [BornTrigger(field, name=f"{field}_born"), EdgeTrigger(field, name=f"{field}_edge")]


@register()
def check_liveness(**_kwargs: Any) -> list[CheckMessage]:
    """Nothing can be stuck without somebody being responsible: each non-terminal state has a sweep or a person."""
    return [message for found in graphs() for message in _liveness_errors(found)]


def _liveness_errors(found: Graph) -> Iterator[CheckMessage]:
    liveness = getattr(found.model, "liveness", {})
    for state in found.states:
        owner = liveness.get(state)
        if state in found.terminal:
            if owner is not None:
                yield Error(f"{found.name}: {state} is terminal and needs no owner", obj=found.model, id="config.E001")
        elif owner is None:
            yield Error(f"{found.name}: nobody is responsible for {state}", obj=found.model, id="config.E002")
        elif isinstance(owner, Swept) and owner.sweep not in settings.SWEEPS:
            text = f"{found.name}: {state} relies on the sweep {owner.sweep}, which is not in settings.SWEEPS"
            yield Error(text, obj=found.model, id="config.E003")
    if set(liveness) - set(found.states):
        yield Error(f"{found.name}: liveness names unknown states", obj=found.model, id="config.E004")
    names = {trigger.name for trigger in getattr(found.model._meta, "triggers", [])}
    if not {f"{found.field.name}_born", f"{found.field.name}_edge"} <= names:
        yield Error(f"{found.name}: state_triggers() is missing", obj=found.model, id="config.E005")
