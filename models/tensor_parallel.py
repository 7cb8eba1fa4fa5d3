"""Tensor parallelism: heads, MLP and vocabulary split along the mesh axes `expert` and `tensor`.

Parameters are the same on all devices along `kv` and `data`. Each device runs `Decoder` on its
heads, its part of the MLP and of the vocabulary; two sums a layer give the result of the whole
model (Hogwild! appendix B, "Distributed Inference"). Of layers with experts along `expert` see
`jaxshare.models.expert_parallel`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int, Shaped

from jaxshare import sharding
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models.adapters.low_rank import LORA_A, LORA_B
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder, Params
from jaxshare.models.packed import kv_modules
from jaxshare.quantised import QuantisedTensor, is_quantised
from jaxshare.sharding import (
    EXPERT,
    MODEL_AXES,
    TENSOR,
    LogicalAxes,
    axis_in_use,
    axis_size,
    inside,
    on_each,
)
from jaxshare.trace.attention import TraceBatch

ParamPath = tuple[str, ...]
"""The keys under "params", for example ("layers_0", "attention", "q", "kernel")."""

_KERNELS: Mapping[str, LogicalAxes] = {
    "q": ("heads", None),
    "k": ("kv_heads", None),
    "v": ("kv_heads", None),
    "q_b": ("heads", None),
    "k_b": ("heads", None),
    "v_b": ("heads", None),
    "o": (None, "heads"),
    "gate": ("mlp", None),
    "up": ("mlp", None),
    "down": (None, "mlp"),
    "head": ("vocab", None),
    "embed": ("vocab", None),
    "sinks": ("heads",),
}


def logical_axes(path: ParamPath, config: ModelConfig, mesh: Mesh) -> LogicalAxes:
    """Returns the logical names of a parameter's dimensions in a model on a mesh."""
    *_, parent, module, leaf = "", *path
    if leaf in _KERNELS:
        return _KERNELS[leaf]
    if leaf in (LORA_A, LORA_B):  # of one place after the other
        out, width = _KERNELS[module]
        return (None, None, width) if leaf == LORA_A else (None, out, None)
    if config.qk_norm_whole and module in ("q_norm", "k_norm"):
        module = module[0]
    names = _KERNELS.get(module, (None, None))
    names = names if leaf in ("kernel", "embedding") else names[:1]
    if parent == "shared":
        return tuple("units" if name == "mlp" else name for name in names)
    if parent != "moe" or module not in ("gate", "up", "down"):
        return names
    assert config.moe is not None
    if config.moe.num_experts % axis_size(mesh, MODEL_AXES) == 0:
        return ("experts", *(None for _ in names))
    return ("expert_groups", *("units" if name == "mlp" else name for name in names))


def param_path(keys: Sequence[Any]) -> ParamPath:
    """Returns the path of the parameter that a leaf is, or is an array of."""
    return tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))


def names_of_array(names: LogicalAxes, keys: Sequence[Any], leaf: Any) -> LogicalAxes:
    """Returns the logical names of the dimensions of a leaf of a tree of parameters.

    Args:
      names: of those of the parameter.
      keys: of the leaf, which is the parameter or one of the arrays of a quantised one.
      leaf: anything with a shape.
    """
    last = keys[-1]
    if not isinstance(last, jax.tree_util.GetAttrKey):
        return names
    if last.name == "order":
        return names[-1:]
    # One scale for all inputs of a row is that of each part of them.
    return names if leaf.shape[-1] > 1 else (*names[: leaf.ndim - 1], None)


