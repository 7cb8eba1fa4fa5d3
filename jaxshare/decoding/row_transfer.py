"""Rows that are taken out of a decode state and put into another, with all that they carry.

So a session of rows can join a larger state for a dispatch, beside rows that it knows nothing of,
and rows that go on can leave a state whose other rows have ended. Logits and texts stay on the
device; all else that rows carry is small, and is moved on the host, which takes less time there than
to start a program.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxshare.decoding.array_rows import with_fields
from jaxshare.decoding.finish_reason import FinishReason
from jaxshare.decoding.grammar_rows import GrammarRows
from jaxshare.decoding.history import History
from jaxshare.decoding.processing import Processing
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.state import DecodeState
from jaxshare.decoding.steps import Steps
from jaxshare.trace.recorder import PassLog

_OF_STATE = (
    *("cache", "logits", "top_logits", "history", "record", "stops", "passes"),
    *("processing", "processed", "raw_logprobs"),
)
"""The fields of a decode state that are not moved on the host."""


class PlacedRows(NamedTuple):
    """Rows for another state.

    Attributes:
      state: of these rows alone.
      rows: int[r], their places in the other state.
      block: the number there of block 0.
      automaton: what the numbers of automata start from there, but for the one that finds nothing.
      brings_logits: whether the logits, top logits and texts are put, too. Else what is in those
        rows stays, and is not theirs.
    """

    state: DecodeState
    rows: Int[np.ndarray, " r"]
    block: int = 0
    automaton: int = 0
    brings_logits: bool = True


def on_host(state: DecodeState) -> DecodeState:
    """The state with what `take_rows` and `put_rows` move in arrays of numpy, fetched once for
    several of their calls. It can be used as the other can."""
    fetched = _fetched(state)
    steps, grammars = _with_shared(fetched, state)
    rest = {name: getattr(state, name) for name in _OF_STATE}
    return with_fields(fetched, steps=steps, grammars=grammars, **rest)


def goes_on_from_logits(state: DecodeState) -> Bool[np.ndarray, " r"]:
    """The rows of a state on the host that sample from its logits next. Others have tokens to feed,
    which gives them new ones, or have ended."""
    running = state.reasons == FinishReason.RUNNING
    return np.asarray(running & state.has_logits & (state.num_pending == 0))


def take_rows(
    state: DecodeState,
    rows: Int[np.ndarray, " r"],
    *,
    block: int = 0,
    automaton: int = 0,
    before: DecodeState | None = None,
) -> DecodeState:
    """A state of these rows alone, in this order, over the same cache; nothing is recorded.

    It is on the host, as those of `on_host` are.

    Args:
      state: it stays valid.
      rows: whole sessions, the rows of each in ascending order.
      block, automaton: see `PlacedRows`.
      before: the rows as they were before the last dispatch, on the host, of which no outputs but
        tokens are wanted. From there come the logits that the rows do not need to go on, and their
        texts where no sampler looks at them: to take these from the device is a program of its own.
    """
    moved = _fetched(state)
    place = np.zeros(len(moved.session), np.int32)
    place[rows] = np.arange(len(rows))
    taken = jax.tree.map(lambda array: array[rows], moved)
    taken = with_fields(taken, session=place[taken.session])
    taken = _renumbered(taken, -block, -automaton)
    rest = _own(state, rows) if before is None else _kept(taken, before, state, rows)
    steps, grammars = _with_shared(taken, state)
    return with_fields(
        taken,
        steps=steps,
        grammars=grammars,
        cache=state.cache,
        stops=state.stops,
        passes=state.passes,
        processing=state.processing and state.processing.take(rows),
        **rest,
    )


def _own(state: DecodeState, rows: Int[np.ndarray, " r"]) -> dict[str, Any]:
    """The fields of rows that are not moved on the host, as the state has them."""
    logits, top_logits, history = _take((state.logits, state.top_logits, state.history), rows)
    return {
        "logits": logits,
        "top_logits": top_logits,
        "history": history,
        "processed": None if state.processed is None else state.processed[rows],
        "raw_logprobs": None if state.raw_logprobs is None else state.raw_logprobs[rows],
        "record": PassLog.empty(0, len(rows), state.max_width, state.cache.num_blocks),
    }


def _kept(
    taken: DecodeState, before: DecodeState, state: DecodeState, rows: Int[np.ndarray, " r"]
) -> dict[str, Any]:
    """The same, from before the dispatch where that will do, and `has_logits` where the logits are
    those after a row's last token."""
    ran = np.asarray(before.reasons == FinishReason.RUNNING)
    new = np.asarray(ran & taken.has_logits & (taken.num_pending == 0))
    has_logits = new | np.where(ran, False, before.has_logits)
    logits, history = before.logits, before.history
    if new.any():
        logits = _take_some(logits, state.logits, rows, new)
    if history.is_kept:
        history = _shaped(_take(state.history, rows), history)
    return {
        "has_logits": has_logits,
        "logits": logits,
        "top_logits": before.top_logits,
        "history": history,
        "processed": before.processed,
        "raw_logprobs": before.raw_logprobs,
        "record": before.record,
    }


