"""Settings and weights of Tunix's modules (Flax NNX) as those of models here (Linen), and back.

Nothing of Tunix is imported: its modules come as their class's name, their settings, and their
arrays by names such as "layers.0.attn.q_proj.w".
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.models import ModelConfig
from jaxshare.models.safetensors_io import nested
from jaxshare.models.tensor_names import expected_tensors

_THETA = 1_000_000
"""The base of rotations in Tunix's Llama3 and Qwen3 (0.1.7), which do not read their settings'
rope_theta. Samples are of the distribution that is trained only where the engine does the same."""
_QKV, _MLP = ("q", "k", "v"), ("gate", "up", "down")


def model_config(kind: str, settings: Any, max_positions: int) -> ModelConfig:
    """Returns the configuration of a model that computes what a module of Tunix does.

    Args:
      kind: the name of the module's class, such as "Llama3".
      settings: its ModelConfig.
      max_positions: the longest text, in tokens, which Tunix's settings do not have.

    Raises:
      ValueError: a kind of module, or a setting, that no model here computes.
    """
    if kind not in _READERS:
        raise ValueError(
            f"the actor is a {kind}; modules of {', '.join(_READERS)} can be run: train with another "
            "rollout engine, such as 'vanilla'"
        )
    common = {
        "num_hidden_layers": settings.num_layers,
        "hidden_size": settings.embed_dim,
        "intermediate_size": settings.hidden_dim,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": max_positions,
    }
    return ModelConfig.from_json(common | _READERS[kind](settings))


def _llama3(settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": settings.vocab_size,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": _THETA,
        "tie_word_embeddings": settings.weight_tying,
    }


def _qwen2(settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": settings.vocab_size,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": settings.rope_theta,
        "tie_word_embeddings": settings.use_tied_embedding,
    }


def _qwen3(settings: Any) -> dict[str, Any]:
    found = _qwen2(settings) | {"rope_theta": _THETA}
    if not settings.num_experts:
        return found | {"architectures": ["Qwen3ForCausalLM"]}
    return found | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": settings.num_experts,
        "num_experts_per_tok": settings.num_experts_per_tok,
        "moe_intermediate_size": settings.hidden_dim,
        "norm_topk_prob": True,
    }


_GEMMA = {"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(settings: Any) -> dict[str, Any]:
    if not (settings.use_post_attn_norm and settings.use_post_ffw_norm):
        raise ValueError(
            "the actor is a Gemma of the first version, without norms after attention and MLP; Gemma "
            "2 and 3 can be run: train with another rollout engine, such as 'vanilla'"
        )
    kinds = {"GLOBAL": "full_attention", "LOCAL_SLIDING": "sliding_attention"}
    return _GEMMA | {
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": settings.num_embed,
        "rope_theta": 10_000.0,
        "query_pre_attn_scalar": settings.head_dim,
        "attn_logit_softcapping": settings.attn_logits_soft_cap,
        "final_logit_softcapping": settings.final_logit_softcap,
        "sliding_window": settings.sliding_window_size,
        "layer_types": [kinds[each.name] for each in settings.attention_types],
    }


def _gemma3(settings: Any) -> dict[str, Any]:
    if settings.vision_config is not None or settings.local_scale_factor != 1.0:
        raise ValueError(
            "the actor is a Gemma3 that reads images, or scales local rotations; neither can be run: "
            "train with another rollout engine, such as 'vanilla'"
        )
    by_head = settings.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    factor = settings.global_scale_factor
    scaling = {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return _GEMMA | {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": settings.num_embed,
        "rope_theta": float(settings.global_base_frequency),
        "rope_local_base_freq": float(settings.local_base_frequency),
        "rope_scaling": scaling or None,
        "query_pre_attn_scalar": settings.head_dim
        if by_head
        else settings.embed_dim // settings.num_heads,
        "sliding_window": settings.sliding_window_size,
    }


_READERS = {
    "Llama3": _llama3,
    "Qwen2": _qwen2,
    "Qwen3": _qwen3,
    "Gemma": _gemma2,
    "Gemma3": _gemma3,
}


@dataclasses.dataclass(frozen=True)
class _ArrayPlace:
    """The place of a parameter in a module of Tunix.

    Attributes:
      name: of the array, in its layer.
      axes: the order of its axes in which they are those of the parameter, some of them joined.
      part: the number of its matrix, in an array of several.
    """

    name: str
    axes: tuple[int, ...] = ()
    part: int | None = None

    def read(self, array: Any, shape: tuple[int, ...]) -> Array:
        """Returns the parameter, in memory of its own."""
        array = array if self.part is None else array[self.part]
        # Inside jit an array that is returned as it came would be the caller's.
        turned = jnp.transpose(array, self.axes) if self.axes else jnp.copy(array)
        return turned.reshape(shape)

    def written(self, value: Any, shape: tuple[int, ...]) -> Array:
        """Returns the array, or its matrix, of this shape."""
        if not self.axes:
            return jnp.copy(value)
        turned = value.reshape([shape[axis] for axis in self.axes])
        return jnp.transpose(turned, [self.axes.index(axis) for axis in range(len(shape))])


_TOP: dict[tuple[str, ...], _ArrayPlace] = {
    ("embed", "embedding"): _ArrayPlace("embedder.input_embedding"),
    ("head", "kernel"): _ArrayPlace("lm_head.w", (1, 0)),
}
_IN_MLP: dict[tuple[str, ...], _ArrayPlace] = {
    ("mlp", x, "kernel"): _ArrayPlace(f"mlp.{x}_proj.kernel", (1, 0)) for x in _MLP
}
_OF_LLAMA = _IN_MLP | {
    ("attention_norm", "scale"): _ArrayPlace("input_layernorm.w"),
    ("mlp_norm", "scale"): _ArrayPlace("post_attention_layernorm.w"),
    **{("attention", x, "kernel"): _ArrayPlace(f"attn.{x}_proj.w", (1, 2, 0)) for x in _QKV},
    **{("attention", x, "bias"): _ArrayPlace(f"attn.{x}_bias") for x in _QKV},
    **{("attention", x, "scale"): _ArrayPlace(f"attn.{x}.w") for x in ("q_norm", "k_norm")},
    ("attention", "o", "kernel"): _ArrayPlace("attn.o_proj.w", (2, 0, 1)),
    ("moe", "router", "kernel"): _ArrayPlace("mlp.router.kernel", (1, 0)),
    **{("moe", x, "kernel"): _ArrayPlace(f"mlp.{x}_proj", (0, 2, 1)) for x in _MLP},
}


def _of_gemma(config: ModelConfig) -> dict[tuple[str, ...], _ArrayPlace]:
    after = "post_attn_norm" if config.architecture.startswith("Gemma2") else "post_attention_norm"
    if config.num_heads == config.num_kv_heads:
        arrays = {x: ("qkv_einsum", part) for part, x in enumerate(_QKV)}
    else:
        arrays = {"q": ("q_einsum", None), "k": ("kv_einsum", 0), "v": ("kv_einsum", 1)}
    return _IN_MLP | {
        ("attention_norm", "scale"): _ArrayPlace("pre_attention_norm.scale"),
        ("attention_post_norm", "scale"): _ArrayPlace(f"{after}.scale"),
        ("mlp_norm", "scale"): _ArrayPlace("pre_ffw_norm.scale"),
        ("mlp_post_norm", "scale"): _ArrayPlace("post_ffw_norm.scale"),
        ("attention", "q_norm", "scale"): _ArrayPlace("attn._query_norm.scale"),
        ("attention", "k_norm", "scale"): _ArrayPlace("attn._key_norm.scale"),
        ("attention", "o", "kernel"): _ArrayPlace("attn.attn_vec_einsum.w", (2, 0, 1)),
        **{
            ("attention", x, "kernel"): _ArrayPlace(f"attn.{name}.w", (0, 2, 1), part)
            for x, (name, part) in arrays.items()
        },
    }


@functools.cache
def _places(config: ModelConfig) -> dict[tuple[str, ...], tuple[_ArrayPlace, tuple[int, ...]]]:
    """The place and the shape of each parameter, by its path."""
    is_gemma = config.architecture.startswith("Gemma")
    of_layer = _of_gemma(config) if is_gemma else _OF_LLAMA
    norm = _ArrayPlace("final_norm.scale" if is_gemma else "final_norm.w")
    found = {}
    for tensor in expected_tensors(config).values():
        first, *rest = tensor.path
        if first.startswith("layers_"):
            place = of_layer[tuple(rest)]
            name = f"layers.{first.removeprefix('layers_')}.{place.name}"
            place = dataclasses.replace(place, name=name)
        else:
            place = norm if first == "norm" else _TOP[tensor.path]
        found[tensor.path] = place, tensor.shape
    return found


def from_arrays(
    arrays: Mapping[str, Any], config: ModelConfig, dtype: Any = None
) -> dict[str, Any]:
    """Returns the parameters of a model that has the weights of a module of Tunix.

    Args:
      arrays: of the module, by their names; each is copied, on its devices.
      config: from `model_config`.
      dtype: of the parameters; default those of the arrays.

    Returns:
      {"params": ...}, as `LoadedModel.named_params` has them.

    Raises:
      ValueError: an array is missing, has another size, or is none of the model's.
    """
    places = _places(config)
    for path, (place, shape) in places.items():
        if place.name not in arrays:
            raise ValueError(f"the module has no {place.name}, which {'/'.join(path)} is made from")
        array, matrices = (
            arrays[place.name],
            1 if place.part is None else _parts(places, place.name),
        )
        if math.prod(array.shape) != matrices * math.prod(shape):
            raise ValueError(
                f"{place.name} has the shape {(*array.shape,)}, but the module's settings make "
                f"{'/'.join(path)} {shape}; give settings and weights of one model"
            )
    if extra := {*arrays} - {place.name for place, _ in places.values()}:
        raise ValueError(
            f"{min(extra)} is no parameter of {config.architecture}, and the engine would sample "
            "without it"
        )
    return _read(dict(arrays), config, None if dtype is None else jnp.dtype(dtype))


_A, _B = "_lora_a", "_lora_b"


def merged(arrays: Mapping[str, Any], alpha: float | None) -> dict[str, Any]:
    """Returns the arrays of a module without adapters (LoRA, Hu et al. 2021), which are added to the
    weights: w + alpha / rank * a b.

    Args:
      arrays: of the module, by their names; "NAME_lora_a" and "NAME_lora_b" are the adapter of NAME.
      alpha: of the adapters, which a module does not keep.

    Raises:
      ValueError: adapters without `alpha`, or one of an array whose first axes are not its inputs.
    """
    found = {name: array for name, array in arrays.items() if not name.endswith((_A, _B))}
    adapted = [name.removesuffix(_A) for name in arrays if name.endswith(_A)]
    if adapted and alpha is None:
        raise ValueError(
            f"the actor has adapters (LoRA), as of {adapted[0]}, whose alpha it does not keep; give "
            "it: functools.partial(TunixRollout, lora_alpha=...)"
        )
    for name in adapted:
        a, b, whole = arrays[name + _A], arrays[name + _B], found[name]
        has_inputs_first = name.endswith(("_proj.w", ".kernel"))
        if not has_inputs_first or (*a.shape[:-1], *b.shape[1:]) != (*whole.shape,):
            raise ValueError(
                f"an adapter of {name} cannot be merged; adapt projections of Llama3 and Qwen, and "
                "MLPs, alone"
            )
        found[name] = _with_adapter(whole, a, b, float(alpha or 0) / a.shape[-1])
    return found


@jax.jit
def _with_adapter(whole: Array, a: Array, b: Array, scale: float) -> Array:
    delta = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1) * scale
    return (whole.astype(jnp.float32) + delta).astype(whole.dtype)


def _parts(places: Mapping[Any, tuple[_ArrayPlace, Any]], name: str) -> int:
    """The number of matrices of an array."""
    return sum(place.name == name for place, _ in places.values())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _read(arrays: dict[str, Any], config: ModelConfig, dtype: Any) -> dict[str, Any]:
    found = {}
    for path, (place, shape) in _places(config).items():
        value = place.read(arrays[place.name], shape)
        found[path] = value if dtype is None else value.astype(dtype)
    return {"params": nested(found)}


def to_arrays(
    params: Mapping[str, Any], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Returns the arrays of a module of Tunix that has the weights of a model.

    Args:
      params: {"params": ...}, by names, as `LoadedModel.named_params` has them.
      config: from `model_config`.
      shapes: of the module's arrays, by their names.

    Raises:
      ValueError: the module has an array that the model does not, or the other way round.
    """
    names = {place.name for place, _ in _places(config).values()}
    if unlike := names ^ {*shapes}:
        has = "model" if min(unlike) in names else "module"
        raise ValueError(f"{min(unlike)} is of the {has} alone; give settings of one model")
    ordered = tuple((name, (*shape,)) for name, shape in shapes.items())
    return _write(params["params"], config, ordered)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _write(
    params: Any, config: ModelConfig, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[str, Array]:
    of_each: dict[str, dict[int | None, tuple[str, ...]]] = {}
    for path, (place, _) in _places(config).items():
        of_each.setdefault(place.name, {})[place.part] = path
    found = {}
    for name, shape in shapes:
        parts = []
        for part, path in sorted(of_each[name].items(), key=lambda each: each[0] or 0):
            value = functools.reduce(lambda tree, key: tree[key], path, params)
            one = shape if part is None else shape[1:]
            parts.append(_places(config)[path][0].written(value, one))
        found[name] = parts[0] if None in of_each[name] else jnp.stack(parts)
    return found
