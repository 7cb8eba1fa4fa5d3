"""A model over a mesh of devices: heads, MLP and vocabulary split along `tensor`, the same on all
devices along `kv` and `data`.

The layers are those of one device, of a smaller model: each device runs `Decoder` on its heads, its
part of the MLP and of the vocabulary, and two sums a layer make of them what the whole model
computes (Hogwild! appendix B, "Distributed Inference").
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshare import sharding
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder, Params
from jaxshare.sharding import TENSOR, LogicalAxes, axis_in_use, axis_size, inside, on_each
from jaxshare.trace.attention import TraceBatch

Path = tuple[str, ...]

_KERNELS: Mapping[str, LogicalAxes] = {
    "q": ("heads", None),
    "k": ("kv_heads", None),
    "v": ("kv_heads", None),
    "o": (None, "heads"),
    "gate": ("mlp", None),
    "up": ("mlp", None),
    "down": (None, "mlp"),
    "head": ("vocab", None),
    "embed": ("vocab", None),
}


def logical_axes(path: Path) -> LogicalAxes:
    """What the dimensions of a parameter are called, for example those of ("layers_0", "attention",
    "q", "kernel")."""
    module, leaf = path[-2:]
    names = _KERNELS.get(module, (None, None))
    return names if leaf in ("kernel", "embedding") else names[:1]


@dataclasses.dataclass(frozen=True)
class ShardedDecoder:
    """A `Decoder` over a mesh: called like one, with global arrays, by code that need not know.

    Attributes:
      config: of the whole model as it lies on the mesh (`fit`).
      mesh: with the axes `data`, `tensor` and `kv`.
      implementation: attention backend, which runs on each device unchanged.
    """

    config: ModelConfig
    mesh: Mesh
    implementation: str | tuple[str, ...] | None = None

    def apply(
        self,
        variables: Params,
        tokens: Array,
        count: Array,
        cache: KVCache,
        layout: Layout,
        *,
        method: str | None = None,
        every: bool = False,
    ) -> Any:
        """As `Decoder.apply`, for a pass or with method="attention_share". Logits are cut along the
        vocabulary.

        Raises:
          ValueError: a cache that lies otherwise, or a vocabulary that does not divide within
            somebody else's shard_map.
        """
        if cache.mesh != self.mesh:
            raise ValueError(
                "the cache lies on another mesh than the model; make it with mesh=model.mesh"
            )
        if inside() and axis_in_use(self.mesh, TENSOR) and not self.splits_vocab:
            raise ValueError(
                f"the vocabulary of {self.config.vocab_size} does not divide over "
                f"{axis_size(self.mesh, TENSOR)} devices; under a shard_map of your own it must"
            )
        none = PartitionSpec()
        split = "vocab" if self.splits_vocab else None
        out = (
            none
            if method
            else (sharding.spec((None, None, split) if every else (None, split)), cache.specs)
        )
        run: Callable[..., Any] = functools.partial(
            self._local().apply, method=method, **({} if method else {"every": every})
        )
        return on_each(
            run,
            self.mesh,
            in_specs=(self.specs(variables), none, none, cache.specs, none),
            out_specs=out,
        )(variables, tokens, count, cache, layout)

    def encode(self, variables: Params, batch: TraceBatch, at: Array | None = None) -> Any:
        """As `Decoder.encode`. Logits are cut along the vocabulary, keys and values along their
        heads."""
        none = PartitionSpec()
        heads = (sharding.spec((None, None, "kv_heads")),) * self.config.num_layers
        out = sharding.spec((None, None, "vocab" if self.splits_vocab else None)), heads, heads
        run = functools.partial(self._local().apply, method="encode")
        return on_each(run, self.mesh, in_specs=(self.specs(variables), none, none), out_specs=out)(
            variables, batch, at
        )

    @property
    def splits_vocab(self) -> bool:
        """Whether embedding and head are cut. A vocabulary that does not divide is whole on every
        device."""
        return self.config.vocab_size % axis_size(self.mesh, TENSOR) == 0

    def specs(self, variables: Params) -> Any:
        """How the parameters are cut, in the form of `variables`."""
        return jax.tree.map_with_path(
            lambda path, _: sharding.spec(self.names(tuple(key.key for key in path))), variables
        )

    def names(self, path: Path) -> LogicalAxes:
        """`logical_axes` of a parameter as it lies on this mesh."""
        return tuple(
            None if name == "vocab" and not self.splits_vocab else name
            for name in logical_axes(path)
        )

    def _local(self) -> Decoder:
        """The model that one device runs."""
        c, n = self.config, axis_size(self.mesh, TENSOR)
        local = dataclasses.replace(
            c,
            num_heads=c.num_heads // n,
            num_kv_heads=c.num_kv_heads // n,
            intermediate_size=c.intermediate_size // n,
            vocab_size=c.vocab_size // n if self.splits_vocab else c.vocab_size,
        )
        axis = axis_in_use(self.mesh, TENSOR)
        return Decoder(local, self.implementation, axis, axis if self.splits_vocab else None)


def fit(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The configuration of a model as it lies on a mesh: with fewer kv heads than devices, each is
    repeated, so that every device has the one that its query heads read.

    Raises:
      ValueError: heads or MLP that do not divide over the devices.
    """
    n = axis_size(mesh, TENSOR)
    for what, size in (
        ("query heads", config.num_heads),
        ("kv heads", config.num_kv_heads),
        ("MLP units", config.intermediate_size),
    ):
        repeated = what == "kv heads" and size < n
        if n % size if repeated else size % n:
            fits = [
                m
                for m in range(1, config.num_heads + 1)
                if config.num_heads % m == 0
                and config.intermediate_size % m == 0
                and (config.num_kv_heads % m == 0 or m % config.num_kv_heads == 0)
            ]
            raise ValueError(
                f"the model's {size} {what} do not divide over tensor={n} devices; tensor may be "
                f"{', '.join(map(str, fits))}"
            )
    return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, n))


