"""The adapters that are loaded beside a model: named places of stacked matrices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxshare.models.adapters.adapter_params import AdapterError, AdapterParams, layer_shapes
from jaxshare.models.adapters.low_rank import LORA_A, LORA_B
from jaxshare.models.config import ModelConfig
from jaxshare.models.tensor_parallel import ShardedDecoder, fit_params, params_on, shard_array

Put = Callable[[dict[str, Any], Any, dict[str, Any]], dict[str, Any]]
"""(stacked matrices, place, those of one adapter) -> stacked matrices."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in its place.

    Attributes:
      name: that requests name it by.
      place: its place, from 1.
      rank: its largest rank.
      base: the name of the model that it was made for, or "".
      digest: see `AdapterParams.digest`.
    """

    name: str
    place: int
    rank: int
    base: str
    digest: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Adapters:
    """Adapters beside a model. A value: adding one returns another, and compiles nothing.

    Attributes:
      arrays: the collection of variables (`jaxshare.models.adapters.low_rank.ADAPTERS`).
      loaded: by name.
      max_adapters, max_rank: that there is room for; the shapes follow from these alone.
      config: of the model as its checkpoint has it, each kv head once.
      mesh: of the model.
    """

    arrays: dict[str, Any]
    loaded: Mapping[str, Adapter]
    max_adapters: int
    max_rank: int
    config: ModelConfig
    mesh: Mesh | None
    _put: Put

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: np.dtype,
        *,
        max_adapters: int,
        max_rank: int,
        module: Any,
    ) -> "Adapters":
        """Places with nothing in them.

        Args:
          config: of the checkpoint.
          dtype: of the matrices.
          max_adapters, max_rank: as described.
          module: of the model, which says how its arrays are placed.

        Raises:
          AdapterError: the model has no layer that adapters can be of.
        """
        if not layer_shapes(config):
            raise AdapterError(
                "the model has no layer that adapters can be of: multi-head latent attention and "
                "experts are not"
            )
        mesh = module.mesh if isinstance(module, ShardedDecoder) else None
        arrays = _stacked_zeros(config, dtype, max_adapters + 1, max_rank, module)
        shardings = None if mesh is None else jax.tree.map(lambda each: each.sharding, arrays)
        made = cls(arrays, {}, max_adapters, max_rank, config, mesh, _putting(shardings))
        # Compiles what adding an adapter takes, and gives the arrays the form that it leaves.
        none = made._matrices(AdapterParams({}))
        return dataclasses.replace(made, arrays=made._put(arrays, np.int32(0), none))

    def named(self, name: str) -> Adapter:
        """Returns an adapter by its name.

        Raises:
          AdapterError: none of this name is loaded.
        """
        if name not in self.loaded:
            known = ", ".join(sorted(self.loaded)) or "none"
            raise AdapterError(f"the adapter {name!r} is not loaded; loaded are: {known}")
        return self.loaded[name]

    def with_adapter(self, name: str, params: AdapterParams, place: int) -> "Adapters":
        """Returns these with an adapter, which was checked, in a place that nothing uses.

        Raises:
          AdapterError: its rank is too large.
        """
        if params.rank > self.max_rank:
            raise AdapterError(
                f"the adapter {name!r} has rank {params.rank}, but there is room for rank "
                f"{self.max_rank}; make the model with a larger max_rank"
            )
        arrays = self._put(self.arrays, np.int32(place), self._matrices(params))
        added = Adapter(name, place, params.rank, params.base, params.digest)
        return dataclasses.replace(self, arrays=arrays, loaded={**self.loaded, name: added})

    def without(self, name: str) -> "Adapters":
        """Returns these without an adapter; its place keeps its matrices until another one takes it."""
        kept = {key: value for key, value in self.loaded.items() if key != self.named(name).name}
        return dataclasses.replace(self, loaded=kept)

    def on_group(self, mesh: Mesh) -> "Adapters":
        """Returns these on some of their devices, which together hold all of them."""
        arrays = params_on(self.arrays, mesh)
        shardings = jax.tree.map(lambda each: each.sharding, arrays)
        return dataclasses.replace(self, arrays=arrays, mesh=mesh, _put=_putting(shardings))

    def _matrices(self, params: AdapterParams) -> dict[str, Any]:
        """The matrices of an adapter on the host, of the largest rank, those that it lacks being 0."""
        found: dict[str, Any] = {}
        for path, (out, width) in layer_shapes(self.config).items():
            layer, module, name = path
            each = params.matrices.get(path)
            dtype = _entry(self.arrays, path)[LORA_A].dtype
            a = np.zeros((self.max_rank, width), np.float32)
            b = np.zeros((out, self.max_rank), np.float32)
            if each is not None:
                a[: each.rank] = np.asarray(each.a, np.float32)
                b[:, : each.rank] = np.asarray(each.b, np.float32) * np.float32(each.scale)
            if self.mesh is not None:
                b = fit_params(b, (*path, LORA_B), self.config, self.mesh)
            matrices = {LORA_A: a.astype(dtype), LORA_B: b.astype(dtype)}
            found.setdefault(layer, {}).setdefault(module, {})[name] = matrices
        return found


def _entry(arrays: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda tree, key: tree[key], path, arrays)


def _stacked_zeros(
    config: ModelConfig, dtype: np.dtype, places: int, rank: int, module: Any
) -> dict[str, Any]:
    """Stacked matrices of zeros, placed as the model's parameters are."""
    arrays: dict[str, Any] = {}
    for path, (out, width) in layer_shapes(module.config).items():
        layer, part, name = path
        shapes = {LORA_A: (places, rank, width), LORA_B: (places, out, rank)}
        arrays.setdefault(layer, {}).setdefault(part, {})[name] = {
            leaf: _zeros(shape, dtype, (*path, leaf), module) for leaf, shape in shapes.items()
        }
    return arrays


def _zeros(shape: tuple[int, ...], dtype: np.dtype, path: tuple[str, ...], module: Any) -> Any:
    if not isinstance(module, ShardedDecoder):
        return jnp.zeros(shape, dtype)
    return shard_array(np.zeros(shape, dtype), module.names(path), module.mesh)


def _putting(shardings: Any) -> Put:
    """What puts an adapter into its place; one program for all places and adapters."""

    def put(whole: dict[str, Any], place: Any, new: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lambda stacked, each: stacked.at[place].set(each), whole, new)

    return jax.jit(put, out_shardings=shardings)
