"""Checks of a pass before it is planned, as far as values are known."""

import jax
import numpy as np

from jaxshare.cache import KVCache
from jaxshare.layout import Layout, is_concrete


def check_pass(cache: KVCache, layout: Layout, count: jax.typing.ArrayLike, width: int) -> None:
    """Checks that a cache can take a pass. While tracing it does nothing, and the pass sets a fault.

    Args:
      cache: before the pass; layout: what each row sees and writes.
      count: int32[R], real tokens of each row.
      width: T, tokens of each row with padding.

    Raises:
      ValueError: an earlier pass inside jit set a fault, an unknown or repeated block, two rows
        writing one block, counts that do not fit, or a block that would be written beyond its
        capacity.
    """
    layout.check(cache.num_blocks)
    if not is_concrete(count, cache.lengths, cache.capacities, cache.faults, layout.blocks):
        return
    cache.check()
    counts, lengths, capacities = map(np.asarray, (count, cache.lengths, cache.capacities))
    if (counts < 0).any() or (counts > width).any():
        raise ValueError(
            f"count must lie between 0 and the {width} tokens given; got {counts.tolist()}"
        )
    # Operations of JAX would be traced inside jit.
    last = np.maximum(layout.count_listed() - 1, 0)
    written = np.take_along_axis(np.asarray(layout.blocks), last[:, None], axis=1)[:, 0]
    for r in np.flatnonzero(counts):
        if written[r] < 0:
            raise ValueError(
                f"row {r} brings {int(counts[r])} tokens but lists no block to write them to"
            )
        if lengths[written[r]] + int(counts[r]) > capacities[written[r]]:
            raise ValueError(
                f"row {r} brings {int(counts[r])} tokens, but block {written[r]} holds "
                f"{lengths[written[r]]} of at most {capacities[written[r]]}; create the cache with "
                "larger capacities"
            )