def _shaped(history: History, like: History) -> History:
    """A history with the parts that another one has."""
    return jax.tree.map(
        lambda new, old: new if old.ndim < 2 else new[:, : old.shape[1]], history, like
    )


def put_rows(state: DecodeState, parts: Sequence[PlacedRows]) -> DecodeState:
    """A state with the rows of others in the places of its own; the undoing of `take_rows`.

    The cache stays that of `state`, whose logits and top logits are donated. Where a part has more
    places in a row, for sampled tokens or blocks say, the result has as many.
    """
    history = state.history
    for part in parts:
        history = history.grown(
            part.state.history.counts.shape[1], part.state.history.tokens.shape[1]
        )
    logits = state.logits, state.top_logits, history
    new = []
    for part in parts:
        moved = _fetched(part.state)
        moved = with_fields(
            moved,
            session=part.rows[moved.session],
            has_logits=moved.has_logits & part.brings_logits,
        )
        new.append(jax.tree.leaves(_renumbered(moved, part.block, part.automaton)))
        if part.brings_logits:
            of_part = part.state.logits, part.state.top_logits, part.state.history
            logits = _put_logits(logits, of_part, part.rows)
    whole, form = jax.tree.flatten_with_path(_fetched(state))
    rows = [part.rows for part in parts]
    put = jax.tree.unflatten(
        form,
        [
            _put(array, arrays, rows, _unused(path))
            for (path, array), *arrays in zip(whole, *new, strict=True)
        ],
    )
    rest: Any = {name: getattr(state, name) for name in _OF_STATE}
    rest |= dict(zip(("logits", "top_logits", "history"), logits, strict=True))
    rest |= {"processing": _processing(state, parts), "processed": _processed(state, parts)}
    rest["raw_logprobs"] = _raw_logprobs(state, put.tokens.shape, parts)
    steps, grammars = _with_shared(put, state)
    return with_fields(put, steps=steps, grammars=grammars, **rest)


def _processing(state: DecodeState, parts: Sequence[PlacedRows]) -> Processing | None:
    """The logits processors of a state with the rows of these parts."""
    found = [each for each in (state, *(part.state for part in parts)) if each.processing]
    if not found or not found[0].processing:
        return None
    none = [Sampler()] * state.layout.num_rows
    whole = state.processing or Processing.stack(none, places=found[0].processing.places)
    for part in parts:
        whole = whole and whole.put(part.state.processing, part.rows)
    return whole


def _processed(state: DecodeState, parts: Sequence[PlacedRows]) -> Array | None:
    """The rows whose log-probabilities are of the chances that their tokens are drawn with."""
    if all(each.processed is None for each in (state, *(part.state for part in parts))):
        return None
    whole = np.zeros(state.layout.num_rows, bool)
    for each, rows in ((state, slice(None)), *((part.state, part.rows) for part in parts)):
        whole[rows] = False if each.processed is None else np.asarray(each.processed)
    return jax.device_put(whole)


