"""The tiles of products with quantised matrices in the kernel for Hopper GPUs.

Axis letters: W warpgroups that compute, M rows of a block, B bytes of a row of codes in a step, C
inputs that are multiplied at once, P pieces of the inputs.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxshare.pallas.device import Device
from jaxshare.pallas.items_mosaic_gpu import WARPGROUP
from jaxshare.pallas.matrix_codes import MatrixForm

EIGHT = 8
"""Rows of a pattern of swizzling, and the least columns of wgmma."""
CODES = 64
"""Bytes of a row of codes that become numbers at once."""
_SHARED = 220 * 1024
"""Bytes of shared memory for the tiles of a program: most of the 227 KiB that it can have."""
_MOST_STAGES, _LEAST_STAGES = 12, 3
_MOST_PIECES = 16
_CHUNK = 32
"""Rows of the results that a warpgroup stores at once, at most."""
_FILL = 2
"""Steps of the longest kind whose time a program takes before its first and after its last one."""
_FETCHING = 32
"""Registers of a thread that fetches."""
_MEMORY_SLOWER = 1.25
"""Times that device memory is slower than the level-2 cache (benchmarks/roofline.md)."""
_NUMBER, _PRODUCT = 0.7, 0.012
"""Bytes that the level-2 cache gives a multiprocessor, 24 a clock, in the time that it takes for a
number of the matrix, about 3.5 instructions of 128 a clock, and for its product with a row, one of
2,048 a clock."""
ROWS_OF = {4: 64, 3: 64, 2: 128}
"""Rows of a block at most by the number of warpgroups that compute: sums, and numbers of a step, are
in registers, of which few warpgroups have more."""
_ROWS_BESIDE_ZEROS = {4: 24, 3: 64, 2: 128}
_ROWS_OF_SMALL_GROUPS = {4: 24, 3: 48, 2: 96}
"""Those where zeros, or scales of small groups, are in registers too. ptxas spills a few
with many more."""


class ProductTiles(NamedTuple):
    """The sizes of a product's tiles.

    Attributes:
      rows: M.
      warpgroups: W.
      stored: B.
      width: C.
      stages: steps that shared memory holds.
      steps: of a piece of the inputs.
      pieces: P.
    """

    rows: int
    warpgroups: int
    stored: int
    width: int
    stages: int
    steps: int
    pieces: int

    @property
    def outputs(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def chunk(self) -> int:
        """The rows of the results that a warpgroup stores at once."""
        return math.gcd(self.rows, _CHUNK)

    def step_bytes(self, form: MatrixForm) -> tuple[int, int]:
        """The bytes of codes and of rows in a step."""
        inputs = self.stored * (1 + form.is_packed)
        return self.outputs * self.stored, self.rows * inputs * 2


def group_bytes(form: MatrixForm) -> int:
    """The bytes of the codes of a group."""
    return form.group // (1 + form.is_packed)


def choose_product_tiles(
    rows: int, outputs: int, form: MatrixForm, stored: int, device: Device
) -> ProductTiles:
    """Chooses the tiles with which a multiprocessor is done first, in turns of all of them.

    Wide tiles read rows less often, many pieces are work for all multiprocessors, and sums of
    pieces are written and read again. Of those that take the same the longest steps are chosen.
    """
    found = _possible_tiles(rows, outputs, form, stored)
    return min(found, key=lambda tiles: _bytes_in_turns(tiles, rows, outputs, form, device))


def _possible_tiles(
    rows: int, outputs: int, form: MatrixForm, stored: int
) -> Iterator[ProductTiles]:
    padded = -(-rows // EIGHT) * EIGHT
    width = CODES if group_bytes(form) % CODES == 0 else CODES // 2
    rows_of = _ROWS_BESIDE_ZEROS if form.has_zeros else ROWS_OF
    for warpgroups, most in (_ROWS_OF_SMALL_GROUPS if width < CODES else rows_of).items():
        blocks = -(-padded // most)
        height = -(-padded // blocks // EIGHT) * EIGHT
        for step in (2 * CODES, CODES):
            if stored % step or warpgroups * WARPGROUP > outputs:
                continue
            found = ProductTiles(height, warpgroups, step, width, 0, 0, 0)
            free = _SHARED - found.outputs * found.chunk * 4
            stages = min(free // sum(found.step_bytes(form)), _MOST_STAGES)
            for pieces in range(1, _MOST_PIECES + 1):
                own = -(-stored // step // pieces)
                # The last piece has steps, too.
                if stages >= _LEAST_STAGES and (pieces - 1) * own < stored // step:
                    yield found._replace(stages=stages, steps=own, pieces=pieces)


def _bytes_in_turns(
    tiles: ProductTiles, rows: int, outputs: int, form: MatrixForm, device: Device
) -> float:
    """The bytes that a multiprocessor reads from the level-2 cache, or could in the time of what
    takes longer: memory, instructions, products."""
    codes, read = tiles.step_bytes(form)
    programs = -(-rows // tiles.rows) * -(-outputs // tiles.outputs) * tiles.pieces
    turns = -(-programs // device.multiprocessors)
    sums = 2 * tiles.pieces * rows * outputs * 4 if tiles.pieces > 1 else 0
    numbers = codes * (1 + form.is_packed)
    products = numbers * tiles.rows * _PRODUCT
    a_step = max(codes * _MEMORY_SLOWER, codes + read, numbers * _NUMBER, products)
    fill = _FILL * 2 * CODES / tiles.stored
    return turns * (tiles.steps + fill) * a_step + sums / device.multiprocessors


def registers_of(warpgroups: int) -> tuple[int, int]:
    """Registers of a thread that fetches, and of one that computes: those that are left of 65,536,
    in eights."""
    at_launch = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    return _FETCHING, (at_launch * (warpgroups + 1) - _FETCHING) // warpgroups // 8 * 8
