"""Products of rows with the matrices of their experts, in a kernel that JAX lowers through Triton:
for NVIDIA GPUs from Ampere on.

XLA's own ragged product multiplies all rows with all matrices, and writes these anew in an order of
its own; a loop over blocks of rows starts kernels one by one. Here a product is one kernel, which
reads a matrix only if it has rows. Quantised matrices are read as they are kept: a tile of them
becomes numbers in registers.

Rows stay where they are: choices of an expert are put in order by their numbers alone. A program
multiplies a block of choices of one expert with a tile of its matrix.

Axis letters: N rows, K chosen experts of a row, S = N K choices, E experts, O outputs, I inputs,
G groups of inputs that share a scale, M choices of a block, L outputs of a tile, B bytes of a row
of a tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32

from jaxshare.pallas.device import Device, check_triton
from jaxshare.pallas.matrix_codes import (
    MatrixForm,
    group_value,
    in_arrays,
    numbers,
    scaled,
    supported_device,
)
from jaxshare.quantised import QuantisedTensor

_LEAST_ROWS, _MOST_ROWS = 16, 64
_MOST_COMPARED = 4096
"""Choices up to which each is compared with all others, to put them in order."""


def gpu_expert_products(
    x: Float[Array, "N I"],
    expert: Int[Array, "N K"],
    kernel: Float[Array, "E O I"] | QuantisedTensor,
    dtype: DTypeLike,
) -> Float[Array, "N K O"]:
    """x[n] @ kernel[expert[n, k]].T with float32 sums, rounded to `dtype`.

    Results of choices whose expert is not one of 0 .. E - 1 are undefined. The numbers of a
    quantised kernel are rounded to x's dtype.

    Raises:
      NotImplementedError: no such GPU, dtype or format, arrays that are too large, or a JAX without
        Triton.
    """
    device = supported_device(x, kernel)
    check_triton()
    flat = expert.reshape(-1).astype(jnp.int32)
    x = kernel.ordered(x) if isinstance(kernel, QuantisedTensor) else x
    order, ends = in_order(flat, kernel.shape[0])
    found = _products(x, order, ends, kernel, jnp.dtype(dtype), device)
    return found.reshape(*expert.shape, -1)


def in_order(
    expert: Int32[Array, " S"], experts: int
) -> tuple[Int32[Array, " S"], Int32[Array, " E"]]:
    """Puts choices in the order of their experts, those of no expert last.

    Returns:
      The choices, one expert's in their own order; and for each expert the end of its choices.
    """
    here = (expert >= 0) & (expert < experts)
    key, at = jnp.where(here, expert, experts), jnp.arange(expert.size, dtype=jnp.int32)
    ends = jnp.sum(key <= jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    if expert.size > _MOST_COMPARED:
        return jnp.argsort(key, stable=True).astype(jnp.int32), ends
    # Two sums in place of a sort, which is many kernels.
    before = (key < key[:, None]) | ((key == key[:, None]) & (at < at[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place == at[:, None], at, 0), axis=1, dtype=jnp.int32), ends


class _ExpertTiles(NamedTuple):
    """The sizes of a product's tiles: choices, outputs, bytes of a row, and Triton's numbers."""

    choices: int
    outputs: int
    stored: int
    num_warps: int


def _choose(choices: int, experts: int, outputs: int, packed: bool, device: Device) -> _ExpertTiles:
    mean = -(-choices // experts)
    rows = min(max(1 << (mean - 1).bit_length(), _LEAST_ROWS), _MOST_ROWS)
    # Where few experts have rows, narrow tiles keep all multiprocessors busy.
    active, wanted = min(choices, experts), 4 * device.multiprocessors
    width = next((n for n in (64, 32) if active * -(-outputs // n) >= wanted), 16)
    return _ExpertTiles(
        rows, width, 64 if packed else 128, {64: 4, 32: 2, 16: 1}[width] * (1 + packed)
    )


def _products(
    x: Array,
    order: Array,
    ends: Array,
    kernel: Array | QuantisedTensor,
    dtype: jnp.dtype,
    device: Device,
) -> Float[Array, "S O"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    experts, outputs, _ = kernel.shape
    form, arrays = in_arrays(kernel)
    tiles = _choose(order.size, experts, outputs, form.is_packed, device)
    blocks = order.size // tiles.choices + min(experts, order.size)
    # The interpreter writes all that a mask leaves out back, so it needs places for that.
    spare = tiles.choices if device.interpret else 0
    return pl.pallas_call(
        functools.partial(_kernel, form=form, tiles=tiles, share=order.size // x.shape[0]),
        out_shape=jax.ShapeDtypeStruct((order.size + spare, outputs), dtype),
        grid=(blocks, -(-outputs // tiles.outputs)),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=4),
        interpret=device.interpret,
        name="expert_products",
    )(x, order, ends, *arrays)[: order.size]


def _kernel(
    x_ref: Any,
    order_ref: Any,
    ends_ref: Any,
    codes_ref: Any,
    *rest: Any,
    form: MatrixForm,
    tiles: _ExpertTiles,
    share: int,
) -> None:
    """Computes a tile of results.

    Refs: x [N, I]; order int32[S]; ends int32[E]; codes [E, O, B']; quantised also scales, and
    zeros and offsets if there are any, [E, O, G]; out [S, O], interpreted with M more rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    *group_refs, out_ref = rest
    group, first, end = _own_block(ends_ref, tiles.choices, pl.program_id(0))
    outputs, stored = codes_ref.shape[1:]
    output = pl.program_id(1) * tiles.outputs + jnp.arange(tiles.outputs)

    @pl.when(first < end)
    def _() -> None:
        at = first + jnp.arange(tiles.choices)
        real = at < end
        choice = plt.load(order_ref.at[at], mask=real, other=0)
        row = choice // share
        inside = (output < outputs)[:, None]

        def add(step: Array, total: Array) -> Array:
            byte = step * tiles.stored + jnp.arange(tiles.stored)
            there = byte < stored
            codes = plt.load(
                codes_ref.at[group, output[:, None], byte[None]],
                mask=inside & there[None],
                other=jnp.zeros((), codes_ref.dtype),
            )
            for number, column in numbers(form, codes, byte):

                def of_group(ref: Any, column: Array = column) -> Array:
                    found = plt.load(
                        ref.at[group, output[:, None], (column // form.group)[None]],
                        mask=inside & there[None],
                        other=0,
                    )
                    return group_value(form, found, ref is group_refs[0])

                matrix = scaled(form, number, [functools.partial(of_group, r) for r in group_refs])
                taken = plt.load(
                    x_ref.at[row[None], column[:, None]],
                    mask=there[:, None] & real[None],
                    other=0.0,
                )
                total += lax.dot_general(
                    matrix.astype(x_ref.dtype),
                    taken,
                    (((1,), (0,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
            return total

        empty = jnp.zeros((tiles.outputs, tiles.choices), jnp.float32)
        total = lax.fori_loop(0, -(-stored // tiles.stored), add, empty)
        place = jnp.where(real, choice, order_ref.shape[0] + jnp.arange(tiles.choices))
        plt.store(
            out_ref.at[place[None], output[:, None]],
            total.astype(out_ref.dtype),
            mask=inside & real[None],
        )


def _own_block(ends_ref: Any, choices: int, number: Array) -> tuple[Array, Array, Array]:
    """(the expert of the block with this number, its first choice, the end of the expert's); of a
    number that is too high, no choices."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    experts = ends_ref.shape[0]
    lane = jnp.arange(pl.next_power_of_2(experts))
    there = lane < experts
    end = plt.load(ends_ref.at[lane], mask=there, other=0)
    start = plt.load(ends_ref.at[lane - 1], mask=there & (lane > 0), other=0)
    blocks = jnp.where(there, (end - start + (choices - 1)) // choices, 0)
    after = jnp.cumsum(blocks)
    mine = (after - blocks <= number) & (number < after)

    def own(value: Array) -> Array:
        return jnp.sum(jnp.where(mine, value, 0))

    return own(lane), own(start + (number - after + blocks) * choices), own(end)
