"""Kernels for CPUs: compiled by LLVM (llvmlite) when they are first needed, called by XLA.

What XLA makes of a pass on a CPU are hundreds of small kernels a layer. Here the products of few
rows, the append to the cache, block attention and truncation are one call each. Where llvmlite is
not installed, or XLA does not take its code, everything runs as XLA compiles it.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jaxshare.pallas.device import current_device
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena
from jaxshare.switches import is_on

Implementation = str | tuple[str, ...] | None
"""An attention backend, several to try in order, or None for the best; "cpu" stands for all kernels
of this folder."""

_VARIABLE = "JAXSHARE_CPU_KERNELS"
_log = logging.getLogger("jaxshare")


@functools.cache
def available() -> bool:
    """Returns whether kernels can be compiled for this machine, and are not turned off.

    The environment variable JAXSHARE_CPU_KERNELS=off turns them off.

    Raises:
      ValueError: it is neither on nor off.
    """
    if not is_on(_VARIABLE):
        return False
    try:
        from jaxshare.cpu.compiled import is_served
    except ImportError:
        return False
    try:
        if not is_served():
            return False
        _try_out()
    except Exception as error:  # of many kinds: of LLVM, of XLA's interface
        _log.warning(
            "warning: the CPU kernels cannot be used (%s: %s); XLA's own are slower",
            type(error).__name__,
            error,
        )
        return False
    return True


def used_for(implementation: Implementation) -> bool:
    """Returns whether a pass with this `implementation` on the device that is being traced for uses
    these kernels."""
    chosen = implementation is None or "cpu" in implementation
    on_cpu = jax.default_backend() == "cpu" and current_device() is None
    return chosen and on_cpu and available()


# Each of these returns None where XLA is to compute it: by the implementation that was asked for, or
# because there is no kernel for what it is given.


def products(
    x: Array,
    kernels: Sequence[Array | QuantisedTensor],
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> Sequence[Array] | None:
    """Multiplies [..., in] as `cpu_products` does its rows, where it is faster than XLA."""

    def multiply() -> Sequence[Array]:
        from jaxshare.cpu.matrices.call import cpu_products
        from jaxshare.cpu.quantised.call import cpu_quantised_products

        rows = x.reshape(-1, x.shape[-1])
        plain = [each.astype(x.dtype) for each in kernels if not isinstance(each, QuantisedTensor)]
        packed = [each for each in kernels if isinstance(each, QuantisedTensor)]
        of_plain = iter(cpu_products(rows, plain, dtype) if plain else ())
        of_packed = iter(cpu_quantised_products(rows, packed, dtype) if packed else ())
        found = [next(of_packed if isinstance(e, QuantisedTensor) else of_plain) for e in kernels]
        return [y.reshape(*x.shape[:-1], -1) for y in found]

    return _served(implementation, multiply)


def expert_products(
    x: Array,
    expert: Array,
    kernels: Sequence[Array | QuantisedTensor],
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> Sequence[Array] | None:
    """Multiplies rows with the matrices of their experts as `cpu_expert_products` does."""

    def multiply() -> Sequence[Array]:
        from jaxshare.cpu.experts.call import cpu_expert_products

        given = [e if isinstance(e, QuantisedTensor) else e.astype(x.dtype) for e in kernels]
        return cpu_expert_products(x, expert, given, dtype)

    return _served(implementation, multiply)


def rms_norm(x: Array, scale: Array, eps: float, implementation: Implementation) -> Array | None:
    """Normalises [..., M] as `cpu_rms_norm` does its rows."""

    def normalise() -> Array:
        from jaxshare.cpu.norm import cpu_rms_norm

        return cpu_rms_norm(x.reshape(-1, x.shape[-1]), scale, eps).reshape(x.shape)

    return _served(implementation, normalise)


def append_tokens(
    keys: Arena, values: Arena, k: Array, v: Array, plan: Any, implementation: Implementation
) -> tuple[Arena, Arena] | None:
    """Appends as `cpu_append` and `cpu_append_codes` do."""

    def append() -> tuple[Arena, Arena]:
        from jaxshare.cpu.append import cpu_append
        from jaxshare.cpu.append_codes import cpu_append_codes

        if isinstance(keys, QuantisedTensor):
            return cpu_append_codes(keys, values, k, v, plan)
        if isinstance(values, QuantisedTensor):
            raise NotImplementedError("values are quantised, and keys are not")
        return cpu_append(keys, values, k, v, plan)

    return _served(implementation, append)


def floor_and_top(scaled: Array, top_k: Array, top_p: Array) -> tuple[Array, Array] | None:
    """Finds thresholds as `cpu_floor_and_top` does."""

    def find() -> tuple[Array, Array]:
        from jaxshare.cpu.truncation import cpu_floor_and_top

        return cpu_floor_and_top(scaled, top_k, top_p)

    return _served(None, find)


def typical(
    scaled: Array, top: Array, floor: Array, typical_p: Array
) -> tuple[Array, Array] | None:
    """Finds bounds as `cpu_typical` does."""

    def find() -> tuple[Array, Array]:
        from jaxshare.cpu.truncation import cpu_typical

        return cpu_typical(scaled, top, floor, typical_p)

    return _served(None, find)


def largest_logits(
    logits: Array, kept_at: Array, k: int
) -> tuple[Array, Array, Array, Array, Array] | None:
    """Finds the largest logits and the masses beside them as `cpu_largest_logits` does."""

    def find() -> tuple[Array, Array, Array, Array, Array]:
        from jaxshare.cpu.compression import cpu_largest_logits

        return cpu_largest_logits(logits, kept_at, k)

    return _served(None, find)


def _served[T](implementation: Implementation, compute: Callable[[], T]) -> T | None:
    if not used_for(implementation):
        return None
    try:
        return compute()
    except NotImplementedError:
        return None


def _try_out() -> None:
    """Raises an error if a small product is not what it should be."""
    import numpy as np

    from jaxshare.cpu.matrices.call import cpu_products

    x, kernel = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = jax.device_put([each.astype(np.float32) for each in (x, kernel)])
        (found,) = cpu_products(arrays[0], arrays[1:], "float32")
    if not np.array_equal(found, x @ kernel.T):
        raise ValueError("a product is wrong")
