"""Rows that are taken out of a decode state and put into another, with all that they carry.

So a session of rows can join a larger state for a dispatch, beside rows that it knows nothing of,
and rows that go on can leave a state whose other rows have ended.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxshare.decoding.state import DecodeState
from jaxshare.decoding.steps import Steps
from jaxshare.layout import Layout
from jaxshare.trace.recorder import PassLog

_ROW_FIELDS = (
    "samplers",
    "logits",
    "has_logits",
    "pending",
    "num_pending",
    "head",
    "seeds",
    "num_sampled",
    "num_taken",
    "max_new_tokens",
    "reasons",
    "clock",
    "last_pass",
    "halts",
    "tokens",
    "logprobs",
    "scored",
    "top_logits",
    "recorded",
)
"""The fields of a decode state whose arrays have an entry for each row, whatever blocks and rows
are numbered."""
_NOT_OF_ROWS: Any = {"automata": None}


def take_rows(
    state: DecodeState, rows: Int[Array | np.ndarray, " r"], *, block: int = 0, automaton: int = 0
) -> DecodeState:
    """A state of these rows alone, in this order, over the same cache; nothing is recorded.

    Args:
      state: it stays valid.
      rows: whole sessions, the rows of each in ascending order.
      block: what the numbers of blocks start from: block `block` is 0 in the result.
      automaton: the same for the automata that rows use, but for the one that finds nothing.
    """
    # Without what stays whole: a program returns a copy of it.
    none: Any = {"cache": None, "record": None}
    steps = dataclasses.replace(state.steps, **_NOT_OF_ROWS)
    taken = _take(
        dataclasses.replace(state, steps=steps, **none),
        jnp.asarray(rows),
        jnp.asarray(block),
        jnp.asarray(automaton),
    )
    return dataclasses.replace(
        taken,
        cache=state.cache,
        steps=dataclasses.replace(taken.steps, automata=state.steps.automata),
        record=PassLog.empty(0, len(rows), state.max_width, state.cache.num_blocks),
    )


def put_rows(
    state: DecodeState,
    part: DecodeState,
    rows: Int[Array | np.ndarray, " r"],
    *,
    block: int = 0,
    automaton: int = 0,
) -> DecodeState:
    """A state with the rows of another one in the place of these; the undoing of `take_rows`.

    The cache stays that of `state`, whose logits and top logits are donated.

    Args:
      state: with as much room in each row as `part`, or more.
      part: with one row for each of `rows`.
      rows, block, automaton: as for `take_rows`.
    """
    no_cache: Any = {"cache": None}
    donated: Any = {**no_cache, "logits": None, "top_logits": None}
    put = _put(
        state.logits,
        state.top_logits,
        dataclasses.replace(state, **donated),
        dataclasses.replace(part, **no_cache),
        jnp.asarray(rows),
        jnp.asarray(block),
        jnp.asarray(automaton),
    )
    return dataclasses.replace(put, cache=state.cache)


def with_room_for(state: DecodeState, part: DecodeState) -> DecodeState:
    """The state with as much room in each row as another one has, or more; see `put_rows`."""

    def grown(array: Array, like: Array, unused: int = 0) -> Array:
        sizes = zip(array.shape[1:], like.shape[1:], strict=True)
        more = [(0, 0), *((0, max(0, size - has)) for has, size in sizes)]
        return jnp.pad(array, more, constant_values=unused) if np.any(more) else array

    steps, samplers = state.steps, state.samplers
    return dataclasses.replace(
        state,
        layout=Layout(grown(state.layout.blocks, part.layout.blocks, -1), state.layout.groups),
        samplers=dataclasses.replace(
            samplers,
            bias_tokens=grown(samplers.bias_tokens, part.samplers.bias_tokens, -1),
            bias_values=grown(samplers.bias_values, part.samplers.bias_values),
        ),
        pending=grown(state.pending, part.pending),
        tokens=grown(state.tokens, part.tokens),
        steps=dataclasses.replace(
            steps,
            **{
                name: grown(getattr(steps, name), getattr(part.steps, name))
                for name in ("openings", "opening_sizes", "marks", "sampled_at")
            },
        ),
    )


@jax.jit
def _take(state: DecodeState, rows: Array, block: Array, automaton: Array) -> DecodeState:
    def part(tree: Any) -> Any:
        return jax.tree.map(lambda array: array[rows], tree)

    place = jnp.zeros(state.layout.num_rows, jnp.int32).at[rows].set(jnp.arange(len(rows)))
    steps: Steps = part(state.steps)
    return dataclasses.replace(
        state,
        layout=Layout(_shifted(part(state.layout.blocks), -block), state.layout.groups),
        session=place[part(state.session)],
        steps=dataclasses.replace(
            steps,
            ends=jnp.where(steps.ends > 0, steps.ends - automaton, 0),
            answers=jnp.where(steps.answers > 0, steps.answers - automaton, 0),
            targets=_shifted(steps.targets, -block),
        ),
        **{name: part(getattr(state, name)) for name in _ROW_FIELDS},
    )


@functools.partial(jax.jit, donate_argnames=("logits", "top_logits"))
def _put(
    logits: Array,
    top_logits: Any,
    state: DecodeState,
    part: DecodeState,
    rows: Array,
    block: Array,
    automaton: Array,
) -> DecodeState:
    state = dataclasses.replace(state, logits=logits, top_logits=top_logits)

    def put(whole: Any, new: Any) -> Any:
        return jax.tree.map(_put_array, whole, new)

    def _put_array(whole: Array, new: Array) -> Array:
        size = tuple(slice(0, n) for n in new.shape[1:])
        return whole.at[(rows, *size)].set(new)

    unused = jnp.full((len(rows), state.samplers.bias_tokens.shape[1]), -1)
    samplers = dataclasses.replace(
        state.samplers, bias_tokens=state.samplers.bias_tokens.at[rows].set(unused)
    )
    state = dataclasses.replace(state, samplers=samplers)
    steps = part.steps
    steps = dataclasses.replace(
        steps,
        ends=jnp.where(steps.ends > 0, steps.ends + automaton, 0),
        answers=jnp.where(steps.answers > 0, steps.answers + automaton, 0),
        targets=_shifted(steps.targets, block),
        **_NOT_OF_ROWS,
    )
    listed, width = part.layout.blocks, state.layout.blocks.shape[1]
    listed = jnp.pad(
        _shifted(listed, block), ((0, 0), (0, width - listed.shape[1])), constant_values=-1
    )
    put_steps: Steps = put(dataclasses.replace(state.steps, **_NOT_OF_ROWS), steps)
    return dataclasses.replace(
        state,
        layout=Layout(state.layout.blocks.at[rows].set(listed), state.layout.groups),
        session=state.session.at[rows].set(rows[part.session]),
        steps=dataclasses.replace(put_steps, automata=state.steps.automata),
        **{name: put(getattr(state, name), getattr(part, name)) for name in _ROW_FIELDS},
    )


def _shifted(blocks: Array, by: Array) -> Array:
    """Numbers of blocks, further on by this many; negative ones name none and stay."""
    return jnp.where(blocks >= 0, blocks + by, blocks)
