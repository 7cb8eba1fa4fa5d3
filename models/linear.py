"""Linear layers, and the products of which they are made.

Axis letters: R rows, T new tokens of a row, M model dim.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from jaxshare import cpu
from jaxshare.cpu import Implementation
from jaxshare.models.adapters.low_rank import RowAdapters, adapted, adapter_of
from jaxshare.models.expert_parallel import TokenShare
from jaxshare.pallas.device import current_device
from jaxshare.quantised import QuantisedTensor
from jaxshare.sharding import Axis, psum

Weight = Float[Array, "..."] | QuantisedTensor
"""The kernel of a product, or a table of embeddings."""

INPUTS = "inputs"
"""The collection in which linear layers keep their inputs where it is mutable."""
_STRIP = 2**20
"""Numbers of a quantised matrix that a CPU dequantises at once, where XLA multiplies."""
_ALIGNED = 16
"""Outputs that are computed at once are a multiple of this."""

_TILE = (64, 128)
_STEP, _LEAST_PIECE, _MOST_PIECES = 32, 128, 16
"""Tokens and outputs of a GPU's product that a multiprocessor makes at once, and inputs at a time;
inputs of a piece of it at least; pieces at most."""
_BACKENDS_OF_GPUS = ("mosaic_gpu", "triton")
"""The backends of attention whose passes use kernels for products too."""


def weight(
    module: nn.Module, name: str, init: Callable[..., Any], shape: tuple[int, ...]
) -> Weight:
    """Returns a module's parameter, which may be quantised.

    Args:
      module: in one of its compact methods.
      name: of the parameter.
      init: makes a plain one, as in `flax.linen.Module.param`.
      shape: of it.

    Raises:
      ValueError: the quantised one that is there has another shape.
    """
    if module.has_variable("params", name):
        found = module.get_variable("params", name)
        if isinstance(found, QuantisedTensor):
            if found.shape != shape:
                path = "/".join((*module.path, name))
                raise ValueError(f"{path} is quantised with shape {found.shape}, not {shape}")
            return found
    return module.param(name, init, shape)


class Linear(nn.Module):
    """x @ kernel.T + bias; kernel [out, in], as checkpoints store it.

    Attributes:
      features: out.
      bias: add one.
      dtype: of the result; default x's.
      axis: the mesh axis whose devices have parts of x and of the kernel's columns; the result is
        their sum.
      implementation: of the product.
      share: the tokens at which this device keeps the sum; None for all.
    """

    features: int
    bias: bool = False
    dtype: jax.typing.DTypeLike | None = None
    axis: Axis | None = None
    implementation: Implementation = "xla"
    share: TokenShare | None = None

    @nn.compact
    def parameters(self, width: int) -> tuple[Weight, Float[Array, " out"] | None]:
        """The kernel for inputs of this width, and the bias if there is one."""
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        kernel = weight(self, "kernel", init, (self.features, width))
        if not self.bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,))

    def __call__(
        self, x: Float[Array, "... in"], adapters: RowAdapters | None = None
    ) -> Float[Array, "..."]:
        (y,) = linears(x, [self], [adapters])
        return y

    def in_pieces(
        self, x: Float[Array, "... in"], adapters: RowAdapters | None, turns: "Turns"
    ) -> Float[Array, "P ... out"]:
        """Returns products whose sum over P is the layer's output: with pieces of the kernel for few
        tokens on a GPU, so that a sum that comes after it can be one with this one.

        Args:
          x, adapters: of the call.
          turns: of the group of tokens that x is.
        """
        kernel, bias = self.parameters(x.shape[-1])
        if bias is not None or adapters is not None or self.share is not None:
            return self(x, adapters)[None]
        keep_inputs(self, "x", x)
        if self.axis is None:
            return _product_in_pieces(x, kernel, self.implementation)
        (y,) = products(x, [kernel], jnp.float32, self.implementation)
        turns.end(y)
        return psum(y, self.axis)[None]


class Turns:
    """The order in which a device computes groups of tokens, so that one is computed while sums of
    the other are sent. By itself XLA would make one product of both groups'.

    Attributes:
      last: products of the group before, for which the next one waits; none where there is a
        single group.
    """

    def __init__(self, groups: int):
        self._is_ordered = groups > 1
        self.last: tuple[Array, ...] = ()

    def apart(self, x: Array) -> Array:
        """Returns what a group's product is computed from, so that XLA does not make it one with
        those of the group before."""
        if self.last:
            x, self.last = lax.optimization_barrier((x, self.last))
        return x

    def end(self, *products: Array) -> None:
        """Takes a group's last products, before they are sent."""
        if self._is_ordered:
            self.last = products


