"""The decode loop: one jitted function for workers, branches and agents.

Every row has a queue of pending tokens. While it is not empty the row feeds from it; when it runs
empty the row samples, and the sampled token is the next pending one. So prompts, injected text and
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
from jaxshare.deprecated import warn_renamed


def decode(
    model: DecodeModel,
    params: Any,
    state: DecodeState,
    *,
    passes: int,
    width: int = 1,
    stop_on_finish: bool = False,
    until_any: bool | None = None,
) -> DecodeState:
    """Runs up to `passes` forward passes in one dispatch.

    It runs fewer if every row finishes, or with `stop_on_finish` if one does. While a row has more
    than one pending token, passes take up to `width` of them; then one token a row. Rows whose
    block has no room for what they must write end with `FinishReason.CACHE_FULL` before anything is lost.

    Args:
      model, params: the model and its variables.
      state: its cache, its logits and its top logits are donated: use the returned state from here
        on.
      passes: data, not shape: any number runs the same program.
      width: tokens a row of passes that feed prompts; at most the state's `max_width`. Static.
      stop_on_finish: return as soon as a row finishes, so that the host can give it more to do.
        Data.
      until_any: the deprecated name of `stop_on_finish`.

    Raises:
      ValueError: a negative number of passes, more than the state has room to record, or a width
        that it cannot take.
    """
    if until_any is not None:
        warn_renamed("until_any", "stop_on_finish")
        stop_on_finish = until_any
    _check(state, passes, width)
    donated: Any = {"cache": None, "logits": None, "top_logits": None}
    rest = dataclasses.replace(state, **donated)
    return _decode(
        model,
        params,
        state.cache,
        state.logits,
        state.top_logits,
        rest,
        jnp.asarray(passes, jnp.int32),
        jnp.asarray(stop_on_finish),
        width,
    )


def _check(state: DecodeState, passes: int, width: int) -> None:
    if passes < 0 or not 1 <= width <= state.max_width:
        raise ValueError(
            f"passes is {passes} and width {width}; passes must be at least 0, and width from 1 to "
            f"the state's max_width, {state.max_width}"
        )
    if state.record is not None and passes > state.record.capacity:
        raise ValueError(
            f"passes is {passes}, but the state has room to record {state.record.capacity}; create "
            "it with more, or run fewer at once"
        )


@functools.partial(
    jax.jit, static_argnames=("model", "width"), donate_argnames=("cache", "logits", "top_logits")
)
def _decode(
    model: DecodeModel,
    params: Any,
    cache: KVCache,
    logits: Array,
    top_logits: TopLogits | None,
    rest: DecodeState,
    passes: Array,
    stop_on_finish: Array,
    width: int,
) -> DecodeState:
    state = dataclasses.replace(rest, cache=cache, logits=logits, top_logits=top_logits)
    running_before, last = state.running, state.passes + passes
    if state.record is not None:
        state = dataclasses.replace(state, record=state.record.start(state.passes))
    state = _sample(state)

    def goes_on(state: DecodeState) -> Array:
        finished = stop_on_finish & jnp.any(running_before & ~state.running)
        return (state.passes < last) & ~finished & jnp.any(state.running)

    def feed_if(condition: Array, state: DecodeState, width: int) -> DecodeState:
        # A loop of one iteration or none, because a conditional would copy the cache.
        return jax.lax.while_loop(
            lambda s: s[1],
            lambda s: (_feed(model, params, s[0], width), jnp.zeros((), bool)),
            (state, condition),
        )[0]

    def step(state: DecodeState) -> DecodeState:
        if width == 1:
            return _sample(_feed(model, params, state, 1))
        wide = jnp.any(state.running & (state.waiting > 1))
        return _sample(feed_if(~wide, feed_if(wide, state, width), 1))

    return jax.lax.while_loop(goes_on, step, state)


def _feed(model: DecodeModel, params: Any, state: DecodeState, width: int) -> DecodeState:
    """One forward pass over the next pending tokens of every running row."""
    count = jnp.where(state.running, jnp.minimum(state.waiting, width), 0)
    target = jnp.maximum(state.layout.written, 0)
    full = state.running & (state.cache.lengths[target] + count > state.cache.capacities[target])
    count = jnp.where(full, 0, count)
    tokens = jax.vmap(lambda queue, head: jax.lax.dynamic_slice_in_dim(queue, head, width))(
        state.pending, state.head
    )
    logits, cache = model.apply(params, tokens, count, state.cache, state.layout)
    fed = count > 0
    record = state.record
    if record is not None:
        record = record.log_pass(state.passes, tokens, count, cache.lengths)
    return dataclasses.replace(
        state,
        cache=cache,
        record=record,
        logits=jnp.where(fed[:, None], logits, state.logits),
        ready=state.ready | fed,
        reasons=jnp.where(full, FinishReason.CACHE_FULL.value, state.reasons),
        waiting=state.waiting - count,
        head=state.head + count,
        passes=state.passes + 1,
    )


def _sample(state: DecodeState) -> DecodeState:
    """Samples in the rows whose queue is empty.

    The token goes to the output and, unless it ends the row, into the queue.
    """
    due = state.running & (state.waiting == 0) & state.ready
    spent = due & (state.drawn >= state.budgets)
    # The largest of logits with a NaN is NaN. Such logits end a row that has more to feed, too.
    not_finite = ~jnp.isfinite(largest(state.logits, state.cache.mesh))
    not_finite &= state.running & state.ready
    due = due & ~spent & ~not_finite
    token, log_chance = _draw(state, due)
    drawn = state.drawn + due.astype(jnp.int32)
    stopped = due & jnp.any(token[:, None] == state.stops, axis=1)
    spent = spent | (due & ~stopped & (drawn >= state.budgets))
    reasons = jnp.where(spent, FinishReason.LENGTH.value, state.reasons)
    reasons = jnp.where(stopped, FinishReason.STOP.value, reasons)
    reasons = jnp.where(not_finite, FinishReason.ERROR.value, reasons)
    goes_on = due & ~stopped & ~spent
    # Rows that do not sample write outside the array, which drops what they write.
    index = jnp.where(due, state.drawn, state.tokens.shape[1])
    row = jnp.arange(due.shape[0])
    logprobs = state.logprobs
    if logprobs.shape[1]:
        logprobs = logprobs.at[row, index].set(log_chance, mode="drop")
    state = dataclasses.replace(
        state,
        reasons=reasons,
        drawn=drawn,
        waiting=jnp.where(goes_on, 1, state.waiting),
        head=jnp.where(due, 0, state.head),
        pending=state.pending.at[:, 0].set(jnp.where(goes_on, token, state.pending[:, 0])),
        tokens=state.tokens.at[row, index].set(token, mode="drop"),
        logprobs=logprobs,
        top_logits=_with_top_logits(state, due & state.recorded, index),
    )
    return state if state.steps is None else _end_steps(state, token, due, stopped)


def _draw(state: DecodeState, due: Array) -> tuple[Array, Array]:
    """The next token of each row that is due, int32[R], and its log-probability, float32[R].

    Tokens of other rows mean nothing; log-probabilities that are not kept are 0.
    """
    mesh = state.cache.mesh

    def draw() -> tuple[Array, Array]:
        token = state.samplers.sample(state.logits, state.seeds, state.drawn, mesh=mesh)
        if not state.logprobs.shape[1]:
            return token, jnp.zeros(token.shape)
        return token, logprob(state.logits, token, mesh=mesh)

    nothing = jnp.zeros(due.shape, jnp.int32), jnp.zeros(due.shape)
    return jax.lax.cond(jnp.any(due), draw, lambda: nothing)


def _with_top_logits(state: DecodeState, keeps: Array, index: Array) -> TopLogits | None:
    """The top logits with those that the bool[R] rows have just drawn from, at int32[R] index."""
    whole = state.top_logits
    if whole is None:
        return None
    k = whole.tokens.shape[-1]

    def compress() -> TopLogits:
        logits = whole_rows(state.logits, state.cache.mesh)
        return compress_logits(logits, state.samplers.temperature, k)

    def nothing() -> TopLogits:
        return TopLogits.empty(keeps.shape, k, whole.vocab)

    # The conditional is over the new entries alone: over the whole it would copy that.
    new = jax.lax.cond(jnp.any(keeps), compress, nothing)
    row, index = jnp.arange(keeps.shape[0]), jnp.where(keeps, index, whole.tokens.shape[1])
    return jax.tree.map(lambda a, part: a.at[row, index].set(part, mode="drop"), whole, new)


def _end_steps(state: DecodeState, token: Array, due: Array, stopped: Array) -> DecodeState:
    """Ends the steps that the sampled tokens end, and opens the next ones.

    Ends all rows where there is an answer or nothing can move.
    """
    assert state.steps is not None
    steps, cache, outcome = after_sampling(
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
    running = state.running
    reasons = jnp.where(outcome.unprepared, FinishReason.STEP.value, state.reasons)
    reasons = jnp.where(outcome.full & running, FinishReason.CACHE_FULL.value, reasons)
    reasons = jnp.where(outcome.done & (running | stopped), FinishReason.ANSWER.value, reasons)
    record = None if state.record is None else state.record.log_moves(state.passes, outcome.moved)
    opening = jnp.concatenate([token[:, None], outcome.opening], axis=1)
    size = opening.shape[1]
    return dataclasses.replace(
        state,
        steps=steps,
        cache=cache,
        record=record,
        reasons=reasons,
        waiting=jnp.where(outcome.opens, 1 + outcome.opening_size, state.waiting),
        pending=state.pending.at[:, :size].set(
            jnp.where(outcome.opens[:, None], opening, state.pending[:, :size])
        ),
    )
