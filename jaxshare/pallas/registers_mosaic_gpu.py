"""Codes of quantised matrices, masks and votes in registers, and the way from registers to memory, in
kernels in Pallas on Mosaic GPU.

A warpgroup's tile of codes becomes numbers in the layout of wgmma's first operand, so that they need
not go back to shared memory. Neighbouring lanes exchange codes, of which a register has four, before
they are widened.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from jaxshare.pallas.matrix_codes import BASE, MatrixForm, e4m3_bytes, nibbles, signed_bytes

INTERPRETER_LACKS = {
    "Mosaic's own operations (inline_mgpu)": "those of jax.numpy and Pallas, with the same results",
}
"""The operation here that Mosaic GPU's interpreter lacks, and its replacement when it is interpreted."""


def store(plgpu: Any, ref: Any, value: Array) -> None:
    """Stores a value whose layout may meet bank conflicts, or in device memory. JAX 0.11 has no name
    for that: there an assignment is one."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def any_of_warp(
    plgpu: Any, flags: Bool[Array, " rows"], layout: Any, interpret: bool
) -> Bool[Array, ""]:
    """True in each warp of a warpgroup that has a true flag; plgpu is Pallas' Mosaic GPU module, and
    `layout` that of the flags. Interpreted it is one answer of all warps."""
    if interpret:  # INTERPRETER_LACKS
        return jnp.any(flags)
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm

    of_warp = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=of_warp)
    def vote(_: Any, given: Any) -> Any:
        word = ir.IntegerType.get_signless(32)

        def number(value: int) -> Any:
            return arith.constant(word, ir.IntegerAttr.get(word, value))

        own = [llvm.extractelement(each, number(0)) for each in given.registers.flat]
        found = nvvm.vote_sync(number(-1), functools.reduce(arith.ori, own), "any")
        return mgpu.FragmentedArray.splat(found, (), is_signed=False)

    return vote(flags)


def wait_for_loads_of_warp(plgpu: Any, interpret: bool) -> None:
    """Waits for a warp's loads from tensor memory, where not all warps of a warpgroup come by: Pallas'
    own wait is one for all of them. plgpu is Pallas' Mosaic GPU module."""
    if interpret:  # INTERPRETER_LACKS
        return plgpu.wait_load_tmem()
    from jaxlib.mlir.dialects import nvvm

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)

    return wait()


def less_zeros_in_registers(
    plgpu: Any,
    form: MatrixForm,
    codes: Shaped[Array, "64 C"],
    zero: Float[Array, " 64"] | None,
    dtype: Any,
    interpret: bool,
) -> list[Float[Array, "64 C"]]:
    """Codes of an exact form less their zeros in `dtype`, bfloat16 or float16; twice where a byte
    has two.

    Args:
      plgpu: Pallas' Mosaic GPU module.
      form: for which `is_exact` holds.
      codes: as they are stored, with the layout WGMMA_UPCAST_2X.
      zero: of each row, with the layout of rows of WGMMA; None for the format's middle.
      dtype: of the result.
      interpret: do without what the interpreter lacks.
    """
    wgmma = plgpu.Layout.WGMMA

    def of_rows(value: Array) -> Array:
        return lax.broadcast_in_dim(value.astype(dtype), codes.shape, [0])

    if interpret:  # INTERPRETER_LACKS
        parts = [codes]
        if form.is_packed:
            wide = codes.astype(jnp.int32)
            parts = [wide & 15, wide >> 4]
        less = jnp.float32(form.middle) if zero is None else zero[:, None]
        return [(part.astype(jnp.float32) - less).astype(dtype) for part in parts]
    name = jnp.dtype(dtype).name
    if form.is_packed:
        base = jnp.float32(BASE[name])
        if zero is None:
            add = jnp.full(codes.shape, -base - form.middle, dtype)
            add = plgpu.layout_cast(add, wgmma)
        else:
            add = of_rows(-zero - base)
        return _widened(plgpu, [nibbles(name, high) for high in (False, True)], codes, add)
    code = signed_bytes(name) if form.format == "int8" else e4m3_bytes(name)
    (found,) = _widened(plgpu, [code], codes, None, dtype)
    return [found if zero is None else found - of_rows(zero)]


