"""Meshes: how parameters, caches and logits are spread over devices.

A mesh has four axes, by name:

  data    independent groups of rows, each with a cache of its own
  expert  the experts of a mixture; heads, the MLP and the vocabulary as along `tensor`, so that no
          device repeats the work of another
  tensor  heads, the MLP and the vocabulary (Hogwild! appendix B: every device keeps all blocks, of
          some heads)
  kv      the tokens of caches: every device keeps a part of every block, of all its heads, and
          attends to that part for all rows; the devices' results are merged by log-sum-exp

The dimensions of a model's or a cache's arrays are named once, where they are created
(`LogicalAxes`), and `RULES` says which axis of the mesh each name is cut along. A function is
written for one device's parts and says where the devices' results are added; `on_each` runs it on
every device. Inside `on_each`, and under a caller's own `jax.shard_map` over all axes, such
a function runs unchanged.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Integer, Shaped

DATA, EXPERT, TENSOR, KV = "data", "expert", "tensor", "kv"
AXES = (DATA, EXPERT, TENSOR, KV)
Axis = str | tuple[str, ...]
"""An axis of a mesh, or several that are used as one, the first of them outermost."""
MODEL_AXES = (EXPERT, TENSOR)
"""The axes over which devices have parts of one model."""

LogicalAxes = tuple[str | None, ...]
"""The name of each dimension of an array; None for one that is never cut."""

RULES: Mapping[str, Axis] = {
    "heads": MODEL_AXES,
    "kv_heads": MODEL_AXES,
    "mlp": MODEL_AXES,
    "experts": MODEL_AXES,
    "expert_groups": EXPERT,
    "units": TENSOR,
    "vocab": MODEL_AXES,
    "tokens": KV,
}
"""The axis of a mesh along which each named dimension is cut."""

STRIPE = 128
"""Neighbouring tokens of a cache that one device of the kv axis keeps; the next device has the next
stripe, cyclically. So each has as much of every long block as the others, however blocks grow, and
whole tiles."""


def make_mesh(
    *,
    data: int = 1,
    expert: int = 1,
    tensor: int = 1,
    kv: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with the axes `data`, `expert`, `tensor` and `kv`.

    Neighbouring devices share `kv`, then `tensor`: those that communicate most often are closest.

    Args:
      data, expert, tensor, kv: sizes of the axes.
      devices: devices to use, as `jax.devices()` gives them; default the first of all. Where
        several processes run together all are used, because each process must take part.

    Raises:
      ValueError: a size below 1, more devices than there are, or sizes that do not multiply to the
        number of `devices`.
    """
    sizes = dict(zip(AXES, (data, expert, tensor, kv), strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; an axis of a mesh has at least 1 device")
    needed = math.prod(sizes.values())
    named = {name: size for name, size in sizes.items() if name != EXPERT or size > 1}
    shape = " x ".join(f"{name} {size}" for name, size in named.items())
    found = list(jax.devices() if devices is None else devices)
    if needed > len(found):
        here = (
            f"{len(found)} {found[0].platform} device{'s' if len(found) > 1 else ''}"
            if found
            else "none"
        )
        raise ValueError(
            f"a mesh of {shape} needs {needed} devices, but there "
            f"{'are' if len(found) != 1 else 'is'} {here}; make an axis smaller, or run where "
            "there are more (a CPU shows as n devices with JAX_NUM_CPU_DEVICES=n)"
        )
    if needed < len(found) and (devices is not None or jax.process_count() > 1):
        raise ValueError(
            f"a mesh of {shape} has {needed} devices, but {len(found)} are to be used, and every "
            f"one must take part; choose sizes that multiply to {len(found)}"
        )
    return Mesh(np.asarray(found[:needed]).reshape(data, expert, tensor, kv), AXES)


def data_groups(mesh: Mesh) -> list[Mesh]:
    """The mesh of each group of devices along `data`, with the same axes."""
    return [Mesh(mesh.devices[i : i + 1], AXES) for i in range(mesh.shape[DATA])]


def spec(names: LogicalAxes, rules: Mapping[str, Axis] = RULES) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions have these names.

    Raises:
      ValueError: a name without a rule, or two dimensions that would be cut along one axis.
    """
    if unknown := [name for name in names if name is not None and name not in rules]:
        raise ValueError(
            f"there is no rule for the dimension {unknown[0]!r} of {names}; there are rules for "
            f"{', '.join(rules)}"
        )
    axes = [None if name is None else rules[name] for name in names]
    cut = [axis for axis in axes for axis in _each(axis)]
    if twice := [axis for axis in cut if cut.count(axis) > 1]:
        which = " and ".join(
            repr(name) for name, axis in zip(names, axes, strict=True) if twice[0] in _each(axis)
        )
        raise ValueError(
            f"the dimensions {which} of {names} would both be cut along the axis {twice[0]!r} of "
            "the mesh, which can cut an array once; give one of them another rule, or no name"
        )
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def check_shape(
    what: str,
    shape: Sequence[int],
    names: LogicalAxes,
    mesh: Mesh,
    rules: Mapping[str, Axis] = RULES,
) -> None:
    """Raises ValueError where a dimension does not divide over the axis that it is cut along.

    Args:
      what: the array, for the message.
      shape, names: the size and the name of each dimension.
      mesh, rules: what it is cut over, and how.
    """
    for size, axis, name in zip(shape, spec(names, rules), names, strict=False):
        devices = axis_size(mesh, axis)
        if axis is not None and size % devices:
            fits = [n for n in range(1, devices) if size % n == 0]
            used = [each for each in _each(axis) if mesh.shape[each] > 1]
            which = " x ".join(map(repr, used))
            raise ValueError(
                f"{what} has {size} along {name!r}, which does not divide over {devices} devices, "
                f"the mesh's {'axes' if len(used) > 1 else 'axis'} {which}; "
                f"{' x '.join(used)} {' or '.join(map(str, fits[-3:]))} would do"
            )


def sharding(mesh: Mesh, names: LogicalAxes) -> NamedSharding:
    """The sharding of an array whose dimensions have these names."""
    return NamedSharding(mesh, spec(names))


def _each(axis: Axis | None) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def axis_size(mesh: Mesh | None, axis: Axis | None) -> int:
    """The number of devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[each] for each in _each(axis))


def axis_in_use(mesh: Mesh | None, axis: Axis) -> Axis | None:
    """The axis, or those of several that have more than one device, for collectives; None where one
    device has everything."""
    used = tuple(each for each in _each(axis) if axis_size(mesh, each) > 1)
    return used[0] if len(used) == 1 else used or None


def axis_without(axis: Axis | None, other: str) -> Axis | None:
    """The axes that are left of some without one of them; None for none."""
    rest = tuple(each for each in _each(axis) if each != other)
    return rest[0] if len(rest) == 1 else rest or None


def inside() -> bool:
    """True while one device's part of a computation over a mesh is being traced."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def on_each[**P, R](
    function: Callable[P, R], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[P, R]:
    """Maps a function over a mesh: it runs on each device, on its parts of the arguments. Returns
    the function itself without a mesh, and `inside` one.

    Args:
      function: written for one device's parts.
      mesh: the mesh, or None.
      in_specs, out_specs: how arguments and results are cut, as `jax.shard_map` takes them.
    """
    if mesh is None or inside():
        return function
    # check_vma=False: results that are equal on all devices are so because each computes them from
    # equal inputs, which JAX cannot verify through kernels.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )  # pyright: ignore


def psum[T](x: T, axis: Axis | None) -> T:
    """The sum of a pytree of arrays over an axis, or `x` for None."""
    return x if axis is None else lax.psum(x, axis)


def pmax(x: Shaped[Array, "*shape"], axis: Axis | None) -> Shaped[Array, "*shape"]:
    """The largest value over an axis, or `x` for None."""
    return x if axis is None else lax.pmax(x, axis)


def gathered(x: Shaped[Array, "*shape part"], axis: Axis | None) -> Shaped[Array, "*shape whole"]:
    """The parts of the devices of an axis, concatenated along the last dimension, or `x` for
    None."""
    return x if axis is None else lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


@dataclasses.dataclass(frozen=True)
class CyclicSharding:
    """The distribution of an arena's tokens over the kv axis: `STRIPE` at a time, cyclically.
    Without an axis one device has them all.

    A device's tokens of a block are contiguous there and in order, because every device keeps its
    stripes in order.

    Attributes:
      axis: of the mesh, for code that runs on each device; None where one has everything.
      devices: along it.
    """

    axis: str | None = None
    devices: int = 1

    @classmethod
    def over(cls, mesh: Mesh | None) -> "CyclicSharding":
        """The sharding of the tokens of a cache on this mesh."""
        devices = axis_size(mesh, KV)
        return cls(KV if devices > 1 else None, devices)

    @property
    def period(self) -> int:
        """The size that every arena is a multiple of."""
        return STRIPE * self.devices if self.axis else 1

    def local_count(self, index: Integer[Array, "*shape"]) -> Integer[Array, "*shape"]:
        """The number of the arena's tokens before `index` that this device keeps; for a token that
        it keeps, the token's local index."""
        if self.axis is None:
            return index
        return index // self.period * STRIPE + jnp.clip(
            index % self.period - lax.axis_index(self.axis) * STRIPE, 0, STRIPE
        )

    def is_local(self, index: Integer[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """True where this device keeps the token at an index of the arena."""
        if self.axis is None:
            return jnp.ones(index.shape, bool)
        return index // STRIPE % self.devices == lax.axis_index(self.axis)

    def global_index(self, local: Integer[Array, "*shape"]) -> Integer[Array, "*shape"]:
        """The index in the arena of the token that this device keeps at a local index."""
        if self.axis is None:
            return local
        return local // STRIPE * self.period + lax.axis_index(self.axis) * STRIPE + local % STRIPE
