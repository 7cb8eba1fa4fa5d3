"""The first rows of a decode state as a state of their own, inside jit.

While the others idle, a program of few rows runs passes that cost what those few cost. The state
keeps its form, so what the host does between dispatches is the same.
"""

import dataclasses
from typing import Any

import jax

from jaxshare.decoding.grammar_rows import GrammarRows
from jaxshare.decoding.state import DecodeState
from jaxshare.layout import Layout
from jaxshare.trace.recorder import PassLog


def take_first(state: DecodeState, rows: int) -> DecodeState:
    """A state of the first rows alone. It has no fan-in groups, which pay for many rows only."""
    adapters = state.layout.adapters
    adapters = None if adapters is None else adapters[:rows]
    cut = jax.tree.map(lambda array: array[:rows], _per_row(state))
    log = jax.tree.map(lambda array: array[:, :rows], _log_per_row(state.record))
    return dataclasses.replace(
        cut,
        cache=state.cache,
        layout=Layout(state.layout.blocks[:rows], adapters=adapters),
        stops=state.stops,
        passes=state.passes,
        steps=dataclasses.replace(cut.steps, automata=state.steps.automata),
        grammars=_with_shared(cut, state),
        record=dataclasses.replace(state.record, **log),
    )


def put_first(state: DecodeState, part: DecodeState) -> DecodeState:
    """The state with its first rows, and its cache, as `part` has them after passes."""
    rows = part.layout.num_rows
    put = jax.tree.map(lambda whole, new: whole.at[:rows].set(new), _per_row(state), _per_row(part))
    log = jax.tree.map(
        lambda whole, new: whole.at[:, :rows].set(new),
        _log_per_row(state.record),
        _log_per_row(part.record),
    )
    return dataclasses.replace(
        put,
        cache=part.cache,
        layout=state.layout,
        stops=state.stops,
        passes=part.passes,
        steps=dataclasses.replace(put.steps, automata=state.steps.automata),
        grammars=_with_shared(put, part),
        record=dataclasses.replace(part.record, **log),
    )


def _per_row(state: DecodeState) -> Any:
    """The arrays that have an entry for each row, but for the layout, which no pass changes."""
    none: Any = dict.fromkeys(("cache", "layout", "stops", "passes", "record"))
    automata: Any = {"automata": None}
    shared: Any = dict.fromkeys(("tables", "server", "ticket"))
    return dataclasses.replace(
        state,
        steps=dataclasses.replace(state.steps, **automata),
        grammars=dataclasses.replace(state.grammars, **shared),
        **none,
    )


def _with_shared(rows: DecodeState, whole: DecodeState) -> GrammarRows:
    """The grammars of rows, with what all rows share as `whole` has it."""
    shared = whole.grammars
    return dataclasses.replace(
        rows.grammars, tables=shared.tables, server=shared.server, ticket=shared.ticket
    )


def _log_per_row(log: PassLog) -> dict[str, Any]:
    """The arrays of a log that have an entry for each row of each pass."""
    return {"tokens": log.tokens, "counts": log.counts, "moved": log.moved}
