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
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32

from jaxshare.pallas.device import Device, current_device
from jaxshare.quantised import QuantisedTensor

_DTYPES = (jnp.bfloat16, jnp.float16)
_MIN_CAPABILITY = 80
_MIN_CAPABILITY_FP8 = 89
_LEAST_ROWS, _MOST_ROWS = 16, 64
_MOST_COMPARED = 4096
"""Choices up to which each is compared with all others, to put them in order."""
_MOST_ELEMENTS = 2**31
"""Of an array: a kernel's indices have 32 bits."""


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
    device = _supported_device(x, kernel)
    flat = expert.reshape(-1).astype(jnp.int32)
    x = kernel.ordered(x) if isinstance(kernel, QuantisedTensor) else x
    order, ends = in_order(flat, kernel.shape[0])
    found = _products(x, order, ends, kernel, jnp.dtype(dtype), device)
    return found.reshape(*expert.shape, -1)


def _supported_device(x: Array, kernel: Array | QuantisedTensor) -> Device:
    """The GPU to run on.

    Raises:
      NotImplementedError: see `gpu_expert_products`.
    """
    device = current_device()
    if device is None or device.capability < _MIN_CAPABILITY:
        raise NotImplementedError("it runs on NVIDIA GPUs from compute capability 8.0")
    if x.dtype not in _DTYPES:
        raise NotImplementedError(f"its rows are bfloat16 or float16; these are {x.dtype}")
    if isinstance(kernel, QuantisedTensor):
        if kernel.format not in _NUMBERS:
            raise NotImplementedError(f"it does not read {kernel.format}")
        if kernel.format == "fp8" and device.capability < _MIN_CAPABILITY_FP8:
            raise NotImplementedError("GPUs convert float8_e4m3fn from compute capability 8.9 on")
    elif kernel.dtype != x.dtype:
        raise NotImplementedError(f"rows are {x.dtype} and matrices {kernel.dtype}")
    if max(leaf.size for leaf in jax.tree.leaves(kernel)) >= _MOST_ELEMENTS:
        raise NotImplementedError("an array has 2 ** 31 elements or more")
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no Triton: {error}") from error
    return device


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


class _Tiles(NamedTuple):
    """The sizes of a product's tiles: choices, outputs, bytes of a row, and Triton's numbers."""

    choices: int
    outputs: int
    stored: int
    num_warps: int


def _choose(choices: int, experts: int, outputs: int, packed: bool, device: Device) -> _Tiles:
    mean = -(-choices // experts)
    rows = min(max(1 << (mean - 1).bit_length(), _LEAST_ROWS), _MOST_ROWS)
    # Where few experts have rows, narrow tiles keep all multiprocessors busy.
    active, wanted = min(choices, experts), 4 * device.multiprocessors
    width = next((n for n in (64, 32) if active * -(-outputs // n) >= wanted), 16)
    return _Tiles(rows, width, 64 if packed else 128, {64: 4, 32: 2, 16: 1}[width] * (1 + packed))


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
    arrays, form = [kernel], _Form(None, 0, 1, False, False, False)
    if isinstance(kernel, QuantisedTensor):
        scales, powers = kernel.scales, kernel.scales.dtype == jnp.float8_e8m0fnu
        if powers:  # which Triton does not have
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
        given = (kernel.codes, scales, kernel.zeros, kernel.offsets)
        arrays = [each for each in given if each is not None]
        form = _Form(
            kernel.format,
            kernel.code_format.middle,
            kernel.group,
            kernel.zeros is not None,
            kernel.offsets is not None,
            powers,
        )
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


class _Form(NamedTuple):
    """The way in which matrices are kept: their format, None for plain ones; what is subtracted
    from all codes; inputs that share a scale; which further arrays there are; and whether scales are
    the exponents of powers of two."""

    format: str | None
    middle: int
    group: int
    has_zeros: bool
    has_offsets: bool
    has_powers: bool

    @property
    def is_packed(self) -> bool:
        return self.format in _FOUR_BITS


def _kernel(
    x_ref: Any,
    order_ref: Any,
    ends_ref: Any,
    codes_ref: Any,
    *rest: Any,
    form: _Form,
    tiles: _Tiles,
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
            for number, column in _numbers(form, codes, byte):

                def of_group(ref: Any, column: Array = column) -> Array:
                    found = plt.load(
                        ref.at[group, output[:, None], (column // form.group)[None]],
                        mask=inside & there[None],
                        other=0,
                    )
                    if form.has_powers and ref is group_refs[0]:
                        # The exponent's bits of a float32; the smallest power is less than these.
                        bits = found.astype(jnp.int32) << 23
                        return lax.bitcast_convert_type(bits, jnp.float32)
                    return found.astype(jnp.float32)

                matrix = _scaled(form, number, [functools.partial(of_group, r) for r in group_refs])
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


def _scaled(form: _Form, number: Array, of_group: list[Callable[[], Array]]) -> Array:
    """The numbers of a matrix, of those that its codes stand for."""
    if form.format is None:
        return number
    scale, *more = of_group
    number = number.astype(jnp.float32)
    if form.has_zeros:
        number = number - more.pop(0)()
    elif form.middle:
        number = number - form.middle
    number = number * scale()
    return number - more.pop(0)() if form.has_offsets else number


def _numbers(form: _Form, codes: Array, byte: Array) -> list[tuple[Array, Array]]:
    """The numbers that codes [L, B] stand for, and the input that each column is of; twice where a
    byte has two."""
    if not form.is_packed:
        return [(codes, byte)]
    half = form.group // 2
    low = byte // half * form.group + byte % half
    read, wide = _NUMBERS[form.format or ""], codes.astype(jnp.int32)
    return [(read(wide & 15), low), (read(wide >> 4), low + half)]


def _e2m1(code: Array) -> Array:
    """The numbers of four bits that MXFP4 has: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    # Twice the magnitude is a whole number.
    twice = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = twice.astype(jnp.float32) * 0.5
    return jnp.where(code >= 8, -magnitude, magnitude)


_NUMBERS: dict[str, Callable[[Array], Array]] = {
    "int8": lambda code: code,
    "fp8": lambda code: code,
    "int4": lambda code: code,
    "mxfp4": _e2m1,
}
"""The formats that the kernel reads."""
_FOUR_BITS = frozenset({"int4", "mxfp4"})
