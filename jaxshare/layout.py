"""Layout: which rows see which blocks, in which order, and where they write."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Int, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """The blocks that each row sees, in that row's order. Data, not shape: changing it never
    recompiles.

    A row writes its new tokens to the last block it lists. A row that lists none is not in use.

    Attributes:
      blocks: block numbers, each row's from the left, -1 after its last.
      groups: sizes of the groups of rows that read a block together where not all rows see it,
        ascending (static). A block is read by the smallest group that holds its fan-in; with no
        group large enough, in one product with the queries of all rows, those that do not see it
        masked. For trees of prompts (Hydragen section 3.3); it affects speed alone.
      ahead: where given, rows may write the same block in a pass, a piece of a text each: the new
        tokens that such rows bring to it before each row's own.
      adapters: where given, the place of each row's adapter among those of the model
        (`jaxshare.models.adapters`), 0 for none.
    """

    blocks: Int32[Array, "R N"]
    groups: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    ahead: Int32[Array, " R"] | None = None
    adapters: Int32[Array | np.ndarray, " R"] | None = None

    @classmethod
    def from_blocks(
        cls,
        rows: Sequence[Sequence[int]],
        *,
        num_rows: int | None = None,
        width: int | None = None,
        groups: Sequence[int] = (),
    ) -> "Layout":
        """Makes a layout from lists of block numbers, one list a row.

        Args:
          rows: for each row the blocks it sees, in order; an empty list is a row not in use.
          num_rows: R, more than rows are given for rows that come later; default len(rows).
          width: N, more than the longest row for rows that become longer; default the longest row.
          groups: as in the attributes.

        Raises:
          ValueError: a row lists a block twice or a negative one, two rows write the same block, or
            a group of fewer than two rows.
        """
        num_rows = len(rows) if num_rows is None else num_rows
        width = max([1, *(len(row) for row in rows)]) if width is None else width
        if num_rows < max(1, len(rows)):
            raise ValueError(
                f"num_rows is {num_rows}, but {len(rows)} rows are given; ask for at least that "
                "many, and at least 1"
            )
        blocks = np.full((num_rows, width), -1, np.int32)
        for r, row in enumerate(rows):
            if len(row) > width:
                raise ValueError(
                    f"row {r} lists {len(row)} blocks, but width is {width}; make the layout wider"
                )
            if negative := [b for b in row if b < 0]:
                raise ValueError(f"row {r} lists block {negative[0]}; blocks are numbered from 0")
            blocks[r, : len(row)] = row
        if few := [g for g in groups if g < 2]:
            raise ValueError(
                f"groups has {few[0]}; a group that reads a block together has at least 2 rows"
            )
        _check(blocks)
        return cls(jax.device_put(blocks), tuple(sorted(set(groups))))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.blocks.shape[0]

    @property
    def listed(self) -> Int32[Array, " R"]:
        """The number of blocks that each row lists."""
        return jnp.sum(self.blocks >= 0, axis=1, dtype=jnp.int32)

    def count_listed(self) -> Int32[np.ndarray, " R"]:
        """`listed` on the host, which starts no program."""
        return (np.asarray(self.blocks) >= 0).sum(axis=1, dtype=np.int32)

    @property
    def written(self) -> Int32[Array, " R"]:
        """The block that each row writes, -1 for a row not in use."""
        last = jnp.maximum(self.listed - 1, 0)
        return jnp.take_along_axis(self.blocks, last[:, None], axis=1)[:, 0]

    def fork(self, block: int | Int[Array, ""], tail: int | Int[Array, ""]) -> "Layout":
        """The layout after `KVCache.fork(block, at, tail)`: every row that lists `block` lists
        `tail` right after it.

        Raises:
          ValueError: a row that lists `block` lists as many blocks as the layout is wide.
        """
        blocks, width = self.blocks, self.blocks.shape[1]
        matches = blocks == block
        lists_it = jnp.any(matches, axis=1)
        if is_concrete(blocks, block) and bool(jnp.any(lists_it & (self.listed == width))):
            raise ValueError(
                f"a row that lists block {int(block)} lists {width} blocks and has no room for its "
                f"tail; make the layout wider (Layout.from_blocks(..., width={width + 1}))"
            )
        after = jnp.where(lists_it, jnp.argmax(matches, axis=1), width)[:, None]
        column = jnp.arange(width)[None]
        shifted = jnp.concatenate([blocks[:, :1], blocks[:, :-1]], axis=1)
        tail = jnp.asarray(tail, jnp.int32)
        forked = jnp.where(column <= after, blocks, jnp.where(column == after + 1, tail, shifted))
        # Inside jit nothing can be raised: a full row gets a block that no cache has, and the next
        # pass sets a fault.
        full = (lists_it & (self.listed == width))[:, None]
        return dataclasses.replace(
            self, blocks=jnp.where(full & (column == width - 1), jnp.iinfo(jnp.int32).max, forked)
        )

    def check(self, num_blocks: int | None = None) -> None:
        """Raises ValueError for a layout that `from_blocks` refuses, and for blocks beyond
        `num_blocks`; does nothing while tracing."""
        if is_concrete(self.blocks):
            _check(np.asarray(self.blocks), num_blocks)


def _check(blocks: np.ndarray, num_blocks: int | None = None) -> None:
    writer: dict[int, int] = {}
    for r, row in enumerate(blocks.tolist()):
        seen = [b for b in row if b >= 0]
        if len(set(seen)) < len(seen):
            repeated = next(b for b in seen if seen.count(b) > 1)
            raise ValueError(f"row {r} lists block {repeated} twice: {seen}; list every block once")
        if num_blocks is not None and (unknown := [b for b in seen if b >= num_blocks]):
            raise ValueError(
                f"row {r} lists block {unknown[0]}, but the cache has blocks 0 to {num_blocks - 1}"
            )
        if seen and seen[-1] in writer:
            raise ValueError(
                f"rows {writer[seen[-1]]} and {r} both write block {seen[-1]}, the last block each "
                "lists; give every row a last block of its own"
            )
        if seen:
            writer[seen[-1]] = r


def is_concrete(*arrays: int | Shaped[Array | np.ndarray, "..."]) -> bool:
    """True if no array is being traced, so that all values can be read."""
    return not any(isinstance(a, Tracer) for a in arrays)


def bucket(number: int) -> int:
    """The smallest power of two that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