class Embedding(nn.Module):
    """A table [V, M] with the state of each token, which may be quantised.

    Attributes:
      num_embeddings: V.
      features: M.
    """

    num_embeddings: int
    features: int

    @nn.compact
    def table(self) -> Weight:
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        return weight(self, "embedding", init, (self.num_embeddings, self.features))


def keep_inputs(module: nn.Module, name: str, inputs: Any) -> None:
    """Keeps what a module gets in `INPUTS`, where that collection is mutable."""
    if not module.is_initializing():  # when all are
        module.sow(INPUTS, name, inputs)


def dequantised(value: Weight, dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
    """Returns plain numbers, of this dtype or of the weight's own."""
    if isinstance(value, QuantisedTensor):
        return jnp.asarray(value.dequantised(dtype))
    return value if dtype is None else value.astype(dtype)


def linears(
    x: Float[Array, "... in"],
    modules: Sequence[Linear],
    adapters: Sequence[RowAdapters | None] | None = None,
) -> list[Float[Array, "... _"]]:
    """Applies several linear modules of one kind to x, with one call for all of their products where
    there is a kernel for that; what adapters add to each of them included."""
    first = modules[0]
    dtype = first.dtype or x.dtype
    for each in modules:
        keep_inputs(each, "x", x)
    kernels, biases = zip(*(each.parameters(x.shape[-1]) for each in modules), strict=True)
    # Parts on several devices are summed before they are rounded, so that a split model equals the
    # whole one up to the order of the sum.
    exact = jnp.float32 if first.axis else dtype
    found = products(x, kernels, exact, first.implementation)
    if adapters:
        found = [adapted(y, x, each) for y, each in zip(found, adapters, strict=True)]
    total = first.share.summed if first.share else psum
    results = [total(y, first.axis).astype(dtype) for y in found]
    return [y if b is None else y + b.astype(dtype) for y, b in zip(results, biases, strict=True)]


def projections(
    module: nn.Module,
    name: str,
    sizes: Mapping[str, int],
    *,
    bias: bool,
    implementation: Implementation,
) -> Callable[[Float[Array, "... in"]], list[Float[Array, "... _"]]]:
    """Returns what applies a module's linear layers of the same input.

    Args:
      module: whose parameters are those of each part, or packed (`jaxshare.models.packed`).
      name: of the packed layer.
      sizes: the features of each part by its name.
      bias, implementation: see `Linear`.
    """
    adapters = [adapter_of(module, part) for part in sizes]
    if not module.has_variable("params", name):
        parts = [
            Linear(size, bias, implementation=implementation, name=part)
            for part, size in sizes.items()
        ]
        return lambda x: linears(x, parts, adapters)
    whole = Linear(sum(sizes.values()), bias, implementation=implementation, name=name)

    def apply(x: Array) -> list[Array]:
        found = jnp.split(whole(x), [*itertools.accumulate(sizes.values())][:-1], axis=-1)
        return [adapted(y, x, each) for y, each in zip(found, adapters, strict=True)]

    return apply


def products(
    x: Float[Array, "... in"],
    kernels: Sequence[Weight],
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> Sequence[Float[Array, "... _"]]:
    """Returns x @ kernel.T for each kernel, with float32 accumulation, rounded to `dtype`."""
    found = cpu.products(x, kernels, dtype, implementation)
    return found or [_product_on_device(x, each, dtype, implementation) for each in kernels]


def uses_gpu_kernels(implementation: Implementation) -> bool:
    """Returns whether a pass with this `implementation` on the device that is being traced for uses
    kernels of GPUs for its products."""
    return bool(_gpu_backends(implementation))


def _gpu_backends(implementation: Implementation) -> tuple[str, ...]:
    """The backends whose kernels a pass uses for its products, on the device that is being traced
    for. The kernels of Mosaic GPU do not serve all that those of Triton do."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    if current_device() is None:
        return ()
    if names is None or "mosaic_gpu" in names:
        return _BACKENDS_OF_GPUS
    return tuple(name for name in _BACKENDS_OF_GPUS if name in names)


def _product_on_device(
    x: Array, kernel: Weight, dtype: jax.typing.DTypeLike, implementation: Implementation
) -> Array:
    """x @ kernel.T, of a quantised kernel on a GPU without its dequantised numbers in memory where
    that is served."""
    if isinstance(kernel, QuantisedTensor):
        found = _quantised_product(x, kernel, dtype, implementation, in_pieces=False)
        if found is not None:
            return found
    return product(x, kernel).astype(dtype)


def _quantised_product(
    x: Array,
    kernel: QuantisedTensor,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
    *,
    in_pieces: bool,
) -> Float[Array, "..."] | None:
    """x @ kernel.T, or the pieces of it, by the kernels of GPUs; None where none serves it."""
    if not (backends := _gpu_backends(implementation)):
        return None
    from jaxshare.pallas.dense_products import gpu_dense_pieces, gpu_dense_product

    multiply = gpu_dense_pieces if in_pieces else gpu_dense_product
    try:
        found = multiply(x.reshape(-1, x.shape[-1]), kernel, dtype, backends)
    except NotImplementedError:
        return None
    return found.reshape(*found.shape[:-2], *x.shape[:-1], -1)


def _product_in_pieces(
    x: Float[Array, "... in"], kernel: Weight, implementation: Implementation
) -> Float[Array, "P ... out"]:
    """The products with pieces of a kernel on a GPU: a single one in x's dtype, or several in
    float32."""
    if isinstance(kernel, QuantisedTensor):
        found = _quantised_product(x, kernel, x.dtype, implementation, in_pieces=True)
        return product(x, kernel).astype(x.dtype)[None] if found is None else found
    rows = x.reshape(-1, x.shape[-1])
    count = _pieces(len(rows), *kernel.shape)
    if count == 1:
        return product(x, kernel).astype(x.dtype)[None]
    rows, kernel = rows.reshape(len(rows), count, -1), kernel.reshape(len(kernel), count, -1)
    how = (((2,), (2,)), ((1,), (1,)))
    found = lax.dot_general(rows, kernel, how, preferred_element_type=jnp.float32)
    return found.reshape(count, *x.shape[:-1], -1)


def product(x: Float[Array, "... in"], kernel: Weight) -> Float32[Array, "... out"]:
    """Returns x @ kernel.T with float32 accumulation and a float32 result.

    The kernel is read in its stored order, which is fastest for few rows of x, and an embedding
    serves as a head unchanged. A quantised one is rounded to x's dtype first: on a CPU some outputs
    at a time, so that its plain numbers are never all there.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = jnp.concatenate([flat, flat]) if is_doubled(flat.shape[0], x.dtype) else flat
    y = _by_strips(rows, kernel) if isinstance(kernel, QuantisedTensor) else _dot(rows, kernel)
    return y[: flat.shape[0]].reshape(*x.shape[:-1], -1)


def _pieces(tokens: int, outputs: int, inputs: int) -> int:
    """The number of pieces of its inputs in which a GPU makes a product: as many as give each
    multiprocessor work, and none so small that its sum takes longer. XLA splits such products alike,
    and adds the pieces in a kernel of its own."""
    device = current_device()
    if device is None:
        return 1
    tiles, pieces = -(-tokens // _TILE[0]) * -(-outputs // _TILE[1]), 1
    while (
        2 * tiles * pieces < 3 * device.multiprocessors
        and inputs % (2 * pieces * _STEP) == 0
        and inputs >= 2 * pieces * _LEAST_PIECE
        and pieces < _MOST_PIECES
    ):
        pieces *= 2
    return pieces


def is_doubled(rows: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if a product of so many rows is to be one of twice as many. For a single row XLA on the
    CPU converts the whole kernel to float32, and for two it does not; on a GPU one is a launch
    less."""
    return rows == 1 and dtype != jnp.float32 and current_device() is None


def _dot(rows: Float[Array, "R in"], kernel: Weight) -> Float32[Array, "R out"]:
    numbers = dequantised(kernel, rows.dtype)
    return lax.dot_general(
        rows, numbers, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _by_strips(rows: Float[Array, "R in"], kernel: QuantisedTensor) -> Float32[Array, "R out"]:
    """Multiplies with some outputs at a time on a CPU, and elsewhere with all at once."""
    # XLA would dequantise the matrices of all layers first, which need nothing but parameters.
    kernel, rows = lax.optimization_barrier((kernel, rows))
    out, width = kernel.shape
    count = -(-out * width // _STRIP)
    strip = out // count // _ALIGNED * _ALIGNED
    if count == 1 or not strip or jax.default_backend() != "cpu" or current_device() is not None:
        return _dot(rows, kernel)
    rows, kernel = kernel.ordered(rows), dataclasses.replace(kernel, order=None)
    # XLA on a CPU has no slices of 8-bit floats: it would widen all of them first.
    stored = kernel.codes.dtype
    sliced = stored if jnp.issubdtype(stored, jnp.integer) else jnp.uint8
    kernel = dataclasses.replace(kernel, codes=lax.bitcast_convert_type(kernel.codes, sliced))

    def some(start: int | Array, size: int) -> Array:
        part = kernel.map_rows(lambda each: lax.dynamic_slice_in_dim(each, start, size))
        codes = lax.bitcast_convert_type(part.codes, stored)
        return _dot(rows, dataclasses.replace(part, codes=codes))

    def outputs(index: Array) -> Array:
        return some(index * strip, strip)

    found = jnp.moveaxis(lax.map(outputs, jnp.arange(out // strip)), 0, 1)
    parts = [found.reshape(rows.shape[0], -1)]
    if rest := out % strip:
        parts.append(some(out - rest, rest))
    return jnp.concatenate(parts, axis=1)
