"""The tokens of a cache, apart from its layout: all of them concatenated, on whatever devices. How
caches are saved and restored.

A cache with another layout can be filled with them: spread over other devices, with kv heads
repeated or not, or inside an engine's arena.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from jaxshare import sharding
from jaxshare.arena import ARENA, put, take
from jaxshare.cache import KVCache
from jaxshare.layout import bucket
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena
from jaxshare.sharding import KV, MODEL_AXES, CyclicSharding, axis_size, on_each

_MIN_LENGTH = 128
_ARENA, _WINDOW, _NONE = (
    sharding.spec(ARENA),
    sharding.spec((ARENA[0], None, None)),
    PartitionSpec(),
)


def token_indices(runs: Sequence[tuple[int, int]]) -> Int32[np.ndarray, " N"]:
    """The arena indices of the tokens of these runs (offset, length), one run after the other.

    N is a power of two, so that few programs serve any number of tokens; -1 after the last.
    """
    parts = [np.arange(offset, offset + length, dtype=np.int32) for offset, length in runs]
    tokens = np.concatenate([np.zeros(0, np.int32), *parts])
    return np.pad(tokens, (0, padded_length(len(tokens)) - len(tokens)), constant_values=-1)


def padded_length(tokens: int) -> int:
    """The N of `token_indices` for a number of tokens."""
    return max(_MIN_LENGTH, bucket(tokens))


@functools.partial(jax.jit, static_argnames=("mesh", "repeats"))
def read(
    arena: Arena,
    index: Int32[Array | np.ndarray, " N"],
    mesh: Mesh | None,
    repeats: int = 1,
) -> Arena:
    """The tokens [heads, N, D] of an arena at these indices, 0 where the index is negative.

    Args:
      arena: of a cache.
      index: from `token_indices`.
      mesh: the cache's.
      repeats: how often the arena has each kv head.

    Returns:
      One of each kv head; on a mesh cut along N, so that every device has a part of it.
    """
    sharded = CyclicSharding.over(mesh)

    def local(arena: Arena, index: Array) -> Arena:
        return take(sharded, ((arena,), ()), index)[0][0]

    tokens = on_each(local, mesh, in_specs=(_ARENA, _NONE), out_specs=_WINDOW)(
        arena, jnp.asarray(index)
    )[::repeats]
    if mesh is None:
        return tokens
    return jax.lax.with_sharding_constraint(tokens, _window_sharding(tokens.shape, mesh))


@functools.partial(jax.jit, static_argnames=("mesh", "repeats"), donate_argnames="arena")
def write(
    arena: Arena,
    new: Arena | np.ndarray,
    index: Int32[Array | np.ndarray, " N"],
    mesh: Mesh | None,
    repeats: int = 1,
) -> Arena:
    """The arena, which is donated, with `new` [heads, N, D] at these indices; arguments as in
    `read`."""
    sharded = CyclicSharding.over(mesh)

    def local(arena: Arena, new: Arena, index: Array) -> Arena:
        return put(sharded, ((arena,), ()), index, ((new,), ()))[0][0]

    new = jax.tree.map(lambda each: jnp.repeat(each, repeats, axis=0), new)
    return on_each(local, mesh, in_specs=(_ARENA, _WINDOW, _NONE), out_specs=_ARENA)(
        arena, new, jnp.asarray(index)
    )


def abstract_like(
    shape: Sequence[int], dtype: np.typing.DTypeLike, mesh: Mesh | None
) -> np.ndarray | jax.ShapeDtypeStruct:
    """The form in which a checkpoint is to be read, so that `write` takes it: on one device an
    array of numpy, else a shape with its sharding."""
    # Arrays that are committed to a device make programs of their own, so on one device none is.
    if mesh is None:
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_window_sharding(shape, mesh))


def _window_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """The sharding of [heads, N, D]: N over as many devices as divide it."""
    for axes in ((KV, *MODEL_AXES), (KV,)):
        if shape[1] % axis_size(mesh, axes) == 0:
            return NamedSharding(mesh, PartitionSpec(None, axes))
    return NamedSharding(mesh, _NONE)


def with_tokens(
    cache: KVCache,
    index: Int32[np.ndarray, " N"],
    keys: Sequence[Any],
    values: Sequence[Any],
    repeats: int = 1,
) -> KVCache:
    """The cache, whose arenas are donated, with tokens [heads, N, _] of another one at these
    indices, in the form of its arenas; arguments as in `read`."""

    def written(arenas: Sequence[Arena], new: Sequence[Any]) -> tuple[Arena, ...]:
        return tuple(
            write(arena, layer, index, cache.mesh, repeats)
            for arena, layer in zip(arenas, new, strict=True)
        )

    return dataclasses.replace(
        cache, keys=written(cache.keys, keys), values=written(cache.values, values)
    )


def array_names(cache: KVCache, kind: str) -> dict[str, Any]:
    """The arrays of a cache's keys or values by their names in files: "keys.0" of the first layer,
    or "keys.0.codes" and "keys.0.scales" where it is quantised."""
    named: dict[str, Any] = {}
    for layer, arena in enumerate(getattr(cache, kind)):
        named |= named_arrays(f"{kind}.{layer}", arena)
    return named


def named_arrays(name: str, arena: Any) -> dict[str, Any]:
    """The arrays of one arena, or of tokens in its form, by their names in files."""
    if isinstance(arena, QuantisedTensor):
        return {f"{name}.codes": arena.codes, f"{name}.scales": arena.scales}
    return {name: arena}


def from_names(cache: KVCache, kind: str, arrays: Mapping[str, Any]) -> list[Any]:
    """Tokens of each layer in the form of the cache's arenas, from arrays by their names."""
    names = list(array_names(cache, kind))
    arenas = getattr(cache, kind)
    return jax.tree.unflatten(jax.tree.structure([*arenas]), [arrays[name] for name in names])
