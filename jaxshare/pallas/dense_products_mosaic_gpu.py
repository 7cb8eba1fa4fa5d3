"""Products of rows with a quantised matrix for Hopper GPUs, in Pallas on Mosaic GPU.

A program multiplies a block of rows with a tile of outputs, over all inputs or a piece of them. One
of its warpgroups fetches: tiles of packed codes and of rows, in bulk copies, as many under way as
shared memory holds. The others compute 64 outputs each, transposed: out.T = matrix @ x.T, since
wgmma takes its first operand from registers. So codes become numbers where they are multiplied, and
only the rows are read from shared memory.

What is multiplied is codes less their zeros, exact in the rows' dtype. The sums of a group of inputs
are scaled in float32, so that nothing of a matrix is rounded. A step's scales and zeros are read
while the step before it is computed.

Axis letters: N rows, O outputs, I inputs, P pieces of the inputs, G groups of inputs that share a
scale, W warpgroups that compute, M rows of a block, B bytes of a row of codes in a step, C inputs
that are multiplied at once.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxshare.pallas.codes_mosaic_gpu import wait_for_last
from jaxshare.pallas.device import Device
from jaxshare.pallas.items_mosaic_gpu import WARPGROUP
from jaxshare.pallas.matrix_codes import MatrixForm, halves, in_arrays, supported_device
from jaxshare.pallas.product_tiles import (
    CODES,
    EIGHT,
    ROWS_OF,
    ProductTiles,
    choose_product_tiles,
    group_bytes,
    registers_of,
)
from jaxshare.pallas.registers_mosaic_gpu import less_zeros_in_registers, store
from jaxshare.quantised import QuantisedTensor

INTERPRETER_LACKS = {
    "wgmma whose first operand is in registers": "a plain product, added",
}
"""The operation of this kernel that Mosaic GPU's interpreter lacks, and its replacement when it is
interpreted; others are in `jaxshare.pallas.registers_mosaic_gpu`."""


class _SlotBarriers(NamedTuple):
    """The barriers of slots: full, and free again."""

    full: Any
    free: Any


def mosaic_dense_pieces(
    x: Float[Array, "N I"], kernel: QuantisedTensor, dtype: DTypeLike
) -> Float[Array, "P N O"]:
    """Products as those of `jaxshare.pallas.dense_products.gpu_dense_pieces`.

    Raises:
      NotImplementedError: no such GPU, dtype, format or shape.
    """
    device = supported_device(x, kernel)
    form, arrays = in_arrays(kernel)
    check_served(device, form, kernel)
    rows, outputs = x.shape[0], kernel.shape[0]
    tiles = choose_product_tiles(rows, outputs, form, kernel.codes.shape[1], device)
    return _products(kernel.ordered(x), form, arrays, tiles, jnp.dtype(dtype), device)


def check_served(device: Device, form: MatrixForm, kernel: QuantisedTensor) -> None:
    """Raises NotImplementedError if the kernel does not serve a matrix of this form."""
    if device.capability // 10 != 9:
        # Later GPUs have other matrix instructions in place of wgmma.
        raise NotImplementedError("it runs on GPUs of compute capability 9.0")
    if not form.is_exact or form.has_powers:
        raise NotImplementedError("it takes int4, int8 and fp8, with zeros, without offsets")
    outputs, stored = kernel.codes.shape
    least = min(ROWS_OF) * WARPGROUP
    if outputs % EIGHT or outputs < least or stored % CODES:
        raise NotImplementedError(
            f"it takes a multiple of {EIGHT} outputs, from {least} on, and a multiple of {CODES} "
            "bytes of codes a row"
        )
    if kernel.scales.shape[-1] > 1 and group_bytes(form) % (CODES // 2):
        raise NotImplementedError(f"it takes groups of a multiple of {CODES // 2} bytes")
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        raise NotImplementedError(f"this JAX has no Mosaic GPU: {error}") from error


def _products(
    x: Array,
    form: MatrixForm,
    arrays: list[Array],
    tiles: ProductTiles,
    dtype: jnp.dtype,
    device: Device,
) -> Float[Array, "P N O"]:
    """The products, or where there are several pieces float32 of each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, outputs = x.shape[0], arrays[0].shape[0]
    padded = -(-rows // EIGHT) * EIGHT
    blocks = -(-padded // tiles.rows)
    # One block stores as many rows as there are. Blocks that overlap compute the same twice.
    stored = rows if blocks == 1 else padded
    result = dtype if tiles.pieces == 1 else jnp.dtype(jnp.float32)
    parts = tiles.stored // tiles.width * (1 + form.is_packed)
    found = plgpu.kernel(
        functools.partial(_kernel, plgpu, form, tiles, device.interpret),
        out_type=jax.ShapeDtypeStruct((tiles.pieces, stored, outputs), result),
        scratch_types=[
            plgpu.SMEM(
                (tiles.stages, tiles.outputs, tiles.stored),
                arrays[0].dtype,
                transforms=_transforms(plgpu, CODES, 1),
            ),
            plgpu.SMEM(
                (tiles.stages, parts, tiles.rows, tiles.width),
                x.dtype,
                transforms=_transforms(plgpu, tiles.width, x.dtype.itemsize),
            ),
            plgpu.SMEM((tiles.warpgroups, tiles.chunk, WARPGROUP), result),
            _SlotBarriers(
                full=plgpu.Barrier(num_arrivals=1 + parts, num_barriers=tiles.stages),
                free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
            ),
        ],
        # Programs of one tile of outputs run at the same time: its codes come from memory once.
        grid=(-(-outputs // tiles.outputs), tiles.pieces, blocks),
        grid_names=("tile", "piece", "block"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="dense_products",
        compiler_params=plgpu.CompilerParams(approx_math=False, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if device.interpret else None,
    )(jnp.pad(x, ((0, padded - rows), (0, 0))), *arrays)
    return found[:, :rows]


def _transforms(plgpu: Any, columns: int, itemsize: int) -> tuple[Any, ...]:
    """The tiling and swizzling of shared memory of rows with so many columns."""
    return (
        plgpu.TilingTransform((EIGHT, columns)),
        plgpu.SwizzleTransform(columns * itemsize),
    )


def _kernel(
    plgpu: Any,
    form: MatrixForm,
    tiles: ProductTiles,
    interpret: bool,
    x_ref: Any,
    codes_ref: Any,
    *rest: Any,
) -> None:
    """The kernel of one program. plgpu is Pallas' Mosaic GPU module.

    Refs in device memory: x [rows, I]; codes [O, B']; scales, and zeros if there are any, [O, G];
    out [P, N, O]. In shared memory: codes [slots, 64 W, B], x [slots, parts, M, C], out [W, chunk,
    64].
    """
    *group_refs, out_ref, codes_smem, x_smem, out_smem, barriers = rest
    warpgroup, piece = lax.axis_index("warpgroup"), lax.axis_index("piece")
    # The last tile and the last block end where outputs and rows do.
    output = pl.multiple_of(
        jnp.minimum(lax.axis_index("tile") * tiles.outputs, codes_ref.shape[0] - tiles.outputs),
        EIGHT,
    )
    row = pl.multiple_of(
        jnp.minimum(lax.axis_index("block") * tiles.rows, x_ref.shape[0] - tiles.rows), EIGHT
    )
    fetching, computing = registers_of(tiles.warpgroups)
    first = piece * tiles.steps
    steps = jnp.minimum(tiles.steps, codes_ref.shape[1] // tiles.stored - first)

    @pl.when(warpgroup >= tiles.warpgroups)
    def _fetch() -> None:
        plgpu.set_max_registers(fetching, action="decrease")

        def fetch(step: Array, _: None) -> None:
            slot = lax.rem(step, tiles.stages)
            full = barriers.full.at[slot]

            @pl.when(step >= tiles.stages)
            def _() -> None:
                plgpu.barrier_wait(barriers.free.at[slot])

            at = pl.multiple_of((first + step) * tiles.stored, tiles.stored)
            plgpu.copy_gmem_to_smem(
                codes_ref.at[pl.ds(output, tiles.outputs), pl.ds(at, tiles.stored)],
                codes_smem.at[slot],
                full,
            )
            for part, column in enumerate(_columns(form, tiles, at)):
                plgpu.copy_gmem_to_smem(
                    x_ref.at[
                        pl.ds(row, tiles.rows),
                        pl.ds(pl.multiple_of(column, tiles.width), tiles.width),
                    ],
                    x_smem.at[slot, part],
                    full,
                )

        # Adds nothing; but compilers unroll a loop whose turns they know, beyond these registers.
        turns = steps + (warpgroup - tiles.warpgroups)
        lax.fori_loop(0, turns, fetch, None)
        wait_for_last(plgpu, turns, barriers.free)

    @pl.when(warpgroup < tiles.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(computing, action="increase")
        program = _Multiplier(
            plgpu,
            form,
            tiles,
            interpret,
            codes_ref,
            group_refs,
            codes_smem,
            x_smem,
            barriers,
            output + warpgroup * WARPGROUP,
            warpgroup,
            first,
        )
        total = program.sums(steps)
        _store(plgpu, tiles, total, out_ref, out_smem.at[warpgroup], piece, row, program.output)


def _columns(form: MatrixForm, tiles: ProductTiles, at: Array) -> list[Array]:
    """The first inputs of the parts of a step whose codes begin at byte `at`."""
    starts = (at + i for i in range(0, tiles.stored, tiles.width))
    return [c for byte in starts for c in (halves(form, byte) if form.is_packed else (byte,))]


class _Multiplier(NamedTuple):
    """A warpgroup that computes.

    Attributes:
      plgpu: Pallas' Mosaic GPU module.
      form, tiles, interpret: of the kernel.
      codes_ref, group_refs: in device memory.
      codes_smem, x_smem, barriers: the slots.
      output: the first of its 64 outputs.
      warpgroup: its number.
      first: the number of the first step among those of all pieces.
    """

    plgpu: Any
    form: MatrixForm
    tiles: ProductTiles
    interpret: bool
    codes_ref: Any
    group_refs: list[Any]
    codes_smem: Any
    x_smem: Any
    barriers: Any
    output: Array
    warpgroup: Array
    first: Array

    def sums(self, steps: Array) -> Float[Array, "64 M"]:
        """The sums over all steps."""
        shape = WARPGROUP, self.tiles.rows
        empty = self.plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.plgpu.Layout.WGMMA)
        if self.group_refs[0].shape[1] == 1:
            (scale, *zero) = self._group(0)

            def add(step: Array, total: Array) -> Array:
                return total + self._step(step, [zero])[0]

            return lax.fori_loop(0, steps, add, empty) * self._wide(scale)

        def add_scaled(step: Array, carried: tuple[Array, list[list[Array]]]) -> Any:
            total, groups = carried
            following = self._groups(step + 1)
            own = self._step(step, [zero for _, *zero in groups])
            for (scale, *_), each in zip(groups, own, strict=True):
                total = total + each * self._wide(scale)
            return total, following

        start = empty, self._groups(jnp.int32(0))
        return lax.fori_loop(0, steps, add_scaled, start)[0]

    def _wide(self, x: Array) -> Array:
        return lax.broadcast_in_dim(x, (WARPGROUP, self.tiles.rows), [0])

    def _groups(self, step: Array) -> list[list[Array]]:
        """The scales, and zeros if there are any, of a step; beyond the last one of any."""
        stored, size = self.tiles.stored, group_bytes(self.form)
        number = jnp.minimum(self.first + step, self.codes_ref.shape[1] // stored - 1)
        if size % stored == 0:
            return [self._group(lax.div(number, size // stored))]
        starts = range(0, stored, self.tiles.width)
        if stored % size == 0:
            return [self._group(number * (stored // size) + start // size) for start in starts]
        return [self._group(lax.div(number * stored + start, size)) for start in starts]

    def _group(self, group: Array | int) -> list[Array]:
        rows, layout = pl.ds(self.output, WARPGROUP), self.plgpu.Layout.WGMMA.reduce(1)
        return [
            self.plgpu.load(ref.at[rows, group], layout=layout, optimized=False).astype(jnp.float32)
            for ref in self.group_refs
        ]

    def _step(self, step: Array, zeros: list[list[Array]]) -> list[Float[Array, "64 M"]]:
        """The sums of a step, of as many groups as there are `zeros`."""
        plgpu, tiles = self.plgpu, self.tiles
        slot = lax.rem(step, tiles.stages)
        plgpu.barrier_wait(self.barriers.full.at[slot])
        parts = tiles.stored // tiles.width
        each = parts // len(zeros)

        def operands(start: int, zero: list[Array]) -> Iterator[tuple[Array, Any]]:
            for i in range(start, start + each):
                for part, matrix in enumerate(self._numbers(slot, i, zero)):
                    yield matrix, self.x_smem.at[slot, i * (1 + self.form.is_packed) + part]

        def multiplied(start: int, zero: list[Array]) -> Array:
            if self.interpret:  # INTERPRETER_LACKS
                found = jnp.zeros((WARPGROUP, tiles.rows), jnp.float32)
                for matrix, x in operands(start, zero):
                    found += jnp.dot(matrix, x[...].T, preferred_element_type=jnp.float32)
                return found

            def multiply(ref: Any) -> Array:
                for matrix, x in operands(start, zero):
                    plgpu.wgmma(ref, matrix, x.transpose((1, 0)))
                return ref[...]

            return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP, tiles.rows), jnp.float32))

        found = [multiplied(i * each, zero) for i, zero in enumerate(zeros)]
        plgpu.barrier_arrive(self.barriers.free.at[slot])
        return found

    def _numbers(self, slot: Array, part: int, zero: list[Array]) -> list[Float[Array, "64 C"]]:
        """The numbers of a part of a step."""
        plgpu, width = self.plgpu, self.tiles.width
        start = part * width
        rows = pl.ds(self.warpgroup * WARPGROUP, WARPGROUP)
        codes = plgpu.load(
            self.codes_smem.at[slot, rows, pl.ds(start // CODES * CODES, CODES)],
            layout=plgpu.Layout.WGMMA_UPCAST_2X,
        )
        start %= CODES
        return less_zeros_in_registers(
            plgpu,
            self.form,
            codes[:, start : start + width],
            zero[0] if zero else None,
            self.x_smem.dtype,
            self.interpret,
        )


def _store(
    plgpu: Any,
    tiles: ProductTiles,
    total: Float[Array, "64 M"],
    out_ref: Any,
    out_smem: Any,
    piece: Array,
    row: Array,
    output: Array,
) -> None:
    """Stores the sums of a warpgroup, transposed, some rows after the others."""
    chunk, stored = tiles.chunk, out_ref.shape[1]
    for i in range(0, min(tiles.rows, stored), chunk):
        if i:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = total[:, i : i + chunk].astype(out_smem.dtype)
        part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        store(plgpu, out_smem.transpose((1, 0)), part)
        plgpu.commit_smem()
        rows = min(chunk, stored - i)
        plgpu.copy_smem_to_gmem(
            out_smem.at[pl.ds(0, rows)],
            out_ref.at[piece, pl.ds(row + i, rows), pl.ds(output, WARPGROUP)],
        )
    plgpu.wait_smem_to_gmem(0)
