"""Approximate caches: keys and values as codes of eight bits, with a scale for each token and kv
head.

An arena [K, tokens, D] is then a `QuantisedTensor` with one group a token: codes [K, tokens, D] and
scales float32[K, tokens, 1]. Arrays of both have the same axes, so whatever copies, cuts or spreads
tokens of an arena does so with each of them. Numbers are quantised when they are written, and again
when a key is rotated further; attention multiplies scores and weights by the scales instead of
dequantising keys and values.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from jaxshare.quantised import FORMATS, QuantisedTensor
from jaxshare.rope import rotate

Arena = Array | QuantisedTensor
"""An array, or the codes and scales in its place."""

APPROXIMATIONS = ("int8", "fp8")
"""Formats of the codes of approximate caches; fp8 is e4m3."""

SCALE_BYTES = 4
"""Of a token's scale."""


def check_approximation(name: str, approximate: str | None) -> None:
    """Raises ValueError for a format that caches are not kept in; `name` is of the argument."""
    if approximate is not None and approximate not in APPROXIMATIONS:
        raise ValueError(
            f"{name} is {approximate!r}; a cache is exact (None), or approximates keys and values "
            f"as {' or '.join(APPROXIMATIONS)}"
        )


def empty_arena(
    shape: tuple[int, int, int], dtype: DTypeLike, approximate: str | None, device: Any
) -> Arena:
    """Creates an arena of zeros; one without numbers is a plain array, whatever the format."""
    if approximate is None or not shape[2]:
        return jnp.zeros(shape, dtype, device=device)
    return QuantisedTensor(
        jnp.zeros(shape, FORMATS[approximate].storage, device=device),
        jnp.zeros((*shape[:2], 1), jnp.float32, device=device),
        format=approximate,
        dtype=np.dtype(dtype),
    )


def approximation(arena: Arena) -> str | None:
    """Returns the format of an arena's codes, or None for an exact one."""
    return arena.format if isinstance(arena, QuantisedTensor) else None


def make_finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replaces NaN by 0 and infinities by the largest numbers of the dtype."""
    largest = jnp.finfo(x.dtype).max
    return jnp.where(x == x, lax.clamp(-largest, x, largest), 0)


def as_stored(x: Float[Array, "*shape D"], arena: Arena) -> Arena:
    """Returns finite numbers in the form in which an arena keeps them."""
    x = make_finite(x.astype(arena.dtype))
    if isinstance(arena, QuantisedTensor):
        return _quantised(x, arena.format, arena.dtype)
    return x


def _quantised(x: Float[Array, "*shape D"], format: str, dtype: np.dtype) -> QuantisedTensor:
    """Quantises finite numbers, each to the nearest code, with the scale by which the largest of a
    token's is the format's largest."""
    kind, wide = FORMATS[format], x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / np.float32(kind.largest)
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
    scaled = jnp.clip(wide / scales, -kind.largest, kind.largest)
    codes = (jnp.round(scaled) if format == "int8" else scaled).astype(kind.storage)
    return QuantisedTensor(codes, scales, format=format, dtype=dtype)


def rotated_further(
    tokens: Arena, cos: Float32[Array, "... P"], sin: Float32[Array, "... P"]
) -> Arena:
    """Returns stored keys [..., D] rotated further; those that are not rotated stay bit for bit."""
    if not isinstance(tokens, QuantisedTensor):
        return rotate(tokens, cos, sin)
    turned = make_finite(rotate(tokens.dequantised(jnp.float32), cos, sin))
    still = jnp.all((cos == 1) & (sin == 0))
    return jax.tree.map(
        lambda new, old: jnp.where(still, old, new),
        _quantised(turned, tokens.format, tokens.dtype),
        tokens,
    )


def wide(arena: Arena) -> Float32[Array, "*shape"]:
    """Returns the numbers in float32."""
    if isinstance(arena, QuantisedTensor):
        return arena.dequantised(jnp.float32)
    return arena.astype(jnp.float32)
