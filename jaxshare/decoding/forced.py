"""Tokens that a row's grammar forces after the one that it has sampled.

They go to the output and into the queue as that does, so that one pass feeds them all.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxshare.decoding.grammar_rows import GrammarRows
from jaxshare.decoding.grammar_tables import MOST_FORCED
from jaxshare.decoding.history import History
from jaxshare.decoding.sampling import history_after
from jaxshare.decoding.state import DecodeState

_PAYS = 2
"""Forced tokens for each running row from which on they are fed at once: so many passes of that row
are saved, and as much time of all rows taken."""


@dataclasses.dataclass(frozen=True)
class Forced:
    """Forced tokens of R rows, of which a row has F at most.

    Attributes:
      tokens: int32[R, F]; count: int32[R], how many of them each row has.
      grammars: after them.
    """

    tokens: Array
    count: Array
    grammars: GrammarRows

    @classmethod
    def find(
        cls,
        state: DecodeState,
        token: Int[Array, " R"],
        sampled: Bool[Array, " R"],
        num_held: Int[Array, " R"],
    ) -> "Forced":
        """The forced tokens after those that rows have just sampled.

        There are none where a pass for them would not pay; in rows whose log-probabilities or largest
        logits are kept, for which each place must be sampled; and beside bans and logits processors.
        There a mask admits the forced token alone.

        Args:
          state: as it was when they were sampled.
          token: of each row.
          sampled: the rows that have sampled one, and are not ended by it.
          num_held: the number of places of `state.tokens` that each row has filled.
        """
        if not state.grammars.in_use:
            none = jnp.zeros(token.shape, jnp.int32)
            return cls(none[:, None], none, state.grammars)
        left = jnp.minimum(
            state.max_new_tokens - state.num_sampled - 1, state.tokens.shape[1] - num_held
        )
        room = jnp.clip(left, 0, min(MOST_FORCED, state.queue_capacity - 1))
        samplers = state.samplers
        banned = jnp.any(jnp.isneginf(samplers.edit_values), axis=1) | (samplers.ngram > 0)
        banned |= jnp.any(samplers.words >= 0, axis=(1, 2))
        if state.processing is not None:
            banned |= state.processing.used
        room = jnp.where(state.scored | state.recorded | banned, 0, room)
        # A pass that feeds several tokens of a row comes beside the one for the other rows.
        least = _PAYS * jnp.sum(state.running, dtype=jnp.int32)
        grammars, tokens, count = state.grammars.after(
            token, sampled, room, least, state.cache.mesh
        )
        return cls(tokens, count, grammars)

    def behind(
        self, array: Int[Array, "R X"], first: Int[Array, " R"] | int, rows: Bool[Array, " R"]
    ) -> Int[Array, "R X"]:
        """An array with the forced tokens of these rows from place `first` on."""
        if not self.grammars.in_use:
            return array
        # By what each place takes: XLA scatters on a CPU one number after the other.
        place = jnp.arange(array.shape[1]) - jnp.reshape(jnp.asarray(first), (-1, 1))
        taken = rows[:, None] & (place >= 0) & (place < self.count[:, None])
        token = jnp.take_along_axis(self.tokens, jnp.where(taken, place, 0), axis=1)
        return jnp.where(taken, token, array)

    def read(self, history: History, state: DecodeState) -> History:
        """The texts after the forced tokens."""
        if not (self.grammars.in_use and history.is_kept):
            return history

        def add(place: Array, history: History) -> History:
            token = jax.lax.dynamic_index_in_dim(self.tokens, place, axis=1, keepdims=False)
            return history_after(history, token, place < self.count, state.cache.mesh)

        return jax.lax.fori_loop(0, jnp.max(self.count), add, history)
