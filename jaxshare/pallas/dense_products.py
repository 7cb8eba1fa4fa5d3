"""Products of rows with a quantised matrix on NVIDIA GPUs, by the first kernel that serves them.

XLA writes a matrix's dequantised numbers to memory before it multiplies. The kernels read codes as
they are kept.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxshare.pallas.dense_products_mosaic_gpu import mosaic_dense_pieces
from jaxshare.pallas.dense_products_triton import triton_dense_pieces
from jaxshare.quantised import QuantisedTensor

PRODUCTS = {"mosaic_gpu": mosaic_dense_pieces, "triton": triton_dense_pieces}
"""The kernels by the names of the backends of attention, in the order in which they are tried."""


def gpu_dense_product(
    x: Float[Array, "N I"],
    kernel: QuantisedTensor,
    dtype: DTypeLike,
    backends: Sequence[str] = tuple(PRODUCTS),
) -> Float[Array, "N O"]:
    """x @ kernel.T with float32 sums, rounded to `dtype`. Not differentiable.

    Raises:
      NotImplementedError: as `gpu_dense_pieces`.
    """
    pieces = gpu_dense_pieces(x, kernel, dtype, backends)
    return pieces[0] if len(pieces) == 1 else jnp.sum(pieces, axis=0).astype(dtype)


def gpu_dense_pieces(
    x: Float[Array, "N I"],
    kernel: QuantisedTensor,
    dtype: DTypeLike,
    backends: Sequence[str] = tuple(PRODUCTS),
) -> Float[Array, "P N O"]:
    """The products with pieces of the inputs, whose sum is x @ kernel.T: a single one rounded to
    `dtype`, or several in float32.

    Raises:
      NotImplementedError: none of the kernels of these backends serves it; the message has each
        one's reason.
    """
    reasons = []
    for name, product in PRODUCTS.items():
        if name in backends:
            try:
                return product(x, kernel, dtype)
            except NotImplementedError as reason:
                reasons.append(f"{name}: {reason}")
    raise NotImplementedError("; ".join(reasons))
