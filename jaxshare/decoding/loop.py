"""The decode loop: one jitted function for workers, branches and agents.

Every row has a queue of pending tokens. While it is not empty the row feeds from it; when it runs
empty the row samples, and what it samples is the next pending token. So prompts, injected text and
decoding are one mechanism.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.cache import KVCache
from jaxshare.decoding.sampling import largest, logprob, whole_rows
from jaxshare.decoding.state import DecodeModel, DecodeState, FinishReason
from jaxshare.decoding.steps import after_sampling
from jaxshare.decoding.top_logits import TopLogits, compress_logits


def decode(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    *,
    passes: int,
    width: int = 1,
    until_any: bool = False,
) -> DecodeState:
    """Runs up to `passes` forward passes in one dispatch; fewer if every row ends, or with
    `until_any` if one does.

    While a row has more than one pending token, passes take up to `width` of them; then one token a
    row. Rows whose block has no room for what they must write end with `FinishReason.FULL` before
    anything is lost.

    Args:
      model, params: the model and its variables.
      state: its cache, its logits and what it keeps of them are donated: use the returned state
        from here on.
      passes: data, not shape: any number runs the same program.
      width: of passes that feed prompts; at most the state's `max_width`. Static.
      until_any: come back as soon as a row ends, so that the host can give it more to do. Data.

    Raises:
      ValueError: a negative number of passes, more than the state has room to record, or a width
        that it cannot take.
    """
    if passes < 0 or not 1 <= width <= state.max_width:
        raise ValueError(
            f"passes is {passes} and width {width}; passes must be at least 0, and width from 1 to "
            f"the state's max_width, {state.max_width}"
        )
    if state.record is not None and passes > state.record.capacity:
        raise ValueError(
            f"passes is {passes}, but the state has room to record {state.record.capacity}; create it "
            "with more, or run fewer at once"
        )
    rest = dataclasses.replace(state, cache=None, logits=None, kept=None)  # pyright: ignore[reportArgumentType]
    return _decode(
        model,
        params,
        state.cache,
        state.logits,
        state.kept,
        rest,
        jnp.asarray(passes, jnp.int32),
        jnp.asarray(until_any),
        width,
    )


@functools.partial(
    jax.jit, static_argnames=("model", "width"), donate_argnames=("cache", "logits", "kept")
)
def _decode(
    model: DecodeModel,
    params: Any,
    cache: KVCache,
    logits: Array,
    kept: TopLogits | None,
    rest: DecodeState,
    passes: Array,
    until_any: Array,
    width: int,
) -> DecodeState:
    state = dataclasses.replace(rest, cache=cache, logits=logits, kept=kept)
    began, last = state.running, state.passes + passes
    state = (
        state
        if state.record is None
        else dataclasses.replace(state, record=state.record.start(state.passes))
    )
    state = _sample(state)

    def goes_on(state: DecodeState) -> Array:
        ended = until_any & jnp.any(began & ~state.running)
        return (state.passes < last) & ~ended

    def feed(state: DecodeState, width: int, whether: Array) -> DecodeState:
        # A loop of one turn or none, because a conditional would copy the cache.
        return jax.lax.while_loop(
            lambda s: s[1],
            lambda s: (_feed(model, params, s[0], width), jnp.zeros((), bool)),
            (state, whether),
        )[0]

    def step(state: DecodeState) -> DecodeState:
        if width == 1:
            return _sample(_feed(model, params, state, 1))
        behind = _behind(state)
        return _sample(feed(feed(state, width, behind), 1, ~behind))

    return jax.lax.while_loop(lambda s: goes_on(s) & jnp.any(s.running), step, state)


def _behind(state: DecodeState) -> Array:
    """bool[]: whether a row has more to feed than one token."""
    return jnp.any(state.running & (state.waiting > 1))


def _feed(model: DecodeModel, params: Any, state: DecodeState, width: int) -> DecodeState:
    """One forward pass over the next pending tokens of every running row."""
    count = jnp.where(state.running, jnp.minimum(state.waiting, width), 0)
    target = jnp.maximum(state.layout.written, 0)
    full = state.running & (state.cache.lengths[target] + count > state.cache.capacities[target])
    reasons = jnp.where(full, FinishReason.FULL.value, state.reasons)
    count = jnp.where(full, 0, count)
    tokens = jax.vmap(lambda queue, head: jax.lax.dynamic_slice_in_dim(queue, head, width))(
        state.pending, state.head
    )
    logits, cache = model.apply(params, tokens, count, state.cache, state.layout)
    fed = count > 0
    record = (
        None
        if state.record is None
        else state.record.log_pass(state.passes, tokens, count, cache.lengths)
    )
    return dataclasses.replace(
        state,
        cache=cache,
        record=record,
        logits=jnp.where(fed[:, None], logits, state.logits),
        ready=state.ready | fed,
        reasons=reasons,
        waiting=state.waiting - count,
        head=state.head + count,
        passes=state.passes + 1,
    )


def _sample(state: DecodeState) -> DecodeState:
    """Rows with an empty queue sample; the token goes to the output and, unless it ends the row,
    into the queue."""
    due = state.running & (state.waiting == 0) & state.ready
    spent = due & (state.drawn >= state.budgets)
    due = due & ~spent
    # Of logits that are not numbers the largest is none either. They end a row that has more to
    # feed, too.
    mesh = state.cache.mesh
    lost = state.running & state.ready & ~jnp.isfinite(largest(state.logits, mesh))
    due = due & ~lost

    def sampled() -> tuple[Array, Array]:
        token = state.samplers.sample(state.logits, state.seeds, state.drawn, mesh=mesh)
        return token, logprob(state.logits, token, mesh=mesh) if state.logprobs.shape[
            1
        ] else jnp.zeros(token.shape)

    nothing = jnp.zeros(due.shape, jnp.int32), jnp.zeros(due.shape)
    token, chance = jax.lax.cond(jnp.any(due), sampled, lambda: nothing)
    drawn = state.drawn + due.astype(jnp.int32)
    stopped = due & jnp.any(token[:, None] == state.stops, axis=1)
    spent = spent | (due & ~stopped & (drawn >= state.budgets))
    reasons = jnp.where(
        stopped, FinishReason.STOP.value, jnp.where(spent, FinishReason.BUDGET.value, state.reasons)
    )
    reasons = jnp.where(lost, FinishReason.NOT_A_NUMBER.value, reasons)
    goes_on = due & ~stopped & ~spent
    place = jnp.where(due, state.drawn, state.tokens.shape[1])
    row = jnp.arange(due.shape[0])
    if state.kept is not None:
        state = dataclasses.replace(
            state, kept=_record(state.kept, state, due & state.recorded, row, place)
        )
    state = dataclasses.replace(
        state,
        reasons=reasons,
        drawn=drawn,
        waiting=jnp.where(goes_on, 1, state.waiting),
        head=jnp.where(due, 0, state.head),
        pending=state.pending.at[:, 0].set(jnp.where(goes_on, token, state.pending[:, 0])),
        tokens=state.tokens.at[row, place].set(token, mode="drop"),
        logprobs=state.logprobs.at[row, place].set(chance, mode="drop")
        if state.logprobs.shape[1]
        else state.logprobs,
    )
    return state if state.steps is None else _step(state, token, due, stopped)


def _record(
    kept: TopLogits, state: DecodeState, which: Array, row: Array, place: Array
) -> TopLogits:
    """Keeps what these rows have just drawn from."""
    k = kept.tokens.shape[-1]

    def found() -> TopLogits:
        return compress_logits(
            whole_rows(state.logits, state.cache.mesh), state.samplers.temperature, k
        )

    def nothing() -> TopLogits:
        return TopLogits.empty(which.shape, k, kept.vocab)

    # The conditional is over what is found alone: over the whole it would copy that.
    new = jax.lax.cond(jnp.any(which), found, nothing)
    at = jnp.where(which, place, kept.tokens.shape[1])
    return jax.tree.map(lambda whole, part: whole.at[row, at].set(part, mode="drop"), kept, new)


def _step(state: DecodeState, token: Array, due: Array, stopped: Array) -> DecodeState:
    """Ends the steps that the sampled tokens end, opens the next ones, and ends all rows where an
    answer stands or nothing can move."""
    assert state.steps is not None
    steps, cache, found = after_sampling(
        state.steps,
        state.cache,
        state.layout,
        token,
        state.drawn - 1,
        due,
        stopped,
        state.running,
        state.passes,
    )
    reasons = jnp.where(found.held, FinishReason.STEP.value, state.reasons)
    reasons = jnp.where(found.full & state.running, FinishReason.FULL.value, reasons)
    reasons = jnp.where(found.over & (state.running | stopped), FinishReason.ANSWER.value, reasons)
    record = None if state.record is None else state.record.log_moves(state.passes, found.moved)
    opening = jnp.concatenate([token[:, None], found.opening], axis=1)
    size = opening.shape[1]
    return dataclasses.replace(
        state,
        steps=steps,
        cache=cache,
        record=record,
        reasons=reasons,
        waiting=jnp.where(found.opens, 1 + found.opening_size, state.waiting),
        pending=state.pending.at[:, :size].set(
            jnp.where(found.opens[:, None], opening, state.pending[:, :size])
        ),
    )
