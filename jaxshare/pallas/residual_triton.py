"""Adds a product to the residual stream and normalises the sum, in one kernel that JAX lowers through
Triton: for NVIDIA GPUs from Ampere on.

A product of few rows is made in pieces of its inputs, so that all multiprocessors have work. XLA adds
the pieces in one kernel, and in another it normalises the sum, since none of its fusions has both
results. Here a program does both for a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.pallas.device import Device

_ENTRIES, _MOST_WARPS = 8, 16
"""Of a row, in each thread; of a program."""


@functools.partial(jax.jit, static_argnames=("eps", "device", "multiplier", "adds_one"))
def add_and_normalise(
    x: Float[Array, "N M"],
    pieces: Float[Array, "P N M"],
    scale: Float[Array, " M"],
    eps: float,
    device: Device,
    *,
    multiplier: float = 1.0,
    adds_one: bool = False,
    after: tuple[Array, ...] = (),
) -> tuple[Float[Array, "N M"], Float[Array, "N M"]]:
    """Returns x plus the sum of pieces, and the RMSNorm of that.

    All is computed in float32. The sum of pieces, their multiple, the sum with x, and the norm
    before it is scaled are rounded to x's dtype, as where each is computed by itself.

    Args:
      x: the residual stream of N tokens.
      pieces: what is added, of x's dtype or float32.
      scale: of the norm.
      eps: is added to the mean of squares.
      device: the GPU, for which `lowers_triton` is true.
      multiplier: the pieces count so many times.
      adds_one: the norm is multiplied by 1 + scale, and rounded after it.
      after: is not read; the kernel waits for it.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    tokens, width = x.shape
    warps = pl.next_power_of_2(width) // (32 * _ENTRIES)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps, multiplier=multiplier, adds_one=adds_one),
        out_shape=(same, same),
        grid=(tokens,),
        compiler_params=plt.CompilerParams(num_warps=min(max(warps, 1), _MOST_WARPS), num_stages=1),
        interpret=device.interpret,
        name="add_and_normalise",
    )(x, pieces, scale, *after)


def _kernel(
    x_ref: Any,
    pieces_ref: Any,
    scale_ref: Any,
    *refs: Any,
    eps: float,
    multiplier: float,
    adds_one: bool,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    sum_ref, normed_ref = refs[-2:]
    row, width, dtype = pl.program_id(0), x_ref.shape[1], x_ref.dtype
    # Triton computes with powers of two.
    columns = jnp.arange(pl.next_power_of_2(width))
    inside = columns < width

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    def entries(ref: Any, *at: Any) -> Array:
        found = plt.load(ref.at[(*at, columns)], mask=inside, other=0.0)
        return found.astype(jnp.float32)

    def store(ref: Any, x: Array) -> None:
        plt.store(ref.at[row, columns], x.astype(dtype), mask=inside)

    pieces = [entries(pieces_ref, piece, row) for piece in range(pieces_ref.shape[0])]
    added = rounded(functools.reduce(jnp.add, pieces))
    added = added if multiplier == 1 else rounded(added * multiplier)
    total = rounded(entries(x_ref, row) + added)
    store(sum_ref, total)
    normed = total * jax.lax.rsqrt(jnp.sum(total * total) / width + eps)
    scale = entries(scale_ref)
    store(normed_ref, normed * (1 + scale) if adds_one else rounded(normed) * rounded(scale))
