"""Products of rows with quantised matrices, which stay packed."""

import functools
from collections.abc import Sequence

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.matrices.call import few_rows
from jaxshare.cpu.matrices.many_rows import SIDE
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.few_rows import write_few_rows
from jaxshare.cpu.quantised.lines import serves
from jaxshare.cpu.quantised.many_rows import write_many_rows
from jaxshare.cpu.quantised.some_rows import write_some_rows
from jaxshare.cpu.runtime import register, served_dtypes
from jaxshare.quantised import QuantisedTensor

FEW = 5
"""Rows up to which dequantising takes longer than it spares, where pairs of bfloat16 are multiplied."""


def cpu_quantised_products(
    x: Float[Array, "R in"], kernels: Sequence[QuantisedTensor], dtype: DTypeLike
) -> list[Float[Array, "R _"]]:
    """x @ kernel.T for each kernel; float32 sums, rounded to `dtype`.

    Few rows are multiplied with the numbers themselves. For many rows of bfloat16 numbers are first
    rounded to it, as `QuantisedTensor.dequantised` does.

    Raises:
      NotImplementedError: no kernel here is faster than XLA's.
    """
    found: list[Array | None] = [None] * len(kernels)
    plain = [i for i, kernel in enumerate(kernels) if kernel.order is None]
    for each in ([plain] if plain else []) + [[i] for i in range(len(kernels)) if i not in plain]:
        some = [kernels[i] for i in each]
        for i, y in zip(each, _products(some[0].ordered(x), some, dtype), strict=True):
            found[i] = y
    return [y for y in found if y is not None]


def _products(x: Array, kernels: Sequence[QuantisedTensor], dtype: DTypeLike) -> Sequence[Array]:
    rows = x.shape[0]
    given, result = served_dtypes(x.dtype, dtype)
    ways = tuple(Codes.of(kernel) for kernel in kernels)
    if rows <= few_rows(given, this_machine()):
        pairs = given == "bfloat16" and rows > FEW and this_machine().dots_bf16
        if pairs and all(map(serves, ways)):
            write, kind = write_some_rows, "some"
        else:
            write, kind = write_few_rows, "few"
    elif given == "bfloat16" and this_machine().features >= AMX:
        if any(kernel.shape[0] < SIDE for kernel in kernels):
            raise NotImplementedError(f"a matrix has less than {SIDE} rows")
        if unserved := [way.group for way in ways if not serves(way)]:
            raise NotImplementedError(f"it has no kernel for groups of {unserved[0]}")
        write, kind = write_many_rows, "many"
    else:
        raise NotImplementedError(f"XLA is as fast for {rows} rows of {given}")
    name = f"quantised.{kind}.{'.'.join(way.name for way in ways)}.{given}.{result}"
    target = register(name, functools.partial(write, ways, given, result))
    shapes = [jax.ShapeDtypeStruct((rows, kernel.shape[0]), result) for kernel in kernels]
    arrays = [a for way, kernel in zip(ways, kernels, strict=True) for a in way.arrays(kernel)]
    return jax.ffi.ffi_call(target, shapes)(x, *arrays)
