"""Products of rows with a quantised matrix, in a kernel that JAX lowers through Triton: for NVIDIA
GPUs from Ampere on.

XLA writes a matrix's dequantised numbers to memory before it multiplies. Here codes are read as
they are kept, and become numbers in registers. A program multiplies a block of rows with a tile of
outputs, over all inputs, or for few rows over a piece of them, so that all multiprocessors have
work.

Codes of int8, int4 and FP8 are exact in the rows' dtype. Where a group of inputs has at least 64 of
these, what is multiplied is codes less their zeros, and the sums of a group are scaled, in float32:
nothing of a matrix is rounded.

Axis letters: N rows, O outputs, I inputs, P pieces of the inputs, G groups of inputs that share a
scale, M rows of a block, L outputs of a tile, B bytes of a row of a tile.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from jaxshare.pallas.device import Device, check_triton
from jaxshare.pallas.matrix_codes import (
    MatrixForm,
    group_value,
    halves,
    in_arrays,
    less_zeros,
    numbers,
    scaled,
    supported_device,
)
from jaxshare.quantised import QuantisedTensor

_LEAST_ROWS, _MOST_ROWS = 16, 128
_STORED = 64
"""Bytes of a row of a tile."""
_LEAST_STORED = 32
_LEAST_STEPS, _MOST_PIECES = 8, 16
"""Tiles that a piece of the inputs has at least; pieces at most."""
_WARPS = 12
"""Warps of a multiprocessor whose reads are under way at the same time, where there are outputs
enough."""


def triton_dense_pieces(
    x: Float[Array, "N I"], kernel: QuantisedTensor, dtype: DTypeLike
) -> Float[Array, "P N O"]:
    """Products as those of `jaxshare.pallas.dense_products.gpu_dense_pieces`.

    Raises:
      NotImplementedError: no such GPU or dtype, arrays that are too large, or a JAX without Triton.
    """
    device = supported_device(x, kernel)
    check_triton()
    outputs, rows = kernel.shape[0], x.shape[0]
    form, arrays = in_arrays(kernel)
    tiles = choose_tiles(rows, outputs, form, kernel.codes.shape[1], device)
    return _products(kernel.ordered(x), form, arrays, tiles, jnp.dtype(dtype), device)


class DenseTiles(NamedTuple):
    """The sizes of a product's tiles: rows, outputs, bytes of a row, tiles of a piece of the inputs,
    pieces, and Triton's numbers."""

    rows: int
    outputs: int
    stored: int
    steps: int
    pieces: int
    num_warps: int
    num_stages: int