def _raw_logprobs(
    state: DecodeState, shape: tuple[int, int], parts: Sequence[PlacedRows]
) -> Array | None:
    """The log-probabilities under the model itself, with as many places as there are for tokens."""
    found = (state, *(part.state for part in parts))
    if all(each.raw_logprobs is None for each in found):
        return None
    whole = np.zeros(shape, np.float32)
    for each, rows in ((state, slice(None)), *((part.state, part.rows) for part in parts)):
        if each.raw_logprobs is not None:
            whole[rows, : each.raw_logprobs.shape[1]] = np.asarray(each.raw_logprobs)
    return jax.device_put(whole)


def _fetched(state: DecodeState) -> DecodeState:
    """The arrays that are moved on the host, each with an entry for each row."""
    none: Any = {name: None for name in _OF_STATE}
    automata: Any = {"automata": None}
    shared: Any = dict.fromkeys(("tables", "server", "ticket"))
    moved = with_fields(
        state,
        steps=with_fields(state.steps, **automata),
        grammars=with_fields(state.grammars, **shared),
        **none,
    )
    there = all(isinstance(array, np.ndarray) for array in jax.tree.leaves(moved))
    return moved if there else jax.device_get(moved)


def _with_shared(moved: DecodeState, whole: DecodeState) -> tuple[Steps, GrammarRows]:
    """The steps and grammars of rows, with what all rows share as `whole` has it."""
    shared = whole.grammars
    return (
        with_fields(moved.steps, automata=whole.steps.automata),
        with_fields(
            moved.grammars, tables=shared.tables, server=shared.server, ticket=shared.ticket
        ),
    )


def _renumbered(moved: DecodeState, block: int, automaton: int) -> DecodeState:
    """The same with other numbers of blocks and automata."""
    steps, layout = moved.steps, moved.layout

    def later(numbers: Any, first: int, by: int) -> Any:
        return np.where(numbers >= first, numbers + np.int32(by), numbers)

    return with_fields(
        moved,
        layout=with_fields(layout, blocks=later(layout.blocks, 0, block)),
        steps=with_fields(
            steps,
            ends=later(steps.ends, 1, automaton),
            answers=later(steps.answers, 1, automaton),
            targets=later(steps.targets, 0, block),
        ),
    )


def _unused(path: Sequence[Any]) -> int:
    """The entry of a place that a row does not use, in the array of this name."""
    return -1 if path[-1].name in ("blocks", "edit_tokens", "stops", "words") else 0


def _put(
    whole: np.ndarray, new: Sequence[np.ndarray], rows: Sequence[np.ndarray], unused: int
) -> np.ndarray:
    """The array with these rows in their places, and with as many places in a row as the largest."""
    sizes = tuple(map(max, zip(*{array.shape[1:] for array in (whole, *new)}, strict=True)))
    put = _grown(whole, sizes, unused).copy()
    for at, array in zip(rows, new, strict=True):
        put[at] = _grown(array, sizes, unused)
    return put


def _grown(array: np.ndarray, sizes: tuple[int, ...], unused: int) -> np.ndarray:
    """The array with so many places in a row."""
    if array.shape[1:] == sizes:
        return array
    more = [(0, size - has) for size, has in zip(sizes, array.shape[1:], strict=True)]
    return np.pad(array, [(0, 0), *more], constant_values=unused)


@jax.jit
def _take(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda array: array[rows], tree)


@jax.jit
def _take_some(old: Array, whole: Array, rows: Any, taken: Any) -> Array:
    return jnp.where(taken[:, None], whole[rows], old)


@functools.partial(jax.jit, donate_argnums=0)
def _put_logits(whole: Any, new: Any, rows: Any) -> Any:
    return jax.tree.map(
        lambda array, part: array.at[(rows, *map(slice, part.shape[1:]))].set(part), whole, new
    )
