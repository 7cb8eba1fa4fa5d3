"""One layer's attention over blocks, and the same as sums in float64."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshare import KVCache, Layout, Rope, block_attention, make_plan

KV_HEADS = 2


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A cache whose keys are not rotated by their tokens' places."""

    head_dim: int
    num_layers: int = 1
    num_kv_heads: int = KV_HEADS
    layer_ropes: tuple[Rope, ...] = ()

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope(self) -> Rope:
        return Rope.none()


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows that see blocks of bfloat16, and have just fed their last tokens to the last of these.

    Attributes:
      keys, values: of each block, [KV_HEADS, tokens, D].
      listed: for each row its blocks.
      q: [R, T, H, D], of the last T tokens of each row's last block.
      scale: of the scores.
    """

    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    listed: Sequence[Sequence[int]]
    q: np.ndarray
    scale: float

    def of_kernel(self) -> np.ndarray:
        """The answers of `block_attention`, as float64."""
        dim, width, rows = self.q.shape[3], self.q.shape[1], len(self.listed)
        config, lengths = OneLayer(dim), [each.shape[1] for each in self.keys]
        cache = KVCache.create(config, [length + 3 for length in lengths], jnp.bfloat16)
        kept = []
        for given in (self.keys, self.values):
            # What no token has been written to may hold anything.
            arena = np.full(cache.keys[0].shape, np.nan, np.float32)
            for offset, block in zip(np.asarray(cache.offsets), given, strict=True):
                arena[:, offset : offset + block.shape[1]] = block
            kept.append(jnp.asarray(arena, jnp.bfloat16))
        for blocks in self.listed:  # a pass has appended their last tokens
            lengths[blocks[-1]] -= width
        cache = dataclasses.replace(
            cache, keys=(kept[0],), values=(kept[1],), lengths=jnp.asarray(lengths, jnp.int32)
        )
        layout, fed = Layout.from_blocks(self.listed), jnp.full(rows, width, jnp.int32)
        plan = make_plan(cache, layout, fed, width, rope=config.rope)
        q: Any = jnp.asarray(self.q, jnp.bfloat16)
        out = block_attention(q, *kept, plan, scale=self.scale, implementation="cpu")
        return np.asarray(out, np.float64)

    def of_sums(self) -> np.ndarray:
        """The same as sums in float64."""
        q, *arenas = (
            [np.asarray(jnp.asarray(each, jnp.bfloat16), np.float64) for each in arrays]
            for arrays in (self.q, self.keys, self.values)
        )
        found = np.zeros(self.q.shape)
        width, heads = found.shape[1:3]
        for row, blocks in enumerate(self.listed):
            keys, values = (np.concatenate([a[b] for b in blocks], axis=1) for a in arenas)
            for t in range(width):
                end = keys.shape[1] - width + 1 + t
                for head in range(heads):
                    kv_head = head // (heads // KV_HEADS)
                    scores = keys[kv_head, :end] @ q[row][t, head] * self.scale
                    weights = np.exp(scores - scores.max())
                    mixed = weights @ values[kv_head, :end]
                    found[row, t, head] = mixed / weights.sum()
        return found
