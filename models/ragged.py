"""Products of rows with the matrices of their groups: the choice of a kernel, and what XLA computes
where there is none.

For XLA, rows are sorted by group. Its own ragged product multiplies all rows with all matrices, on
CPUs and on GPUs. Here a CPU goes over blocks of rows. On other devices a few rows read their own
matrices alone, and for more XLA's product is used, or that of tokamax where this is installed.

Axis letters: S rows, G groups, B rows of a block; N tokens, K chosen groups of a token.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxshare import cpu
from jaxshare.models.linear import Weight, dequantised, uses_gpu_kernels
from jaxshare.pallas.device import current_device
from jaxshare.quantised import QuantisedTensor

_LEAST_ROWS, _MOST_ROWS = 8, 64
"""Rows of a block: of a power of two between these the one after the mean of a group."""
_FEW = 4
"""Where there are this many times more groups than rows, each row reads its own matrix."""
_BY_LINES = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""Each row with each line of its group's matrix."""


def expert_products(
    x: Float[Array, "N in"],
    expert: Int[Array, "N K"],
    kernels: Sequence[Weight],
    dtype: DTypeLike,
    implementation: cpu.Implementation,
) -> Sequence[Float[Array, "N K out"]] | None:
    """Returns x[n] @ kernel[expert[n, k]].T for each kernel, by a kernel for the device that is
    traced for; None where there is none, or XLA is asked for.

    Results of an expert that is not there are undefined. Not differentiable.
    """
    found = cpu.expert_products(x, expert, kernels, dtype, implementation)
    if found is not None or not uses_gpu_kernels(implementation):
        return found
    many = expert.size > _MOST_ROWS * kernels[0].shape[0]
    if many and _has_tokamax() and not any(isinstance(each, QuantisedTensor) for each in kernels):
        return None
    from jaxshare.pallas.expert_products import gpu_expert_products

    try:
        return [gpu_expert_products(x, expert, kernel, dtype) for kernel in kernels]
    except NotImplementedError:
        return None


def sorted_products(
    x: Float[Array, "S in"], group: Int[Array, " S"], kernel: Weight, dtype: DTypeLike
) -> Float[Array, "S out"]:
    """Returns each row @ kernel[its group].T, of rows in any order, as `ragged_product` does."""
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=kernel.shape[0])
    return ragged_product(x[order], kernel, sizes, dtype)[jnp.argsort(order)]


def ragged_product(
    rows: Float[Array, "S in"],
    kernel: Weight,
    sizes: Int[Array, " G"],
    dtype: DTypeLike,
) -> Float[Array, "S out"]:
    """Returns each row @ kernel[its group].T, with float32 sums, rounded to `dtype`.

    Differentiable in rows and in a plain kernel.

    Args:
      rows: sorted by group; those after the last group bring undefined results.
      kernel: [G, out, in], a matrix for each group.
      sizes: the rows of each group.
      dtype: of the result.
    """
    if isinstance(kernel, QuantisedTensor):
        # One matrix at a time is dequantised, that of a block of rows.
        return _products(rows, kernel, sizes, _dot_dequantised).astype(dtype)
    kernel = kernel.astype(rows.dtype)
    if jax.default_backend() == "cpu" and current_device() is None:
        return _by_blocks(rows, kernel, sizes).astype(dtype)
    if rows.shape[0] * _FEW <= kernel.shape[0]:
        return _row_by_row(rows, kernel, sizes).astype(dtype)
    found = _ragged_dot()(rows, kernel, sizes, _BY_LINES, preferred_element_type=jnp.float32)
    return found.astype(dtype)


def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _ragged_dot() -> Callable[..., Array]:
    """The ragged product of tokamax, an option, or XLA's."""
    if not _has_tokamax():
        return lax.ragged_dot_general
    return importlib.import_module("tokamax").ragged_dot_general


