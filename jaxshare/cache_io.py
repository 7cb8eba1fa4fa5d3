"""What a cache holds, apart from where it lies: all its tokens behind one another, on whatever
devices. How caches are saved and restored.

A cache of another arrangement takes it: spread over other devices, with kv heads repeated or not,
or in the midst of an engine's memory.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshare import sharding
from jaxshare.arena import ARENA, put, take
from jaxshare.cache import KVCache
from jaxshare.layout import bucket
from jaxshare.sharding import KV, TENSOR, CyclicSharding, on_each

_LEAST = 128
_ARENA, _WINDOW, _NONE = (
    sharding.spec(ARENA),
    sharding.spec((ARENA[0], None, None)),
    PartitionSpec(),
)


def places(runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """int32[N]: where in an arena the tokens of these runs (offset, length) are, one run after the
    other.

    N is a power of two, so that few programs serve any number; -1 stands behind the last.
    """
    found = [np.arange(offset, offset + length, dtype=np.int32) for offset, length in runs]
    tokens = np.concatenate([np.zeros(0, np.int32), *found])
    return np.pad(tokens, (0, padded(len(tokens)) - len(tokens)), constant_values=-1)


def padded(tokens: int) -> int:
    """N for so many tokens."""
    return max(_LEAST, bucket(tokens))


@functools.partial(jax.jit, static_argnames=("mesh", "repeats"))
def read(arena: Array, index: Array | np.ndarray, mesh: Mesh | None, repeats: int = 1) -> Array:
    """What an arena has at these places, 0 where there is none.

    Args:
      arena: [K, tokens, D], of a cache.
      index: from `places`.
      mesh: the cache's.
      repeats: how often the arena has each kv head.

    Returns:
      [K / repeats, N, D]; on a mesh cut along N, so that every device has a part of it.
    """
    stripes = CyclicSharding.over(mesh)

    def local(arena: Array, index: Array) -> Array:
        return take(stripes, ((arena,), ()), index)[0][0]

    found = on_each(local, mesh, in_specs=(_ARENA, _NONE), out_specs=_WINDOW)(
        arena, jnp.asarray(index)
    )[::repeats]
    return (
        found if mesh is None else jax.lax.with_sharding_constraint(found, _lies(found.shape, mesh))
    )


@functools.partial(jax.jit, static_argnames=("mesh", "repeats"), donate_argnames="arena")
def write(
    arena: Array,
    new: Array | np.ndarray,
    index: Array | np.ndarray,
    mesh: Mesh | None,
    repeats: int = 1,
) -> Array:
    """The arena, which is donated, with `new` at these places; arguments as in `read`."""
    stripes = CyclicSharding.over(mesh)

    def local(arena: Array, new: Array, index: Array) -> Array:
        return put(stripes, ((arena,), ()), index, ((new,), ()))[0][0]

    new = jnp.repeat(new, repeats, axis=0)
    return on_each(local, mesh, in_specs=(_ARENA, _WINDOW, _NONE), out_specs=_ARENA)(
        arena, new, jnp.asarray(index)
    )


def like(
    shape: Sequence[int], dtype: np.typing.DTypeLike, mesh: Mesh | None
) -> np.ndarray | jax.ShapeDtypeStruct:
    """What `write` takes on a mesh, for who brings it there: on one device an array of numpy."""
    # What is committed to a device makes programs of its own, so on one device nothing is.
    return (
        np.empty(shape, dtype)
        if mesh is None
        else jax.ShapeDtypeStruct(shape, dtype, sharding=_lies(shape, mesh))
    )


def _lies(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    kv, tensor = mesh.shape[KV], mesh.shape[TENSOR]
    axes = (KV, TENSOR) if shape[1] % (kv * tensor) == 0 else (KV,) if shape[1] % kv == 0 else ()
    return NamedSharding(mesh, PartitionSpec(None, axes) if axes else _NONE)


def filled(
    cache: KVCache,
    index: np.ndarray,
    keys: Sequence[Array | np.ndarray],
    values: Sequence[Array | np.ndarray],
    repeats: int = 1,
) -> KVCache:
    """The cache, whose arenas are donated, with what was read from another one at these places."""

    def written(arenas: Sequence[Array], new: Sequence[Array | np.ndarray]) -> tuple[Array, ...]:
        return tuple(
            write(arena, layer, index, cache.mesh, repeats)
            for arena, layer in zip(arenas, new, strict=True)
        )

    return dataclasses.replace(
        cache, keys=written(cache.keys, keys), values=written(cache.values, values)
    )