@dataclasses.dataclass(frozen=True)
class ShardedDecoder:
    """A `Decoder` over a mesh, with the interface of one: global arrays in, global arrays out.

    Attributes:
      config: of the whole model as `fit` gives it for the mesh.
      mesh: with the axes `data`, `expert`, `tensor` and `kv`.
      implementation: attention backend, which runs on each device unchanged.
    """

    config: ModelConfig
    mesh: Mesh
    implementation: str | tuple[str, ...] | None = None

    def apply(
        self,
        variables: Params,
        tokens: Int[Array, "R T"],
        count: Int[Array, " R"],
        cache: KVCache,
        layout: Layout,
        *,
        method: str | None = None,
        every: bool = False,
    ) -> Any:
        """Runs `Decoder.apply` on every device, for a pass or with one of the methods "hidden" and
        "attention_share".

        Returns:
          As `Decoder.__call__`, with logits sharded along the vocabulary, or as the method.

        Raises:
          ValueError: a cache on another mesh, or a vocabulary that does not divide over the devices
            inside a shard_map of the caller.
        """
        if cache.mesh != self.mesh:
            raise ValueError(
                "the cache is on another mesh than the model; create it with mesh=model.mesh"
            )
        if inside() and axis_in_use(self.mesh, MODEL_AXES) and not self.splits_vocab:
            raise ValueError(
                f"the vocabulary of {self.config.vocab_size} does not divide over "
                f"{axis_size(self.mesh, MODEL_AXES)} devices; inside a shard_map of your own it must"
            )
        none = PartitionSpec()
        split = "vocab" if self.splits_vocab else None
        logits = sharding.spec((None, None, split) if every else (None, split))
        out = {None: (logits, cache.specs), "hidden": (none, cache.specs)}.get(method, none)
        run: Callable[..., Any] = functools.partial(
            self._local().apply, method=method, **({} if method else {"every": every})
        )
        return on_each(
            run,
            self.mesh,
            in_specs=(self.specs(variables), none, none, cache.specs, none),
            out_specs=out,
        )(variables, tokens, count, cache, layout)

    def logits(self, variables: Params, hidden: Float[Array, "N M"]) -> Float32[Array, "N V"]:
        """Runs `Decoder.logits` on every device; the result is sharded along the vocabulary."""
        out = sharding.spec((None, "vocab" if self.splits_vocab else None))
        run = functools.partial(self._local().apply, method="logits")
        in_specs = (self.specs(variables), PartitionSpec())
        mapped: Any = on_each(run, self.mesh, in_specs=in_specs, out_specs=out)
        return mapped(variables, hidden)

    def encode(
        self,
        variables: Params,
        batch: TraceBatch,
        at: Int[Array | np.ndarray, "N A"] | None = None,
    ) -> tuple[
        Float32[Array, "N A V"],
        tuple[Float[Array, "N T K D"], ...],
        tuple[Float[Array, "N T K _"], ...],
    ]:
        """Runs `Decoder.encode` on every device.

        Logits are sharded along the vocabulary, keys and values along their heads.
        """
        none = PartitionSpec()
        heads = (sharding.spec((None, None, "kv_heads")),) * self.config.num_layers
        out = sharding.spec((None, None, "vocab" if self.splits_vocab else None)), heads, heads
        run = functools.partial(self._local().apply, method="encode")
        mapped: Any = on_each(
            run, self.mesh, in_specs=(self.specs(variables), none, none), out_specs=out
        )
        return mapped(variables, batch, at)

    @property
    def splits_vocab(self) -> bool:
        """True if embedding and head are sharded; else each device has the whole vocabulary."""
        return self.config.vocab_size % axis_size(self.mesh, MODEL_AXES) == 0

    def specs(self, variables: Params) -> Any:
        """Returns the partition spec of each parameter, in the structure of `variables`."""
        return jax.tree.map_with_path(
            lambda keys, leaf: sharding.spec(
                names_of_array(self.names(param_path(keys)), keys, leaf)
            ),
            variables,
        )

    def names(self, path: ParamPath) -> LogicalAxes:
        """Returns the `logical_axes` of a parameter; None for dimensions that are not split."""
        return tuple(
            None if name == "vocab" and not self.splits_vocab else name
            for name in logical_axes(path, self.config, self.mesh)
        )

    def _local(self) -> Decoder:
        """Returns the model that one device runs."""
        c, n = self.config, axis_size(self.mesh, MODEL_AXES)
        local = dataclasses.replace(
            c,
            num_heads=c.num_heads // n,
            num_kv_heads=c.num_kv_heads // n,
            intermediate_size=c.intermediate_size // n,
            vocab_size=c.vocab_size // n if self.splits_vocab else c.vocab_size,
            moe=c.moe and c.moe.on_each_of(*_sizes(self.mesh)),
        )
        axis = axis_in_use(self.mesh, MODEL_AXES)
        return Decoder(local, self.implementation, axis, axis if self.splits_vocab else None)