def _widened(
    plgpu: Any, programs: list[str], codes: Array, add: Array | None, dtype: Any = None
) -> list[Array]:
    """Runs PTX of four codes, each program over all of them.

    Args:
      plgpu: Pallas' Mosaic GPU module.
      programs: that make two registers, $0 and $1, of one with codes, $2, and where there is `add`
        of two of its registers, $3 and $4.
      codes: with the layout WGMMA_UPCAST_2X.
      add: with the layout WGMMA and the dtype of the results.
      dtype: of the results, where there is no `add`.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    layout = plgpu.Layout.WGMMA
    given = [codes] if add is None else [codes, add]
    dtype = given[-1].dtype if add is not None else dtype
    result = plgpu.ShapeDtypeStruct(codes.shape, dtype, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_2X, layout)[: len(given)],
        return_type=(result,) * len(programs),
    )
    def widen(_: Any, codes: Any, *add: Any) -> tuple[Any, ...]:
        word, byte = (ir.IntegerType.get_signless(n) for n in (32, 8))
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        bytes_ = np.empty_like(codes.registers)
        for at, register in np.ndenumerate(codes.registers):
            bytes_[at] = utils.bitcast(register, ir.VectorType.get((4,), byte))
        exchanged = mgpu.FragmentedArray(
            _registers=bytes_, _layout=codes.layout, _is_signed=True
        ).to_layout(mgpu.WGMMA_LAYOUT)
        results = [np.empty_like(exchanged.registers) for _ in programs]
        for at in np.ndindex(exchanged.registers.shape):
            if at[1] % 2:
                continue
            # Two neighbouring tiles of eight columns come out of one register.
            pair = (at, (at[0], at[1] + 1, *at[2:]))
            halves: list[Any] = [exchanged.registers[each] for each in pair]
            four = utils.vector_concat(halves)
            operands = [utils.bitcast(four, word)]
            operands += [utils.bitcast(a.registers[each], word) for a in add for each in pair]
            constraints = ",".join(["=r", "=r"] + ["r"] * len(operands))
            for program, found in zip(programs, results, strict=True):
                both = llvm.inline_asm(
                    llvm.StructType.get_literal([word, word]), operands, program, constraints
                )
                for i, each in enumerate(pair):
                    one = llvm.extractvalue(word, both, [i])
                    found[each] = utils.bitcast(one, ir.VectorType.get((2,), kind))
        return tuple(
            mgpu.FragmentedArray(_registers=found, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
            for found in results
        )

    return list(widen(*given))


def columns_between(
    plgpu: Any,
    begin: Int[Array, " 64"],
    end: Int[Array, " 64"],
    columns: int,
) -> Bool[Array, "64 columns"]:
    """True from a row's column `begin` to its `end` (exclusive).

    The columns' numbers are constants in the instructions that compare. As an array they are the
    same in every turn of a loop, so a compiler keeps them in registers, one in eight of all there are.
    The interpreter lacks this (inline_mgpu).

    Args:
      plgpu: Pallas' Mosaic GPU module.
      begin, end: with the layout of rows of WGMMA.
      columns: of the result, whose layout is WGMMA.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    wgmma = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(wgmma.reduce(1), wgmma.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.bool_, layout=wgmma),
    )
    def between(_: Any, begin: Any, end: Any) -> Any:
        word, flag = (ir.IntegerType.get_signless(n) for n in (32, 1))

        def number(value: int) -> Any:
            return arith.constant(word, ir.IntegerAttr.get(word, value))

        # A thread has two neighbouring columns of each eight, in two of its warp's rows. Its lane is
        # asked for here: a compiler would keep what follows from it from the kernel's start on.
        lane = llvm.inline_asm(word, [], "mov.u32 $0, %laneid;", "=r", has_side_effects=True)
        lane = arith.muli(arith.andi(lane, number(3)), number(2))
        begins, ends = (
            [
                arith.subi(llvm.extractelement(each, number(0)), lane)
                for each in bound.registers.flat
            ]
            for bound in (begin, end)
        )
        found = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, columns)), dtype=object)
        for at, (eight, row) in zip(
            np.ndindex(found.shape), np.ndindex(columns // 8, 2), strict=True
        ):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), flag))
            for i in range(2):
                column = number(8 * eight + i)
                seen = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, column, begins[row]),
                    arith.cmpi(arith.CmpIPredicate.slt, column, ends[row]),
                )
                pair = llvm.insertelement(pair, seen, number(i))
            found[at] = pair
        return mgpu.FragmentedArray(_registers=found, _layout=mgpu.WGMMA_LAYOUT, _is_signed=False)

    return between(begin, end)