def _row_by_row(rows: Array, kernel: Array, sizes: Array) -> Array:
    """The products as sums, which XLA reads the matrices for where they are; its ragged product
    reads those of all groups."""
    at = jnp.arange(rows.shape[0])
    group = jnp.searchsorted(jnp.cumsum(sizes), at, side="right", method="compare_all")
    taken = kernel[jnp.minimum(group, kernel.shape[0] - 1)].astype(jnp.float32)
    return jnp.sum(taken * rows[:, None].astype(jnp.float32), axis=-1)


@jax.custom_vjp
def _by_blocks(
    rows: Float[Array, "S in"], kernel: Float[Array, "G out in"], sizes: Int[Array, " G"]
) -> Float[Array, "S out"]:
    """The products, block by block: a loop over as many as there are."""
    return _products(rows, kernel, sizes, lambda x, matrix: _dot(x, matrix, 1))


def _products(
    rows: Array, kernel: Weight, sizes: Array, product: Callable[[Array, Any], Array]
) -> Array:
    shape = jax.eval_shape(product, rows, kernel[0]).shape
    block = _block(rows, sizes)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def write(group: Array, start: Array, _: Array, result: Array) -> Array:
        taken = lax.dynamic_slice_in_dim(padded, start, block)
        # Rows after the group's last are overwritten by the next group, which comes later.
        return lax.dynamic_update_slice_in_dim(result, product(taken, kernel[group]), start, 0)

    empty = jnp.zeros((shape[0] + block, *shape[1:]), jnp.float32)
    return _for_blocks(sizes, block, write, empty)[: shape[0]]


def _block(rows: Array, sizes: Array) -> int:
    mean = -(-rows.shape[0] // sizes.shape[0])
    return min(max(1 << (mean - 1).bit_length(), _LEAST_ROWS), _MOST_ROWS)


def _for_blocks(
    sizes: Array, block: int, body: Callable[[Array, Array, Array, Array], Array], start: Array
) -> Array:
    """Carries a value through body(group, its block's first row, end of the group's rows, value)."""
    ends = jnp.cumsum(sizes)
    after = jnp.cumsum((sizes + (block - 1)) // block)  # blocks up to each group's last

    def step(index: Array, value: Array) -> Array:
        group = jnp.searchsorted(after, index, side="right", method="compare_all")
        first = ends[group] - sizes[group]
        before = after[group] - (sizes[group] + (block - 1)) // block
        return body(group, first + (index - before) * block, ends[group], value)

    return lax.fori_loop(0, after[-1], step, start)


def _forward(rows: Array, kernel: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _by_blocks(rows, kernel, sizes), (rows, kernel, sizes)


def _backward(kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    rows, kernel, sizes = kept
    to_rows = _products(gradient.astype(rows.dtype), kernel, sizes, lambda y, m: _dot(y, m, 0))
    block = _block(rows, sizes)
    x, y = (jnp.pad(each, ((0, block), (0, 0))) for each in (rows, gradient))

    def add(group: Array, start: Array, end: Array, total: Array) -> Array:
        taken = start + jnp.arange(block) < end
        part = jnp.where(taken[:, None], lax.dynamic_slice_in_dim(y, start, block), 0)
        return total.at[group].add(part.T @ lax.dynamic_slice_in_dim(x, start, block))

    to_kernel = _for_blocks(sizes, block, add, jnp.zeros(kernel.shape, jnp.float32))
    in_group = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    to_rows = jnp.where(in_group[:, None], to_rows, 0)
    return to_rows.astype(rows.dtype), to_kernel.astype(kernel.dtype), None


def _dot_dequantised(x: Array, matrix: QuantisedTensor) -> Array:
    return _dot(x, dequantised(matrix, x.dtype), 1)


def _dot(x: Array, matrix: Array, axis: int) -> Array:
    return lax.dot_general(
        x, matrix, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


_by_blocks.defvjp(_forward, _backward)
