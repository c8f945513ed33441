"""Every pair of states of every FSM model of the project, in SQL; models are picked up by themselves."""

import pytest
from django.db import IntegrityError, connection, transaction
from django_fsm import TransitionNotAllowed

from config.management.commands.state_diagrams import written
from config.statemachine import Rests, Swept, WaitsFor, check_liveness, graphs

GRAPHS = list(graphs())
pytestmark = pytest.mark.django_db


def column_values(graph):
    """A row of nulls and the graph's trigger alone: other constraints are not what is asked here."""
    table = graph.model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE TEMP TABLE probe AS SELECT * FROM "{table}" WITH NO DATA')
        cursor.execute(
            "SELECT replace(pg_get_triggerdef(oid), ' ON ' || tgrelid::regclass || ' ', ' ON probe ')"
            " FROM pg_trigger WHERE tgrelid = %s::regclass AND tgname ~ %s",
            [f'"{table}"', f"^pgtrigger_{graph.field.name}_(born|edge)_"],
        )
        definitions = [row[0].replace(f" ON public.{table} ", " ON probe ") for row in cursor.fetchall()]
        assert len(definitions) == 2
        return definitions


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_the_database_allows_exactly_the_edges_of_the_transitions(graph):
    column = graph.field.column
    definitions = column_values(graph)
    with connection.cursor() as cursor:
        for old in graph.states:
            for new in graph.states:
                cursor.execute("DELETE FROM probe")
                for definition in definitions:
                    cursor.execute(f"DROP TRIGGER IF EXISTS {definition.split()[2]} ON probe")
                cursor.execute(f'INSERT INTO probe ("{column}") VALUES (%s)', [old])
                for definition in definitions:
                    cursor.execute(definition)
                legal = old == new or (old, new) in graph.edges
                assert accepted(cursor, f'UPDATE probe SET "{column}" = %s', new, graph) == legal, (old, new)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_the_database_lets_rows_be_born_only_in_an_initial_state(graph):
    with connection.cursor() as cursor:
        for definition in column_values(graph):
            cursor.execute(definition)
        for state in graph.states:
            sql = f'INSERT INTO probe ("{graph.field.column}") VALUES (%s)'
            assert accepted(cursor, sql, state, graph) == (state in graph.initial), state


def accepted(cursor, sql, state, graph):
    try:
        with transaction.atomic():
            cursor.execute(sql, [state])
    except IntegrityError as error:
        refused_by = error.__cause__.diag.constraint_name
    else:
        return True
    assert refused_by == f"{graph.model._meta.db_table}_{graph.field.column}_graph"
    return False


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_python_refuses_what_the_graph_does_not_allow(graph):
    for state in graph.states:
        for name, method in graph.field.transitions[graph.model].items():
            row = graph.model()
            row.__dict__[graph.field.name] = state
            sources = method._django_fsm.transitions
            if state in sources:
                continue
            with pytest.raises(TransitionNotAllowed):
                getattr(row, name)()


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_every_state_that_is_not_the_end_has_somebody_responsible(graph, settings):
    for state in set(graph.states) - graph.terminal:
        owner = graph.model.liveness[state]
        assert isinstance(owner, WaitsFor | Rests) or (isinstance(owner, Swept) and owner.sweep in settings.SWEEPS)


def test_the_start_fails_when_a_sweep_is_taken_from_the_table(settings):
    assert check_liveness() == []
    relied_on = next(o.sweep for g in GRAPHS for o in g.model.liveness.values() if isinstance(o, Swept))
    settings.SWEEPS = {name: plan for name, plan in settings.SWEEPS.items() if name != relied_on}
    assert {error.id for error in check_liveness()} == {"config.E003"}


def test_the_start_fails_when_nobody_is_responsible_for_a_state(monkeypatch):
    graph = GRAPHS[0]
    state = next(iter(graph.model.liveness))
    monkeypatch.delitem(graph.model.liveness, state)
    assert [error.id for error in check_liveness()] == ["config.E002"]


def test_the_diagram_replaces_its_old_self_and_keeps_the_text_around():
    graph = GRAPHS[0]
    first = written("# Head\n", graph)
    assert first.startswith("# Head\n\n<!-- graph ")
    assert "stateDiagram-v2" in first
    assert written(first + "\nTail\n", graph) == first + "\nTail\n"
