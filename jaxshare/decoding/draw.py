"""The draw of a pass: the next token of each row that is due, and what is kept of its distribution."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.decoding.processing import Processing, processed_logits
from jaxshare.decoding.sampling import logprob, whole_rows
from jaxshare.decoding.state import DecodeState
from jaxshare.decoding.top_logits import TopLogits, compress_logits


class Drawn(NamedTuple):
    """The draws of rows: int32[R] tokens, their float32[R] log-probabilities, those under the model
    itself where a row wants both, the float32[R, V] logits that the former and top logits are of (None
    for the model's), the logits processors after it, and the bool[R] rows that these have failed."""

    token: Array
    log_chance: Array
    raw_log_chance: Array
    logits: Array | None
    processing: Processing | None
    failed: Array


def draw_tokens(state: DecodeState, due: Array) -> Drawn:
    """Draws the next token of each row that is due.

    Tokens of other rows mean nothing; log-probabilities that are not wanted are 0 or right.
    """
    mesh, positions = state.cache.mesh, state.num_sampled

    def draw() -> Drawn:
        processed = processed_logits(
            state.processing,
            state.samplers,
            state.logits,
            state.history,
            state.grammars.masks(due, mesh),
            positions,
            due,
            mesh,
        )
        token = processed.samplers.sample(
            processed.logits,
            state.seeds,
            positions,
            history=processed.history,
            masks=processed.masks,
            mesh=mesh,
        )
        scored = None
        if state.processed is not None:
            wanted = due & state.processed & (state.scored | state.recorded)
            scored = processed.as_drawn(state.logits, positions, wanted, mesh)

        def log_chances(logits: Array) -> Array:
            return jax.lax.cond(
                jnp.any(due & state.scored),
                lambda: logprob(logits, token, mesh=mesh),
                lambda: jnp.zeros(token.shape),
            )

        log_chance = raw = jnp.zeros(token.shape)
        if state.logprobs.shape[1]:
            log_chance = log_chances(state.logits if scored is None else scored)
        if state.raw_logprobs is not None:
            raw = log_chances(state.logits)
        return Drawn(token, log_chance, raw, scored, processed.processing, processed.failed)

    scored = None if state.processed is None else state.logits
    none, never = jnp.zeros(due.shape), jnp.zeros(due.shape, bool)
    nothing = Drawn(none.astype(jnp.int32), none, none, scored, state.processing, never)
    return jax.lax.cond(jnp.any(due), draw, lambda: nothing)


def with_top_logits(
    state: DecodeState, scored: Array | None, keeps: Array, index: Array
) -> TopLogits:
    """The top logits with those that the bool[R] rows have just drawn from, at int32[R] index.

    They are of the model's logits, or of float32[R, V] `scored` ones.
    """
    whole = state.top_logits
    if not whole.rest.shape[1]:
        return whole
    k = whole.tokens.shape[-1]

    def compress() -> TopLogits:
        logits = state.logits if scored is None else scored
        logits = whole_rows(logits, state.cache.mesh)
        return compress_logits(logits, state.samplers.temperature, k)

    def nothing() -> TopLogits:
        return TopLogits.empty(keeps.shape, k, whole.vocab)

    # The conditional is over the new entries alone: over the whole it would copy that.
    new = jax.lax.cond(jnp.any(keeps), compress, nothing)
    row, index = jnp.arange(keeps.shape[0]), jnp.where(keeps, index, whole.tokens.shape[1])
    return jax.tree.map(lambda a, part: a.at[row, index].set(part, mode="drop"), whole, new)
