"""Changes: what the host changes in a decode state between two dispatches.

They are an argument of the next dispatch, so that one program changes the state and runs passes.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Int32, UInt32

from jaxshare.cache import KVCache
from jaxshare.decoding.grammar_rows import NO_GRAMMAR
from jaxshare.seeds import seed_words


class Action(enum.IntEnum):
    """An action on a row."""

    NONE = 0
    RETIRE = 1
    """The row is not in use any more, and lists no block."""
    RESUME = 2
    """The row goes on, whatever had ended it."""
    ADMIT = 3
    """The row starts to write something new, by itself; it keeps its sampler."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The inputs of an admitted row.

    Attributes:
      seed: of 64 bits.
      max_new_tokens: tokens that it may sample in all.
      num_sampled: tokens that it has sampled before, which count for that and for its randomness.
      pending: tokens to feed first. Where there are none, it samples at once from its logits.
      recorded, scored: whether its top logits, or log-probabilities, are kept.
      grammar: its state of `GrammarRows`.
      processed: whether log-probabilities are those of the chances that tokens are drawn with.
    """

    seed: int
    max_new_tokens: int
    num_sampled: int = 0
    pending: Sequence[int] = ()
    recorded: bool = False
    scored: bool = False
    grammar: int = NO_GRAMMAR
    processed: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes of a state of R rows, whose queues hold Q tokens with their slack.

    Attributes:
      rows: int32[R, 7], for each row an `Action` and, where it is admitted, what `Start` has but
        for seed and pending tokens: max_new_tokens, num_sampled, the number of pending tokens,
        recorded, scored (2 for log-probabilities of the chances that tokens are drawn with, 1 for
        those of the model, 0 for none), grammar.
      seeds: uint32[R, 2] of admitted rows.
      pending: int32[R, Q] of admitted rows.
      blocks: int32[R, N], of the layout.
      table: int32[4, B], of the cache's blocks: offset, length, capacity and phase. None where the
        blocks stay as they are.
      flags: int32[3]: whether `blocks` and `table` are to be ignored (then they have the shapes of
        the state's), or the lengths of blocks alone, and whether the tokens that the state holds are
        taken.
    """

    rows: Int32[Any, "R 7"]
    seeds: UInt32[Any, "R 2"]
    pending: Int32[Any, "R Q"]
    blocks: Int32[Any, "R N"]
    table: Int32[Any, "4 B"] | None
    flags: Int32[Any, " 3"]

    @classmethod
    def none(
        cls,
        queue_width: int,
        blocks: Int[np.ndarray, "R N"],
        table: Int[np.ndarray, "4 B"] | None = None,
        *,
        keeps_view: bool = False,
        keeps_lengths: bool = False,
        takes_outputs: bool = False,
    ) -> "Changes":
        """Changes of no row, to which `act` and `admit` add.

        Args:
          queue_width: Q.
          blocks, table: as described.
          keeps_view: whether they are to be ignored.
          keeps_lengths: whether the blocks keep their lengths, which the host may not know yet.
          takes_outputs: whether the tokens that the state holds are taken.
        """
        rows = blocks.shape[0]
        return cls(
            np.zeros((rows, 7), np.int32),
            np.zeros((rows, 2), np.uint32),
            np.zeros((rows, queue_width), np.int32),
            np.asarray(blocks, np.int32),
            table,
            np.asarray([keeps_view, keeps_lengths, takes_outputs], np.int32),
        )

    def act(self, rows: Sequence[int], action: Action) -> None:
        """Sets the action on some rows."""
        self.rows[list(rows), 0] = action

    def admit(self, row: int, start: Start) -> None:
        """Admits a row."""
        size = len(start.pending)
        self.rows[row] = (
            Action.ADMIT,
            start.max_new_tokens,
            start.num_sampled,
            size,
            start.recorded,
            2 if start.processed else start.scored,
            start.grammar,
        )
        self.seeds[row] = seed_words([start.seed])[0]
        self.pending[row, :size] = start.pending

    @property
    def keeps_view(self) -> Bool[jax.Array, ""]:
        """True where `blocks` and `table` are to be ignored."""
        return self.flags[0] > 0

    @property
    def keeps_lengths(self) -> Bool[jax.Array, ""]:
        """True where the blocks keep their lengths."""
        return self.keeps_view | (self.flags[1] > 0)

    @property
    def takes_outputs(self) -> Bool[jax.Array, ""]:
        """True where the tokens that the state holds are taken."""
        return self.flags[2] > 0

    def listed(self, blocks: Int32[jax.Array, "R M"]) -> Int32[jax.Array, "R N"]:
        """The blocks of a layout after these changes, but for rows that retire."""
        return _unless(self.keeps_view, self.blocks, blocks)

    def cache(self, cache: KVCache) -> KVCache:
        """A cache after these changes, whose table is given."""
        assert self.table is not None
        offsets, lengths, capacities, phases = self.table
        return dataclasses.replace(
            cache,
            offsets=_unless(self.keeps_view, offsets, cache.offsets),
            lengths=_unless(self.keeps_lengths, lengths, cache.lengths),
            capacities=_unless(self.keeps_view, capacities, cache.capacities),
            phases=_unless(self.keeps_view, phases, cache.phases),
        )


def _unless(is_kept: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    # What is kept has the same shape.
    return jnp.where(is_kept, old, new) if new.shape == old.shape else new
