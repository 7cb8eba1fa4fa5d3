"""What an attention layer's decode pass costs on a device, as a linear model. It decides when sharing a block pays (`folding.arrange`).

A block that many rows read together is read once, and costs arithmetic for each of them; a block of a row's own is read by that row
alone (Hydragen section 3). The first wins for long blocks with many rows, the second for short ones with few.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

SHARED_TILE = 512
"""Tokens of a tile that several rows read together."""
PRIVATE_TILE = 128
"""Tokens of a tile that one row reads alone."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Microseconds of one attention layer in a pass that brings one new token a row. A tile that is not full costs as much as a full one.

    Attributes:
      shared_start: once, if any block at all is read together: a loop and a merge more.
      shared_tile: for each tile of a block that is read together, whatever the number of rows.
      shared_token_row: for each token of such a tile and each row that reads it.
      private_row: for each row, before it reads the first tile of its own block.
      private_tile: for each tile of a row's own block.
    """

    shared_start: float
    shared_tile: float
    shared_token_row: float
    private_row: float
    private_tile: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"the cost {field.name} is {value!r}; give it as a number of microseconds, 0 or more")

    def shared[T: (float, np.ndarray)](self, tokens: T, rows: int) -> T:
        """One block of so many tokens that so many rows read together, `shared_start` aside."""
        return -(-tokens // SHARED_TILE) * (self.shared_tile + SHARED_TILE * rows * self.shared_token_row)

    def private[T: (float, np.ndarray)](self, tokens: T) -> T:
        """One row's own block of so many tokens."""
        return self.private_row + -(-tokens // PRIVATE_TILE) * self.private_tile

    def as_json(self) -> dict[str, float]:
        """Plain data: each cost by its name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Costs":
        """The costs that `as_json` made this data from.

        Raises:
          ValueError: the data is no object, a cost is missing or unknown, or is not a finite number of 0 or more.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise ValueError(f"costs are an object with the entries {', '.join(names)}, but this is {data!r}; calibrate again")
        if missing := [name for name in names if name not in data]:
            raise ValueError(f"the costs lack {missing[0]}; calibrate again")
        if unknown := [name for name in data if name not in names]:
            raise ValueError(f"the costs have an entry {unknown[0]!r} that means nothing here; calibrate again")
        return cls(**data)


DEFAULT = Costs(shared_start=71, shared_tile=121, shared_token_row=0.028, private_row=12, private_tile=12)
"""For a device that has not been calibrated: two CPU cores, 8 heads and 4 kv heads of dimension 64 in bfloat16."""
