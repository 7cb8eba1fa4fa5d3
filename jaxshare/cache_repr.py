"""The text that a notebook shows for a cache: its shape, and how full its blocks are."""

from typing import Any

import jax
import numpy as np

from jaxshare.layout import is_concrete

_SHOWN = 8
"""The most blocks whose lengths are told."""


class BriefCache:
    """A cache that is shown in a line: its arrays have millions of numbers."""

    keys: tuple[Any, ...]
    lengths: Any
    capacities: Any

    def __repr__(self) -> str:
        """A line: blocks with their tokens and capacities, layers, kv heads, dtype."""
        leaves = jax.tree.leaves(self)
        if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
            return f"<KVCache of {len(leaves)} leaves>"  # of a tree of something else
        arena, is_traced = jax.tree.leaves(self.keys)[0], not is_concrete(*leaves)
        if not is_traced and any(
            isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves
        ):
            return (
                "<KVCache that a program has consumed: forward and decode take the cache that they "
                "are given; use the returned one>"
            )
        blocks = "1 block" if self.lengths.size == 1 else f"{self.lengths.size} blocks"
        if not is_traced:
            pairs = zip(np.asarray(self.lengths), np.asarray(self.capacities), strict=True)
            told = [f"{length}/{capacity}" for length, capacity in pairs]
            more = [f"... {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
            blocks += f" ({', '.join([*told[:_SHOWN], *more])} tokens)"
        layers = "1 layer" if len(self.keys) == 1 else f"{len(self.keys)} layers"
        shape = f"kv heads x tokens x size {arena.shape}, {arena.dtype}"
        return f"<KVCache: {blocks}, {layers}, {shape}>"