def choose_tiles(
    rows: int, outputs: int, form: MatrixForm, stored: int, device: Device
) -> DenseTiles:
    height = min(max(1 << (rows - 1).bit_length(), _LEAST_ROWS), _MOST_ROWS)
    # Each program reads its rows anew, out of the level-2 cache.
    width = 64 if height <= 16 else 128
    of_group = form.group // (1 + form.is_packed)
    step = next((n for n in (_STORED, _LEAST_STORED) if of_group % n == 0), _STORED)
    steps = -(-stored // step)
    programs, warps = -(-rows // height) * -(-outputs // width), width // 16
    pieces = 1
    while (
        programs * pieces * warps < _WARPS * device.multiprocessors
        and pieces < _MOST_PIECES
        and steps >= 2 * pieces * _LEAST_STEPS
    ):
        pieces *= 2
    return DenseTiles(height, width, step, -(-steps // pieces), pieces, warps, 4)


def _products(
    x: Array,
    form: MatrixForm,
    arrays: list[Array],
    tiles: DenseTiles,
    dtype: jnp.dtype,
    device: Device,
) -> Float[Array, "P N O"]:
    """The products with pieces: a single one of this dtype, or several in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    rows, outputs = x.shape[0], arrays[0].shape[0]
    blocks = (-(-outputs // tiles.outputs), -(-rows // tiles.rows), tiles.pieces)
    # The interpreter writes all that a mask leaves out back, so it needs places for that.
    whole = (blocks[1] * tiles.rows, blocks[0] * tiles.outputs)
    shape = whole if device.interpret else (rows, outputs)
    return pl.pallas_call(
        functools.partial(
            _kernel, form=form, tiles=tiles, shape=(rows, outputs), interpret=device.interpret
        ),
        out_shape=jax.ShapeDtypeStruct(
            (tiles.pieces, *shape), dtype if tiles.pieces == 1 else jnp.float32
        ),
        grid=blocks,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=device.interpret,
        name="dense_products",
    )(x, *arrays)[:, :rows, :outputs]


def _kernel(
    x_ref: Any,
    codes_ref: Any,
    *rest: Any,
    form: MatrixForm,
    tiles: DenseTiles,
    shape: tuple[int, int],
    interpret: bool,
) -> None:
    """Computes a tile of results of a piece of the inputs.

    Refs: x [N, I]; codes [O, B']; scales, and zeros and offsets if there are any, [O, G]; out
    [P, N, O], interpreted with whole tiles.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    *group_refs, out_ref = rest
    rows, outputs = shape
    output = pl.program_id(0) * tiles.outputs + jnp.arange(tiles.outputs)
    row = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows)
    piece = pl.program_id(2)
    real = (row < rows)[None]
    program = _TileProgram(
        form,
        tiles,
        plt.load,
        functools.partial(less_zeros, form, dtype=x_ref.dtype, interpret=interpret),
        x_ref,
        codes_ref,
        group_refs,
        row[None],
        real,
        # Beyond the last output it is read once more, and not stored.
        jnp.minimum(output, outputs - 1)[:, None],
        piece * tiles.steps,
    )
    plt.store(
        out_ref.at[piece, row[None], output[:, None]],
        program.sums().astype(out_ref.dtype),
        mask=(output < outputs)[:, None] & real,
    )


class _TileProgram(NamedTuple):
    """One program of the kernel, which goes through its piece of the inputs in steps.

    Attributes:
      form, tiles: of the matrix.
      load: reads arrays in device memory, as Triton's.
      less: codes, and the zeros of their outputs or None, to numbers.
      x_ref, codes_ref, group_refs: the arrays.
      row: those of the block, int32[1, M].
      real: those that there are, bool[1, M].
      output: those of the tile, int32[L, 1].
      first: the number of the first step among those of all pieces.
    """

    form: MatrixForm
    tiles: DenseTiles
    load: Callable[..., Array]
    less: Callable[..., list[Array]]
    x_ref: Any
    codes_ref: Any
    group_refs: Sequence[Any]
    row: Array
    real: Array
    output: Array
    first: Array

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of a group."""
        return self.form.group // (1 + self.form.is_packed)

    @property
    def stored(self) -> int:
        """Bytes of a row of codes."""
        return self.codes_ref.shape[1]

    @property
    def is_whole(self) -> bool:
        """True if no tile is beyond the last input."""
        return self.tiles.pieces * self.tiles.steps * self.tiles.stored == self.stored

    def sums(self) -> Float[Array, "L M"]:
        """The sums over all steps."""
        empty = jnp.zeros((self.tiles.outputs, self.tiles.rows), jnp.float32)
        one_group = self.group_refs[0].shape[1] == 1
        if not self.form.is_exact or not (one_group or self.group_bytes % self.tiles.stored == 0):
            return lax.fori_loop(0, self.tiles.steps, self._add_numbers, empty)
        if not one_group:
            # A step reads what the next one scales by, so that it need not wait for it.
            start = empty, self._of_step(jnp.int32(0))
            return lax.fori_loop(0, self.tiles.steps, self._add_scaled, start)[0]
        scale, *zero = (
            self._of_groups(ref, jnp.zeros((1, 1), jnp.int32)) for ref in self.group_refs
        )

        def add(step: Array, total: Array) -> Array:
            return self._add_codes(self._bytes(step), zero, total)

        return scale * lax.fori_loop(0, self.tiles.steps, add, empty)

    def _of_step(self, step: Array) -> list[Array]:
        """The scale, and the zero if there is one, of the one group that a step is within."""
        at = jnp.minimum(self._bytes(step), self.stored - 1)
        group = jnp.full((1, 1), at // self.group_bytes, jnp.int32)
        return [self._of_groups(ref, group) for ref in self.group_refs]

    def _add_scaled(
        self, step: Array, carried: tuple[Array, list[Array]]
    ) -> tuple[Array, list[Array]]:
        """Adds a step within one group: its own sum times the scale."""
        total, (scale, *zero) = carried
        following = self._of_step(step + 1)
        own = self._add_codes(self._bytes(step), zero, jnp.zeros_like(total))
        return total + scale * own, following

    def _add_codes(self, at: Array, zero: Sequence[Array], total: Array) -> Array:
        """Adds products with codes less their zeros."""
        byte, there = self._places(at)
        matrices = self.less(self._codes(byte, there), zero[0] if zero else None)
        for matrix, column in zip(matrices, self._columns(at, byte), strict=True):
            total += self._product(matrix, column, there)
        return total

    def _add_numbers(self, step: Array, total: Array) -> Array:
        """Adds a step of any form: numbers are scaled and rounded."""
        byte, there = self._places(self._bytes(step))
        for number, column in numbers(self.form, self._codes(byte, there), byte):
            group = (column // self.form.group)[None]
            read = [
                functools.partial(self._of_groups, ref, group, there) for ref in self.group_refs
            ]
            total += self._product(scaled(self.form, number, read), column, there)
        return total

    def _bytes(self, step: Array) -> Array:
        """The first byte of each row in a step."""
        return (self.first + step) * self.tiles.stored

    def _places(self, at: Array) -> tuple[Int[Array, " B"], Bool[Array, " B"] | None]:
        """The bytes of each row in a step, and which of them there are; None for all."""
        byte = at + jnp.arange(self.tiles.stored)
        return byte, None if self.is_whole else byte < self.stored

    def _columns(self, at: Array, byte: Array) -> tuple[Array, ...]:
        """The inputs whose codes are in the bytes of a step; twice where a byte has two."""
        if not self.form.is_packed:
            return (byte,)
        if self.group_bytes % self.tiles.stored:
            return halves(self.form, byte)
        # Within a half of a group: what one number is added to can be read in one piece.
        return tuple(first + jnp.arange(self.tiles.stored) for first in halves(self.form, at))

    def _codes(self, byte: Array, there: Array | None) -> Shaped[Array, "L B"]:
        return self._loaded(self.codes_ref, self.output, byte[None], there)

    def _of_groups(self, ref: Any, group: Array, there: Array | None = None) -> Array:
        found = self._loaded(ref, self.output, group, there)
        return group_value(self.form, found, ref is self.group_refs[0])

    def _loaded(self, ref: Any, row: Array, column: Array, there: Array | None) -> Array:
        if there is None:
            return self.load(ref.at[row, column])
        return self.load(ref.at[row, column], mask=there[None], other=jnp.zeros((), ref.dtype))

    def _product(self, matrix: Array, column: Array, there: Array | None) -> Array:
        mask = self.real if there is None else self.real & there[:, None]
        rows = self.load(self.x_ref.at[self.row, column[:, None]], mask=mask, other=0.0)
        return lax.dot_general(
            matrix.astype(rows.dtype),
            rows,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
