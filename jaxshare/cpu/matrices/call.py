"""Products of rows with matrices, at the rate at which the matrices come from memory.

XLA's own product for few rows reorders each matrix whenever it is read. Here a matrix is read in the
order in which it is stored, once for all rows, and several matrices in one call by all threads.
"""

import functools
from collections.abc import Sequence

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.machine import Machine
from jaxshare.cpu.matrices.few_rows import write_few_rows
from jaxshare.cpu.matrices.many_rows import SIDE, write_many_rows
from jaxshare.cpu.matrices.row_order import MAX_ROWS
from jaxshare.cpu.runtime import register, served_dtypes

_WIDE_VECTORS = 32
"""Registers of vectors that hold the sums of 16 products, and what these are made of."""


def few_rows(dtype: str, machine: Machine) -> int:
    """The rows of this dtype up to which the vector unit is faster than XLA, or the matrix unit, by
    measurement."""
    if machine.features >= AMX or machine.registers < _WIDE_VECTORS:
        return {"bfloat16": 2, "float16": 8, "float32": 16}[dtype]
    return 16 if dtype == "bfloat16" and not machine.dots_bf16 else MAX_ROWS


def cpu_products(
    x: Float[Array, "R in"], kernels: Sequence[Float[Array, "_ in"]], dtype: DTypeLike
) -> tuple[Float[Array, "R _"], ...]:
    """x @ kernel.T for each kernel, in x's dtype; float32 sums, rounded to `dtype`.

    Raises:
      NotImplementedError: no kernel here is faster than XLA's.
    """
    rows, width = x.shape
    given, result = served_dtypes(x.dtype, dtype)
    if any(kernel.dtype != x.dtype for kernel in kernels):
        raise NotImplementedError("rows and matrices differ in dtype")
    if rows <= few_rows(given, this_machine()):
        write, kind = write_few_rows, "few"
    elif given == "bfloat16" and this_machine().features >= AMX and width % 2 == 0:
        if any(kernel.shape[0] < SIDE for kernel in kernels):
            raise NotImplementedError(f"a matrix has less than {SIDE} rows")
        write, kind = write_many_rows, "many"
    else:
        raise NotImplementedError(f"XLA is as fast for {rows} rows of {given}")
    count = len(kernels)
    name = f"products.{kind}.{count}.{given}.{result}"
    target = register(name, functools.partial(write, count, given, result))
    shapes = [jax.ShapeDtypeStruct((rows, kernel.shape[0]), result) for kernel in kernels]
    return tuple(jax.ffi.ffi_call(target, shapes)(x, *kernels))
