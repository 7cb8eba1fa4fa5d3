"""The matrices of one adapter: checked against a model, merged into its parameters, or new ones."""

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.argument_checks import INT32_MAX, as_float, as_integer, shown
from jaxshare.models.config import ModelConfig
from jaxshare.models.packed import unpack
from jaxshare.quantised import is_quantised

LayerPath = tuple[str, str, str]
"""A linear layer of the model, for example ("layers_0", "attention", "q")."""


class AdapterError(ValueError):
    """An adapter cannot be used: its files, its matrices, or its name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """What an adapter adds to the kernel of one linear layer: scale * b @ a.

    Attributes:
      a, b: the matrices, [r, in] and [out, r].
      scale: alpha / r, or alpha / sqrt(r) in adapters that are stabilised by rank (static).
    """

    a: Float[Array | np.ndarray, "r in"]
    b: Float[Array | np.ndarray, "out r"]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterParams:
    """An adapter of a model; a tree whose leaves are its matrices, which can be trained.

    Attributes:
      matrices: by the linear layer that they are added to.
      base: the name of the model that it was made for, as its files have it; "" if unknown (static).
    """

    matrices: Mapping[LayerPath, LowRank]
    base: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(each.rank for each in self.matrices.values())

    @property
    def digest(self) -> bytes:
        """A digest of 16 bytes of all its numbers: equal adapters have equal ones."""
        found = hashlib.blake2b(digest_size=16)
        for path in sorted(self.matrices):
            each = self.matrices[path]
            a, b = np.asarray(each.a), np.asarray(each.b)
            found.update(f"{path} {a.dtype} {a.shape} {b.dtype} {b.shape} {each.scale}".encode())
            found.update(a.tobytes() + b.tobytes())
        return found.digest()


def layer_shapes(config: ModelConfig) -> dict[LayerPath, tuple[int, int]]:
    """Returns the linear layers of a model that adapters can be of, with the shape of each kernel:
    projections of attention, and of MLPs without experts."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, units = config.hidden_size, config.intermediate_size
    attention = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    mlp = {"gate": (units, hidden), "up": (units, hidden), "down": (hidden, units)}
    found: dict[LayerPath, tuple[int, int]] = {}
    for i, form in enumerate(config.layer_forms):
        of_attention = {} if config.mla else attention
        of_mlp = {} if form.is_sparse else mlp
        for module, shapes in (("attention", of_attention), ("mlp", of_mlp)):
            found |= {(f"layers_{i}", module, name): shape for name, shape in shapes.items()}
    return found


def check_adapter(adapter: AdapterParams, config: ModelConfig, what: str = "the adapter") -> None:
    """Refuses an adapter that is not one of a model.

    Args:
      adapter: the adapter.
      config: of the model as its checkpoint has it, each kv head once.
      what: the adapter in messages.

    Raises:
      AdapterError: it has no matrices, one of a layer that the model lacks or of other shapes, or one
        that is not finite; the layer is named.
    """
    if not isinstance(adapter, AdapterParams):
        raise TypeError(
            f"{what} is {shown(adapter)}; give AdapterParams, or a folder of PEFT files"
        )
    if not adapter.matrices:
        raise AdapterError(f"{what} has no matrices; it would change nothing")
    shapes = layer_shapes(config)
    for path, each in adapter.matrices.items():
        if path not in shapes:
            raise AdapterError(
                f"{what} has matrices of {_name(path)}, which the model does not have as a layer that "
                "adapters can be of; it is an adapter for another base"
            )
        (out, width), a, b = shapes[path], each.a, each.b
        if a.shape[1:] != (width,) or b.shape[:1] != (out,) or a.shape[:1] != b.shape[1:]:
            raise AdapterError(
                f"{what} has matrices of shapes {list(a.shape)} and {list(b.shape)} for {_name(path)}, "
                f"but the model's kernel is [{out}, {width}], for which they are [r, {width}] and "
                f"[{out}, r]; it is an adapter for another base"
                + (f" ({adapter.base})" if adapter.base else "")
            )
        if not np.isfinite(each.scale) or not all(
            np.isfinite(np.asarray(matrix, np.float32)).all() for matrix in (a, b)
        ):
            raise AdapterError(
                f"{what} has numbers for {_name(path)} that are not finite; make or fetch it again"
            )


def merged(
    params: Mapping[str, Any], adapter: AdapterParams, config: ModelConfig
) -> dict[str, Any]:
    """Adds an adapter to a model's parameters, in float32, rounded to their dtype; differentiable.

    A training pass computes with the result (`Decoder.causal`); a pass of an engine with the adapter
    computes the same from the base's kernels.

    Args:
      params: {"params": ...}, packed or not; it stays as it is.
      adapter: the adapter; inside jit it is not checked.
      config: of the model.

    Raises:
      AdapterError: the kernel that it adds to is quantised.
    """
    named = unpack(params, config)
    layers = {**named["params"]}
    for (layer, module, name), each in adapter.matrices.items():
        layers[layer] = {**layers[layer], module: {**layers[layer][module]}}
        linear = layers[layer][module][name]
        kernel = linear["kernel"]
        if is_quantised(kernel):
            raise AdapterError(
                f"{_name((layer, module, name))} is quantised, and the sum with an adapter would not "
                "be; run the adapter beside it (LoadedModel.with_adapters), or merge it into the plain "
                "checkpoint"
            )
        a, b = (jnp.asarray(matrix).astype(jnp.float32) for matrix in (each.a, each.b))
        added = jnp.matmul(b, a, precision="highest") * jnp.float32(each.scale)
        whole = (kernel.astype(jnp.float32) + added).astype(kernel.dtype)
        layers[layer][module][name] = {**linear, "kernel": whole}
    return {**named, "params": layers}


def new_adapter(
    config: ModelConfig,
    rank: int = 8,
    *,
    alpha: float | None = None,
    targets: Collection[str] = ("q", "k", "v", "o", "gate", "up", "down"),
    seed: int = 0,
    base: str = "",
) -> AdapterParams:
    """Makes an adapter to be trained, which adds nothing yet: a is random, b is 0.

    Args:
      config: of the model.
      rank: r.
      alpha: the scale times r; default 2 r.
      targets: names of linear layers, those of `layer_shapes`.
      seed: of a, whose numbers are uniform within +-1 / sqrt(in), as PEFT's are.
      base: the model's name.

    Raises:
      ValueError: a rank below 1, or a target that the model lacks.
    """
    rank = as_integer("rank", rank, 1, INT32_MAX)
    alpha = 2.0 * rank if alpha is None else as_float("alpha", alpha, 0)
    shapes, rng = layer_shapes(config), np.random.default_rng(seed)
    known = {name for *_, name in shapes}
    if unknown := [each for each in targets if each not in known]:
        raise ValueError(
            f"targets has {shown(unknown[0])}; the model's layers for adapters are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    found: dict[LayerPath, LowRank] = {}
    for path, (out, width) in shapes.items():
        if path[-1] in targets:
            a = rng.uniform(-1, 1, (rank, width)) / np.sqrt(width)
            found[path] = LowRank(
                jnp.asarray(a, jnp.float32), jnp.zeros((out, rank), jnp.float32), alpha / rank
            )
    return AdapterParams(found, base)


def _name(path: LayerPath) -> str:
    return "/".join(path)