def repeats(path: Path, config: ModelConfig, mesh: Mesh) -> int:
    """How often a parameter of `config` has each of its heads on a mesh."""
    return fit(config, mesh).num_kv_heads // config.num_kv_heads if path[-2] in ("k", "v") else 1


def fit_params(value: Any, path: Path, config: ModelConfig, mesh: Mesh) -> Any:
    """A parameter of `config` as `fit(config, mesh)` has it, a JAX or numpy array: kv heads
    repeated."""
    times = repeats(path, config, mesh)
    if times == 1:
        return value
    numpy = np if isinstance(value, np.ndarray) else jnp
    heads = value.reshape(config.num_kv_heads, config.head_dim, *value.shape[1:])
    return numpy.repeat(heads, times, axis=0).reshape(-1, *value.shape[1:])


def place(params: Params, config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Parameters of `config`, cut over a mesh."""
    module = ShardedDecoder(fit(config, mesh), mesh)

    def placed(keys: Any, value: Any) -> Array:
        path = tuple(key.key for key in keys)
        return put(fit_params(value, path, config, mesh), module.names(path), mesh)

    return jax.tree.map_with_path(placed, dict(params))


def part_on(params: Params, mesh: Mesh) -> dict[str, Any]:
    """Parameters as they lie on some of their devices, which have all of them. Nothing is
    copied."""
    devices = {*mesh.devices.flat}

    def part(value: Array) -> Array:
        spec = value.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
        there = [shard.data for shard in value.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(
            value.shape, NamedSharding(mesh, spec), there
        )

    return jax.tree.map(part, dict(params))


def put(value: Any, names: LogicalAxes, mesh: Mesh) -> Array:
    """An array cut over a mesh; of one that is on the host each device is given its part alone."""
    where = sharding.sharding(mesh, names)
    if isinstance(value, np.ndarray):
        return jax.make_array_from_callback(value.shape, where, lambda part: value[part])
    return jax.device_put(value, where)
