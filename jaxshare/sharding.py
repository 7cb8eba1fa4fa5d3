"""Meshes: how parameters, caches and logits lie on many devices.

A mesh has three axes, by name:

  data    independent groups of rows, each with a cache of its own
  tensor  heads, the MLP and the vocabulary (Hogwild! appendix B: every device keeps all blocks, of some heads)
  kv      the tokens of caches: every device keeps a part of every block, of all its heads, and attends to that part for all rows; what the
          devices find is merged by log-sum-exp

What the arrays of a model or a cache have along each dimension is named once, where they are made
(`LogicalAxes`), and `RULES` say which axis of the mesh each name is cut along. What runs on each
device is written for one device and says where the devices' results are added: `on_each` runs it on
the parts. Inside of that, and under a `jax.shard_map` over all three axes that a caller has
written, it runs as it is.
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

DATA, TENSOR, KV = "data", "tensor", "kv"
AXES = (DATA, TENSOR, KV)

LogicalAxes = tuple[str | None, ...]
"""The name of each dimension of an array; None for one that is never cut."""

RULES: Mapping[str, str] = {
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "tokens": KV,
}
"""Along which axis of a mesh each named dimension is cut."""

STRIPE = 128
"""Neighbouring tokens of a cache that one device of the kv axis keeps; the next device has the next
so many, and so on in turn. So each has as much of every long block as the others, however blocks
grow, and whole tiles."""


def make_mesh(
    *, data: int = 1, tensor: int = 1, kv: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes `data`, `tensor` and `kv`. Neighbouring devices share `kv`, then
    `tensor`: what speaks most is closest.

    Args:
      data, tensor, kv: sizes of the axes.
      devices: which, as `jax.devices()` gives them; default the first of all. Where several
        processes run together all are used, because each process must take part.

    Raises:
      ValueError: a size below 1, more devices than there are, or sizes that do not multiply to the
        number of `devices`.
    """
    sizes = dict(zip(AXES, (data, tensor, kv), strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; an axis of a mesh has at least 1 device")
    needed, shape = (
        math.prod(sizes.values()),
        " x ".join(f"{name} {size}" for name, size in sizes.items()),
    )
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
    return Mesh(np.asarray(found[:needed]).reshape(data, tensor, kv), AXES)


def data_groups(mesh: Mesh) -> list[Mesh]:
    """For each place along `data` the mesh of its devices alone, with the same axes."""
    return [Mesh(mesh.devices[i : i + 1], AXES) for i in range(mesh.shape[DATA])]


def spec(names: LogicalAxes, rules: Mapping[str, str] = RULES) -> PartitionSpec:
    """How an array whose dimensions have these names is cut.

    Raises:
      ValueError: a name without a rule, or two dimensions that would be cut along one axis.
    """
    if unknown := [name for name in names if name is not None and name not in rules]:
        raise ValueError(
            f"there is no rule for the dimension {unknown[0]!r} of {names}; there are rules for "
            f"{', '.join(rules)}"
        )
    axes = [None if name is None else rules[name] for name in names]
    cut = [axis for axis in axes if axis is not None]
    if twice := [axis for axis in cut if cut.count(axis) > 1]:
        which = " and ".join(
            repr(name) for name, axis in zip(names, axes, strict=True) if axis == twice[0]
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
    rules: Mapping[str, str] = RULES,
) -> None:
    """Raises ValueError where a dimension does not divide over the axis that it is cut along."""
    for size, axis, name in zip(shape, spec(names, rules), names, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            fits = [n for n in range(1, mesh.shape[axis]) if size % n == 0]
            raise ValueError(
                f"{what} has {size} along {name!r}, which does not divide over {mesh.shape[axis]} "
                f"devices, the mesh's axis {axis!r}; {axis} {' or '.join(map(str, fits[-3:]))} "
                "would do"
            )


def sharding(mesh: Mesh, names: LogicalAxes) -> NamedSharding:
    """Of an array whose dimensions have these names."""
    return NamedSharding(mesh, spec(names))


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[axis]


def axis_in_use(mesh: Mesh | None, axis: str) -> str | None:
    """The axis, for collectives over it, or None where one device has all."""
    return axis if axis_size(mesh, axis) > 1 else None


def inside() -> bool:
    """Whether what is being traced is one device's part of a computation over a mesh."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def on_each[**P, R](
    function: Callable[P, R], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[P, R]:
    """`function` over a mesh: on each device, on its parts of the arguments. The function itself
    without a mesh, and `inside` one.

    Args:
      function: written for one device's parts.
      mesh: whose.
      in_specs, out_specs: how arguments and results are cut, as `jax.shard_map` takes them.
    """
    if mesh is None or inside():
        return function
    # What is the same on all devices is so because it is computed alike from what is the same; JAX
    # could not see that through kernels.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )  # pyright: ignore


def psum(x: Any, axis: str | None) -> Any:
    """The sum over an axis, or `x` for None."""
    return x if axis is None else lax.psum(x, axis)


def pmax(x: Array, axis: str | None) -> Array:
    """The largest over an axis, or `x` for None."""
    return x if axis is None else lax.pmax(x, axis)


def gathered(x: Array, axis: str | None) -> Array:
    """The parts that the devices of an axis have, laid end to end along the last dimension, or `x`
    for None."""
    return x if axis is None else lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


@dataclasses.dataclass(frozen=True)
class CyclicSharding:
    """How the tokens of an arena are dealt out over the kv axis: `STRIPE` at a time, in turn.
    Without an axis one device has them all.

    The tokens of a block that a device keeps lie side by side there, in order, because every device
    keeps its stripes in order.

    Attributes:
      axis: of the mesh, for code that runs on each device; None where one has all.
      devices: along it.
    """

    axis: str | None = None
    devices: int = 1

    @classmethod
    def over(cls, mesh: Mesh | None) -> "CyclicSharding":
        """Those of a mesh."""
        return cls(axis_in_use(mesh, KV), axis_size(mesh, KV))

    @property
    def period(self) -> int:
        """Arenas are whole multiples of it."""
        return STRIPE * self.devices if self.axis else 1

    def held(self, index: Array) -> Array:
        """How many of the arena's tokens before `index` this device keeps; for a token that it
        keeps, where."""
        if self.axis is None:
            return index
        return index // self.period * STRIPE + jnp.clip(
            index % self.period - lax.axis_index(self.axis) * STRIPE, 0, STRIPE
        )

    def mine(self, index: Array) -> Array:
        """bool: whether this device keeps the token at an index of the arena."""
        if self.axis is None:
            return jnp.ones(index.shape, bool)
        return index // STRIPE % self.devices == lax.axis_index(self.axis)

    def index(self, place: Array) -> Array:
        """Where in the arena the token is that this device keeps at a place."""
        if self.axis is None:
            return place
        return place // STRIPE * self.period + lax.axis_index(self.axis) * STRIPE + place % STRIPE