def fit(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the configuration of a model on a mesh.

    With fewer kv heads than devices each is repeated, so that every device has the one that its
    query heads read.

    Raises:
      ValueError: heads, MLP or experts that do not divide over the devices, or an axis `expert`
        for a model without experts.
    """
    expert, tensor = _sizes(mesh)
    if expert > 1 and config.moe is None:
        raise ValueError(
            f"the model has no experts, which expert={expert} would split; use tensor={expert} "
            "for its heads and its MLP"
        )
    if problem := _indivisible(config, expert, tensor):
        most = range(1, config.num_heads + 1)
        fits = f"tensor may be {_listed(n for n in most if not _indivisible(config, 1, n))}"
        where = f"tensor={tensor}"
        if expert > 1:
            where = f"expert={expert}{f' x {where}' if tensor > 1 else ''}"
            alone = _listed(n for n in most if not _indivisible(config, n, 1))
            fits = f"expert may be {alone}, and alone {fits}"
        raise ValueError(f"the model's {problem} do not divide over {where} devices; {fits}")
    return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, expert * tensor))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _sizes(mesh: Mesh) -> tuple[int, int]:
    return axis_size(mesh, EXPERT), axis_size(mesh, TENSOR)


def _indivisible(config: ModelConfig, expert: int, tensor: int) -> str:
    """The part of a model that does not divide over a mesh; empty if all do."""
    c, moe, n = config, config.moe, expert * tensor
    if c.num_heads % n:
        return f"{c.num_heads} query heads"
    if n % c.num_kv_heads if c.num_kv_heads < n else c.num_kv_heads % n:
        return f"{c.num_kv_heads} kv heads"
    is_dense = not (c.sparse_layers and all(c.sparse_layers))
    if is_dense and c.intermediate_size % n:
        return f"{c.intermediate_size} MLP units"
    if moe is None or moe.divides_over(expert, tensor):
        return ""
    shared = f" and the {moe.shared_size} units of the shared one" if moe.shared_size else ""
    return f"{moe.num_experts} experts of {moe.expert_size} units{shared}"


def repeats(path: ParamPath, config: ModelConfig, mesh: Mesh) -> int:
    """Returns how many copies of each head a parameter of `config` has on a mesh."""
    if path[-2] not in kv_modules(config) or path[-1] == LORA_A:
        return 1
    return fit(config, mesh).num_kv_heads // config.num_kv_heads


def fit_params(
    value: Array | np.ndarray | QuantisedTensor, path: ParamPath, config: ModelConfig, mesh: Mesh
) -> Any:
    """Returns a parameter of `config` as `fit(config, mesh)` has it: kv heads repeated.

    Numpy arrays stay such.
    """
    times = repeats(path, config, mesh)
    if times == 1:
        return value

    def repeated(array: Array | np.ndarray) -> Array | np.ndarray:
        numpy = np if isinstance(array, np.ndarray) else jnp
        heads = array.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])
        return numpy.repeat(heads, times, axis=0).reshape(-1, *array.shape[1:])

    return value.map_rows(repeated) if isinstance(value, QuantisedTensor) else repeated(value)


def shard_params(params: Params, config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Distributes the parameters of `config` over a mesh."""
    module = ShardedDecoder(fit(config, mesh), mesh)

    def shard(keys: Any, value: Any) -> Any:
        path = param_path(keys)
        return shard_param(fit_params(value, path, config, mesh), path, module)

    return jax.tree.map_with_path(shard, dict(params), is_leaf=is_quantised)


def shard_param(
    value: Array | np.ndarray | QuantisedTensor, path: ParamPath, module: ShardedDecoder
) -> Any:
    """Distributes a parameter of a model over its mesh.

    Raises:
      ValueError: the groups of a quantised one do not divide over the devices.
    """
    names, mesh = module.names(path), module.mesh
    if not isinstance(value, QuantisedTensor):
        return shard_array(value, names, mesh)
    check_split(value, path, module)
    return jax.tree.map_with_path(
        lambda keys, leaf: shard_array(leaf, names_of_array(names, keys, leaf), mesh), value
    )


def check_split(value: QuantisedTensor, path: ParamPath, module: ShardedDecoder) -> None:
    """Raises ValueError if the groups of a quantised parameter do not divide over the devices."""
    names, mesh = module.names(path), module.mesh
    last = names[-1] if len(names) == value.ndim else None
    split = axis_size(mesh, sharding.RULES[last]) if last else 1
    groups, bits = value.scales.shape[-1], value.code_format.bits
    if split > 1 and (value.order is not None or (groups % split and (groups, bits) != (1, 8))):
        has = "an order of its inputs" if value.order is not None else f"{groups} groups a row"
        raise ValueError(
            f"{'/'.join(path)} is quantised with {has}, which cannot be split over {split} devices; "
            "use fewer, or a checkpoint whose groups divide over them"
        )


def params_on(params: Params, mesh: Mesh) -> dict[str, Any]:
    """Restricts parameters to some of their devices, which together hold all of them.

    Nothing is copied.
    """
    devices = {*mesh.devices.flat}

    def restrict(value: Array) -> Array:
        spec = value.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
        shards = [shard.data for shard in value.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(
            value.shape, NamedSharding(mesh, spec), shards
        )

    return jax.tree.map(restrict, dict(params))


def shard_array(
    value: Shaped[Array | np.ndarray, "*shape"], names: LogicalAxes, mesh: Mesh
) -> Shaped[Array, "*shape"]:
    """Distributes an array over a mesh; from the host each device is sent its part alone."""
    target = sharding.sharding(mesh, names)
    if isinstance(value, np.ndarray):
        return jax.make_array_from_callback(value.shape, target, lambda index: value[index])
    return jax.device_put(value, target)
