"""Roster: the workers of a session, their rows and their blocks, by name and by number."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from jaxshare import Layout
from jaxshare.serving.workers.layouts import MAX_WORKERS, WorkersLayout

_RESERVED = "spare "  # written to files
_BLOCKS = 8
"""The number of blocks of a cache is a multiple of this."""


def reserved_blocks(count: int) -> list[str]:
    """Names of blocks reserved for workers that join later."""
    return [f"{_RESERVED}{i + 1}" for i in range(count)]


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for no workers, and for names that are empty, repeated or of two lines."""
    if isinstance(names, str):
        given = [part.strip() for part in names.split(",")]
        raise ValueError(f"names is {names!r}; give a sequence of names, such as {given}")
    if (
        not names
        or not all(isinstance(name, str) and name.strip() for name in names)
        or len(set(names)) < len(names)
    ):
        raise ValueError(f"workers need names, each its own; got {list(names)}")
    if len(names) > MAX_WORKERS:
        raise ValueError(f"there are {len(names)} workers; a session has at most {MAX_WORKERS}")
    # A line break would let a name write a header of another worker.
    if broken := [name for name in names if name.splitlines() != [name]]:
        raise ValueError(f"the name {broken[0]!r} has a line break; give a name of one line")


@dataclasses.dataclass(frozen=True)
class Roster:
    """Workers, their rows and the blocks. R rows, B blocks.

    Attributes:
      names: of the workers that take part.
      rows: for each row its worker, or None; R of them.
      blocks: names of the cache's blocks; the index is the block's number. B of them.
      layout: the blocks that each worker sees.
    """

    names: tuple[str, ...]
    rows: tuple[str | None, ...]
    blocks: tuple[str, ...]
    layout: WorkersLayout

    @classmethod
    def create(
        cls,
        names: Sequence[str],
        layout: WorkersLayout,
        *,
        max_rows: int,
        small: Collection[str],
    ) -> Self:
        """The first workers of a session.

        Args:
          names: of the workers.
          layout: of them.
          max_rows: R; blocks are reserved for workers that join later.
          small: blocks that are written once, whether the layout has them or not.
        """
        reserved = reserved_blocks(max_rows - len(names))
        # Large blocks come first, so that they are on large tiles. Sessions with a few blocks more
        # or less share programs.
        blocks = sorted(
            dict.fromkeys((*layout.blocks, *reserved, *small)), key=lambda block: block in small
        )
        unused = [f"unused {i + 1}" for i in range(-len(blocks) % _BLOCKS)]
        return cls(tuple(names), (*names, *[None] * len(reserved)), (*blocks, *unused), layout)

    @property
    def reserved(self) -> list[str]:
        """Blocks for workers that join."""
        return [block for block in self.blocks if block.startswith(_RESERVED)]

    def row(self, name: str) -> int:
        """The row of a worker.

        Raises:
          ValueError: no such worker.
        """
        if name not in self.names:
            raise ValueError(
                f"there is no worker {name!r}; the workers are {', '.join(self.names)}"
            )
        return self.rows.index(name)

    def block(self, name: str) -> int:
        """The number of the block that a worker writes."""
        return self.blocks.index(self.layout.written(name))

    def joined(self, name: str, layout: WorkersLayout) -> Self:
        """The roster with one more worker, in the first free row.

        The only block that may be new in the layout is the one that the worker writes.

        Raises:
          ValueError: a layout that does not fit.
        """
        names = (*self.names, name)
        layout.check(names)
        blocks = tuple(
            layout.written(name) if block == self.reserved[0] else block for block in self.blocks
        )
        if new := [block for block in layout.blocks if block not in blocks]:
            raise ValueError(
                f"the layout has a new block {new[0]!r}; a worker that joins brings the block that "
                "it writes and no other"
            )
        return dataclasses.replace(
            self,
            names=names,
            rows=self._with(self.rows.index(None), name),
            blocks=blocks,
            layout=layout,
        )

    def left(self, name: str) -> Self:
        """The roster without a worker, whose block is reserved for another."""
        own = self.layout.written(name)
        reserved = next(b for b in reserved_blocks(len(self.blocks)) if b not in self.blocks)
        return dataclasses.replace(
            self,
            names=tuple(n for n in self.names if n != name),
            rows=self._with(self.row(name), None),
            blocks=tuple(reserved if block == own else block for block in self.blocks),
            layout=self.layout.without(name),
        )

    def _with(self, row: int, name: str | None) -> tuple[str | None, ...]:
        return (*self.rows[:row], name, *self.rows[row + 1 :])

    # By number.

    @property
    def listed(self) -> list[list[int]]:
        """The blocks that each row sees; none for a row without a worker."""
        return [self.numbers(self.layout.sees[name]) if name else [] for name in self.rows]

    @property
    def writes(self) -> list[int]:
        """The block that each row writes; the first for a row without a worker."""
        return [self.block(name) if name else 0 for name in self.rows]

    @property
    def targets(self) -> list[int]:
        """The block that each row's steps move to, or -1."""
        moves = [self.layout.moves.get(name) if name else None for name in self.rows]
        return [self.blocks.index(block) if block else -1 for block in moves]

    @property
    def device_layout(self) -> Layout:
        """The layout on the device."""
        return Layout.from_blocks(self.listed, width=len(self.blocks))

    def numbers(self, blocks: Sequence[str]) -> list[int]:
        """The numbers of blocks.

        Raises:
          ValueError: an unknown block.
        """
        if unknown := [block for block in blocks if block not in self.blocks]:
            raise ValueError(
                f"there is no block {unknown[0]!r}; the blocks are {', '.join(self.blocks)}"
            )
        return [self.blocks.index(block) for block in blocks]

    # As JSON.

    def as_json(self) -> dict[str, Any]:
        """Plain data, which JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The roster that `as_json` has written."""
        return cls(
            tuple(given["names"]),
            tuple(given["rows"]),
            tuple(given["blocks"]),
            WorkersLayout.from_json(given["layout"]),
        )
