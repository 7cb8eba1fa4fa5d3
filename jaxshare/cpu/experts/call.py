"""Products of rows with the matrices of the experts that each was routed to.

A matrix that has rows is read once for all of them; one that has none is not read. XLA's own product
of ragged groups computes all rows with all matrices on a CPU.
"""

import functools
from collections.abc import Sequence

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.experts.few_rows import write_few_rows
from jaxshare.cpu.experts.many_rows import write_many_rows
from jaxshare.cpu.experts.work import Way
from jaxshare.cpu.matrices.many_rows import SIDE
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.lines import serves
from jaxshare.cpu.runtime import register, served_dtypes
from jaxshare.quantised import QuantisedTensor

_MANY, _MANY_QUANTISED = 4, 6
"""Slots an expert, on average over all, from which on the matrix unit is faster, by measurement."""


def cpu_expert_products(
    x: Float[Array, "N in"],
    expert: Int32[Array, "N K"],
    kernels: Sequence[Float[Array, "E out in"] | QuantisedTensor],
    dtype: DTypeLike,
) -> tuple[Float[Array, "N K out"], ...]:
    """x[n] @ kernel[expert[n, k]].T for each kernel, in x's dtype; float32 sums, rounded to `dtype`.

    What a row gets does not depend on the rows beside it, but on how many there are: many rows of
    bfloat16 go through the matrix unit, which sums in another order, and for which the numbers of
    quantised matrices are rounded to bfloat16. Results of slots whose expert is not one of 0 .. E - 1
    are undefined, and take no time.

    Raises:
      NotImplementedError: a dtype without a kernel, or matrices that differ in shape or dtype.
    """
    given, result = served_dtypes(x.dtype, dtype)
    ways = [_way(kernel, x) for kernel in kernels]
    experts, out, width = kernels[0].shape
    if any(each.shape != kernels[0].shape for each in kernels):
        raise NotImplementedError("matrices differ in shape")
    is_served = out >= SIDE and width % 2 == 0 and all(way is None or serves(way) for way in ways)
    on_tiles = given == "bfloat16" and this_machine().features >= AMX and is_served
    least = _MANY_QUANTISED if any(ways) else _MANY
    many = on_tiles and expert.size >= least * experts
    write, kind = (write_many_rows, "many") if many else (write_few_rows, "few")
    names = ".".join(way.name if way else "plain" for way in ways)
    target = register(
        f"experts.{kind}.{names}.{given}.{result}", functools.partial(write, ways, given, result)
    )
    arrays = []
    for way, kernel in zip(ways, kernels, strict=True):
        arrays += way.arrays(kernel) if isinstance(kernel, QuantisedTensor) and way else [kernel]
    shape = jax.ShapeDtypeStruct((*expert.shape, out), result)
    return tuple(jax.ffi.ffi_call(target, [shape] * len(ways))(x, expert, *arrays))


def _way(kernel: Array | QuantisedTensor, x: Array) -> Way:
    if isinstance(kernel, QuantisedTensor):
        if kernel.order is not None:
            raise NotImplementedError("the inputs of experts have an order")
        return Codes.of(kernel)
    if kernel.dtype != x.dtype:
        raise NotImplementedError("rows and matrices differ in dtype")
    return None
