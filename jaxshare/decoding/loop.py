"""The decode loop: one jitted function for workers, branches and agents.

Every row has a queue of pending tokens. While it is not empty the row feeds from it; when it runs
empty the row samples, and the sampled token is the next pending one. So prompts, injected text and
decoding are one mechanism.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.argument_checks import INT32_MAX
from jaxshare.decoding.changes import Changes
from jaxshare.decoding.conditional import apply_if
from jaxshare.decoding.draw import draw_tokens, with_top_logits
from jaxshare.decoding.few_rows import put_first, take_first
from jaxshare.decoding.forced import Forced
from jaxshare.decoding.pieces import count_pieces, feed_in_pieces, num_pieces
from jaxshare.decoding.sampling import history_after, largest
from jaxshare.decoding.sessions import Sessions
from jaxshare.decoding.state import DecodeModel, DecodeState, FinishReason
from jaxshare.decoding.step_ends import after_sampling
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.deprecated import warn_renamed


def decode(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    *,
    passes: int,
    width: int = 1,
    pieces: int | None = None,
    rows: int | None = None,
    stop_on_finish: bool = False,
    max_idle: int | None = None,
    unless_finished: bool = False,
    changes: Changes | None = None,
    until_any: bool | None = None,
) -> DecodeState:
    """Runs up to `passes` passes in one dispatch.

    It runs fewer if no row can go on. A session in which a row has more than one pending token
    takes part with up to `width` of each row's; others with one. Rows whose block has no room for
    what they must write end with `FinishReason.CACHE_FULL` before anything is lost.

    Args:
      model, params: the module and its variables; a TypeError says so of a `LoadedModel`.
      state: the arenas of its cache, its logits and its top logits are donated: go on with the
        returned state. What it has sampled can be read while that is computed.
      passes: data, not shape: any number runs the same program.
      width: tokens a row of passes that feed prompts; at most the state's `max_width`. Static.
      pieces: by default such a pass has a place of `width` tokens for each row; with this, so many
        places of `PIECE` tokens, several of which one row can take, beside a narrow pass for the
        sessions that need no more; those that do not fit wait. At least `num_pieces` of the rows of
        the largest session. Static.
      rows: only the first ones take part, in passes that cost what theirs do. Static.
      stop_on_finish: return as soon as a row finishes. Data.
      max_idle: return when another pass would make it more than this many passes, counted for each
        row by itself, that rows have idled: those of sessions that have halted or had their passes,
        and with `stop_on_finish`, where it is 0 by default, finished ones. Data.
      unless_finished: run no pass if a row that is in use has finished before: for a dispatch that is
        made before the host has read of which rows that is so. Data.
      changes: to make first; a program with them is another than one without.
      until_any: the deprecated name of `stop_on_finish`.

    Raises:
      ValueError: a negative number of passes or of idle ones, more passes than the state has room
        to record, or a width, a number of pieces or of rows that it cannot take.
    """
    if until_any is not None:
        warn_renamed("until_any", "stop_on_finish")
        stop_on_finish = until_any
    _check(model, state, passes, width, pieces, rows, max_idle)
    limits = _limits(passes, max_idle, stop_on_finish, unless_finished)
    return _decode(*_arguments(model, params, state, changes, limits, width, pieces, rows))


def compile_decode(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    *,
    width: int = 1,
    pieces: int | None = None,
    rows: int | None = None,
    changes: Changes | None = None,
) -> None:
    """Compiles what `decode` runs with such arguments, which finds it then.

    In any thread, beside dispatches of the same state: of arrays only the shapes are read, so these
    may be `shapes_of` them.
    """
    limits = _limits(0, None, False, False)
    _decode.lower(*_arguments(model, params, state, changes, limits, width, pieces, rows)).compile()


def _arguments(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    changes: Changes | None,
    limits: np.ndarray,
    width: int,
    pieces: int | None,
    rows: int | None,
) -> tuple[Any, ...]:
    """Those of `_decode`."""
    # What the host reads of a state stays valid: the next dispatch may run by then.
    none, cache = {"keys": None, "values": None}, state.cache
    donated: Any = {"cache": dataclasses.replace(cache, **none), "logits": None, "top_logits": None}
    rest = dataclasses.replace(state, **donated)
    few = None if rows == state.layout.num_rows else rows
    arrays = (cache.keys, cache.values), state.logits, state.top_logits, rest, changes, limits
    return model, params, *arrays, width, pieces, few


def _check(
    model: Any,
    state: DecodeState,
    passes: int,
    width: int,
    pieces: int | None,
    rows: int | None,
    max_idle: int | None,
) -> None:
    if not hasattr(model, "apply"):
        raise TypeError(
            f"model is {model!r}, which has no `apply`; of a model that was loaded give model.module, "
            "and model.variables as params"
        )
    if passes < 0 or not 1 <= width <= state.max_width:
        raise ValueError(
            f"passes is {passes} and width {width}; passes must be at least 0, and width from 1 to "
            f"the state's max_width, {state.max_width}"
        )
    if pieces is not None and pieces < num_pieces(1, width):
        raise ValueError(
            f"pieces is {pieces}; for a row with {width} tokens it must be at least "
            f"{num_pieces(1, width)}, and as many for each row of the largest session"
        )
    if rows is not None and not 1 <= rows <= state.layout.num_rows:
        raise ValueError(
            f"rows is {rows}; it must be from 1 to the state's number of rows, "
            f"{state.layout.num_rows}"
        )
    if max_idle is not None and max_idle < 0:
        raise ValueError(f"max_idle is {max_idle}; it must be at least 0")
    if 0 < state.record.capacity < passes:
        raise ValueError(
            f"passes is {passes}, but the state has room to record {state.record.capacity}; create "
            "it with more, or run fewer at once"
        )


def _limits(
    passes: int, max_idle: int | None, stop_on_finish: bool, unless_finished: bool
) -> np.ndarray:
    """The most passes, the most idle ones, whether rows that have finished idle, and whether no pass is
    run where one has before, int32[4]."""
    if max_idle is None:
        max_idle = 0 if stop_on_finish else INT32_MAX
    limits = passes, min(max_idle, INT32_MAX), stop_on_finish, unless_finished
    return np.asarray(limits, np.int32)


@functools.partial(
    jax.jit,
    static_argnames=("model", "width", "pieces", "rows"),
    donate_argnames=("arenas", "logits", "top_logits"),
)
def _decode(
    model: DecodeModel,
    params: Any,
    arenas: tuple[Any, Any],
    logits: Array,
    top_logits: TopLogits,
    rest: DecodeState,
    changes: Changes | None,
    limits: Array,
    width: int,
    pieces: int | None,
    rows: int | None,
) -> DecodeState:
    cache = dataclasses.replace(rest.cache, keys=arenas[0], values=arenas[1])
    state = dataclasses.replace(rest, cache=cache, logits=logits, top_logits=top_logits)
    state = state.with_changes(changes) if changes else state
    state = dataclasses.replace(state, record=state.record.start(state.passes))
    if rows is None:
        return _run(model, params, state, limits, width, pieces)
    first = _run(model, params, take_first(state, rows), limits, width, pieces)
    return put_first(state, first)


def _run(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    limits: Array,
    width: int,
    pieces: int | None,
) -> DecodeState:
    """The state after passes, as many as `_limits` allow."""
    running_before, last, max_idle = state.running, state.passes + limits[0], limits[1]
    finished_before = ~running_before & (state.reasons != FinishReason.UNUSED.value)
    may_run = (limits[3] == 0) | ~jnp.any(finished_before)
    # Steps without places are of no session. Of such rows there may be thousands.
    sessions = Sessions(state.session if state.steps.marks.shape[1] else None)

    def fed(state: DecodeState, ready: Array) -> DecodeState:
        return _fed(model, params, state, ready, sessions, width, pieces)

    def sampled(state: DecodeState, idle: Array) -> _Carry:
        state = _sample(state, sessions)
        finished = running_before & ~state.running
        # rows of sessions that go on once the host has acted
        waiting = (state.halts & sessions.any(finished)) | (state.clock >= state.last_pass)
        ready = state.running & _has_room(state) & ~waiting
        idles = (running_before & waiting) | (finished & (limits[2] > 0))
        idle = idle + jnp.sum(idles, dtype=jnp.int32)
        # Where no row idles, it is 0.
        goes_on = (state.passes < last) & (idle <= max_idle) & jnp.any(ready) & may_run
        return _Carry(state, idle, ready, goes_on)

    # The first step only samples, so that sampling is compiled once.
    def step(carry: _Carry) -> _Carry:
        return sampled(fed(carry.state, carry.ready), carry.idle)

    none, never = jnp.zeros((), jnp.int32), jnp.zeros_like(running_before)
    begin = _Carry(state, none, never, jnp.ones((), bool))
    return jax.lax.while_loop(lambda c: c.goes_on, step, begin).state


class _Carry(NamedTuple):
    """The state between two passes.

    Attributes:
      state: after sampling.
      idle: int32[], the passes that rows will have idled after the next one.
      ready: bool[R], the rows that can take part in it.
      goes_on: bool[], whether there is to be one.
    """

    state: DecodeState
    idle: Array
    ready: Array
    goes_on: Array


def _fed(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    rows: Array,
    sessions: Sessions,
    width: int,
    pieces: int | None,
) -> DecodeState:
    """The state after a pass that bool[R] rows can take part in; the same if there are none."""
    if width == 1:
        return apply_if(
            jnp.any(rows),
            state,
            lambda s: _feed(model, params, _advanced(s, sessions, rows), rows, 1),
        )
    wide = sessions.any(rows & (state.num_pending > 1)) & rows
    if pieces is None:
        wide = rows & jnp.any(wide)  # a wide pass has a place for each row anyway
    narrow = rows & ~wide
    if pieces is not None:
        needed = jnp.where(wide, count_pieces(jnp.minimum(state.num_pending, width)), 0)
        wide &= sessions.first_that_fit(needed, pieces)
    state = _advanced(state, sessions, wide | narrow)
    state = apply_if(jnp.any(wide), state, lambda s: _feed(model, params, s, wide, width, pieces))
    return apply_if(jnp.any(narrow), state, lambda s: _feed(model, params, s, narrow, 1))


def _has_room(state: DecodeState) -> Array:
    """bool[R]: the rows with a place for one more sampled token, if they are to have one."""
    will_sample = state.num_sampled < state.max_new_tokens
    return ~will_sample | (state.num_held < state.tokens.shape[1])


def _advanced(state: DecodeState, sessions: Sessions, rows: Array) -> DecodeState:
    """The state in a pass that these bool[R] rows take part in, and so do their sessions."""
    took_part = sessions.any(rows).astype(jnp.int32)
    passes = state.passes + jnp.any(rows).astype(jnp.int32)
    return dataclasses.replace(state, clock=state.clock + took_part, passes=passes)


def _feed(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    rows: Array,
    width: int,
    pieces: int | None = None,
) -> DecodeState:
    """Feeds up to `width` pending tokens of each of bool[R] rows, all as one or in pieces."""
    count = jnp.where(rows, jnp.minimum(state.num_pending, width), 0)
    target = jnp.maximum(state.layout.written, 0)
    full = rows & (state.cache.lengths[target] + count > state.cache.capacities[target])
    count = jnp.where(full, 0, count)
    tokens = jax.vmap(lambda queue, head: jax.lax.dynamic_slice_in_dim(queue, head, width))(
        state.pending, state.head
    )
    fed = count > 0
    if pieces is None:
        logits, cache = model.apply(params, tokens, count, state.cache, state.layout)
        logits = jnp.where(fed[:, None], logits, state.logits)
    else:
        logits, cache = feed_in_pieces(model, params, state, tokens, count, pieces)
    return dataclasses.replace(
        state,
        cache=cache,
        record=state.record.log_pass(state.passes - 1, tokens, count, cache.lengths),
        logits=logits,
        has_logits=state.has_logits | fed,
        reasons=jnp.where(full, FinishReason.CACHE_FULL.value, state.reasons),
        num_pending=state.num_pending - count,
        head=state.head + count,
    )


def _sample(state: DecodeState, sessions: Sessions) -> DecodeState:
    """Samples in the rows whose queue is empty.

    The token goes to the output and, unless it ends the row, into the queue.
    """
    due = state.running & (state.num_pending == 0) & state.has_logits
    due &= _has_room(state)
    spent = due & (state.num_sampled >= state.max_new_tokens)
    # The largest of logits with a NaN is NaN. Such logits end a row that has more to feed, too.
    not_finite = ~jnp.isfinite(largest(state.logits, state.cache.mesh))
    not_finite &= state.running & state.has_logits
    due = due & ~spent & ~not_finite
    drawn = draw_tokens(state, due)
    token, not_finite, due = drawn.token, not_finite | drawn.failed, due & ~drawn.failed
    none_left = due & (token < 0)
    due = due & ~none_left
    num_sampled = state.num_sampled + due.astype(jnp.int32)
    stopped = due & state.samplers.ends(token, state.stops)
    # Rows that do not sample write outside the array, which drops what they write.
    index = jnp.where(due, state.num_held, state.tokens.shape[1])
    forced = Forced.find(state, token, due & ~stopped, index + 1)
    num_sampled = num_sampled + forced.count
    spent = spent | (due & ~stopped & (num_sampled >= state.max_new_tokens))
    reasons = jnp.where(spent, FinishReason.LENGTH.value, state.reasons)
    reasons = jnp.where(stopped, FinishReason.STOP.value, reasons)
    reasons = jnp.where(not_finite, FinishReason.ERROR.value, reasons)
    reasons = jnp.where(none_left, FinishReason.NO_TOKEN.value, reasons)
    goes_on = due & ~stopped & ~spent
    row = jnp.arange(due.shape[0])
    logprobs, raw = state.logprobs, state.raw_logprobs
    if logprobs.shape[1]:
        logprobs = logprobs.at[row, index].set(drawn.log_chance, mode="drop")
    raw = None if raw is None else raw.at[row, index].set(drawn.raw_log_chance, mode="drop")
    sampled = dataclasses.replace(
        state,
        reasons=reasons,
        num_sampled=num_sampled,
        history=forced.read(history_after(state.history, token, due, state.cache.mesh), state),
        grammars=forced.grammars,
        num_pending=jnp.where(goes_on, 1 + forced.count, state.num_pending),
        head=jnp.where(due, 0, state.head),
        pending=forced.behind(
            state.pending.at[:, 0].set(jnp.where(goes_on, token, state.pending[:, 0])), 1, goes_on
        ),
        tokens=forced.behind(
            state.tokens.at[row, index].set(token, mode="drop"), index + 1, goes_on | spent
        ),
        logprobs=logprobs,
        raw_logprobs=raw,
        top_logits=with_top_logits(state, drawn.logits, due & state.recorded, index),
        processing=drawn.processing,
    )
    if not state.steps.marks.shape[1]:
        return sampled
    return after_sampling(sampled, sessions, token, index, due, stopped)
