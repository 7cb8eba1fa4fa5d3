"""The settings of a model that the metadata of a GGUF file describes, in the words of config.json.

Source: the keys of llama.cpp (docs/gguf.md, gguf.constants) and what its convert_hf_to_gguf.py and
its models make of config.json.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxshare.models.config_fields import ConfigError, Fields
from jaxshare.models.gguf.file import GGUFFile

_NO_EFFECT = frozenset(
    {
        "vocab_size",  # the table of embeddings has it
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "attention.causal",
    }
)
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
    }
)
"""Control tokens that end an answer in llama.cpp, whatever the metadata says."""
CONTROL = 3
"""The type of control tokens in tokenizer.ggml.token_type."""


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture in the words of llama.cpp.

    Attributes:
      name: in config.json.
      more: reads the settings in which it differs from Llama.
      is_paired: rows of queries and keys that are rotated together are side by side.
      norms_add_one: norms are stored as they multiply, while the model's own are smaller by one.
      scaling: the forms of rope scaling.
    """

    name: str
    more: Callable[[GGUFFile, Fields], dict[str, Any]]
    is_paired: bool = False
    norms_add_one: bool = False


def architecture_of(file: GGUFFile) -> GGUFArchitecture:
    """Returns the architecture of a file.

    Raises:
      ConfigError: one that is not read.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the architecture {name}; GGUF files are read of "
            f"{', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    if name == "llama" and file.values.get("llama.expert_count"):
        return dataclasses.replace(found, name="MixtralForCausalLM")
    return found


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Returns what the config.json of a file's model would hold.

    Raises:
      ConfigError: an architecture that is not read, or a setting that is missing, wrong or unknown.
    """
    found, prefix = architecture_of(file), f"{file.architecture}."
    own = {k.removeprefix(prefix): v for k, v in file.values.items() if k.startswith(prefix)}
    fields = Fields(own, str(file.path), prefix)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight; fetch it again")
    hidden, heads = fields.positive("embedding_length", int), _heads(fields, "attention.head_count")
    head_dim = fields.positive("attention.key_length", int, hidden // heads)
    if fields.positive("attention.value_length", int, head_dim) != head_dim:
        raise fields.error("attention.value_length", f"keys have {head_dim}; both must be the same")
    positions = fields.positive("context_length", int)
    config = dict(
        architectures=[found.name],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_hidden_layers=fields.positive("block_count", int),
        num_attention_heads=heads,
        num_key_value_heads=_heads(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_width(fields),
        rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon", float),
        max_position_embeddings=positions,
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_id=_end_tokens(file),
    )
    config |= _rope(file, fields, head_dim, positions) | found.more(file, fields)
    fields.finish(_NO_EFFECT)
    return {name: value for name, value in config.items() if value is not None}


def sampling_of(file: GGUFFile) -> dict[str, Any]:
    """Returns what the generation_config.json of a file's model would hold."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    names |= {"penalty_repeat": "repetition_penalty"}
    given = {new: file.values.get(f"general.sampling.{old}") for old, new in names.items()}
    found = {name: value for name, value in given.items() if value is not None}
    return {**found, "do_sample": True} if found.get("temperature") else {}


def _heads(fields: Fields, name: str, default: int | None = None) -> int:
    """Reads a number of heads, which may be given for each layer."""
    values = fields.given(name)
    if isinstance(values, list):
        if len({*values}) != 1 or type(values[0]) is not int:
            raise fields.error(name, "all layers must have the same number")
        return values[0]
    return fields.positive(name, int) if default is None else fields.positive(name, int, default)


def _width(fields: Fields) -> int:
    """Reads the units of an MLP, which models of experts alone may leave out."""
    experts = fields.positive("expert_feed_forward_length", int, None)
    if isinstance(fields.values.get("feed_forward_length"), list):
        return _heads(fields, "feed_forward_length")
    return fields.positive("feed_forward_length", int, experts) or 0


def _end_tokens(file: GGUFFile) -> list[int]:
    """Every token that ends an answer, those that the metadata names first."""
    named = [file.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    texts, types = (
        file.values.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type")
    )
    by_text = [
        token
        for token, (text, kind) in enumerate(zip(texts, types, strict=False))
        if kind == CONTROL and text in _END_TEXTS
    ]
    return [*dict.fromkeys(token for token in (*named, *by_text) if token is not None)]


def _rope(file: GGUFFile, fields: Fields, head_dim: int, positions: int) -> dict[str, Any]:
    """The rotation, as transformers 4 has it."""
    rotated = fields.positive("rope.dimension_count", int, head_dim)
    found: dict[str, Any] = dict(
        rope_theta=fields.positive("rope.freq_base", float, 10_000.0),
        partial_rotary_factor=None if rotated == head_dim else rotated / head_dim,
    )
    kind = fields.take("rope.scaling.type", str, "none")
    original = fields.positive("rope.scaling.original_context_length", int, None)
    factor = fields.positive("rope.scaling.factor", float, None)
    attention = fields.positive("rope.scaling.attn_factor", float, None)
    factors = [_factors(file, f"rope_{name}.weight") for name in _FACTORS]
    scaling: dict[str, Any] = {}
    if factors[0]:
        # Those that llama.cpp computes for Llama 3: one list for all lengths.
        scaling = dict(rope_type="longrope", attention_factor=1.0)
        scaling |= dict(short_factor=factors[0], long_factor=factors[0])
    elif factors[1] or factors[2]:
        short, long = factors[1:]
        scaling = dict(rope_type="longrope", short_factor=short, long_factor=long)
        scaling |= dict(original_max_position_embeddings=original or positions)
        scaling |= {} if attention is None else dict(attention_factor=attention)
    elif kind in ("linear", "yarn"):
        scaling = dict(rope_type=kind, factor=factor)
        if kind == "yarn":
            scaling |= dict(original_max_position_embeddings=original or positions)
            names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
            for old, new in names.items():
                scaling[new] = fields.positive(f"rope.scaling.{old}", float, None)
            scaling |= dict(truncate=False) if file.architecture == "gpt-oss" else {}
            if attention not in (None, 1.0):
                raise fields.error("rope.scaling.attn_factor", "only 1 is supported with yarn")
    elif kind not in ("none", "longrope"):
        raise fields.error(
            "rope.scaling.type", "only none, linear, yarn and longrope are supported"
        )
    given = {name: value for name, value in scaling.items() if value is not None}
    return found | (dict(rope_scaling=given) if given else {})


_FACTORS = "freqs", "factors_short", "factors_long"
ROPE_TENSORS = frozenset(f"rope_{name}.weight" for name in _FACTORS)
"""Tensors of the rotation, which are settings here."""


def _factors(file: GGUFFile, name: str) -> list[float] | None:
    if name not in file.tensors:
        return None
    if file.tensors[name].kind != "F32":
        raise ConfigError(f"{file.path}: {name} is of kind {file.tensors[name].kind}, not F32")
    return np.asarray(file.stored(name), np.float64).tolist()


def _has(file: GGUFFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors


def _llama(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    if experts := fields.take("expert_count", int, 0):
        return dict(
            num_local_experts=experts, num_experts_per_tok=fields.take("expert_used_count", int)
        )
    fields.take("expert_used_count", int, 0)
    return dict(attention_bias=_has(file, "attn_q.bias"), mlp_bias=_has(file, "ffn_gate.bias"))


def _nothing(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    return {}


def _experts(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    return dict(
        num_experts=fields.positive("expert_count", int),
        num_experts_per_tok=fields.positive("expert_used_count", int),
        moe_intermediate_size=fields.positive("expert_feed_forward_length", int),
        norm_topk_prob=file.architecture == "qwen3moe",  # as llama.cpp has it
        shared_expert_intermediate_size=fields.positive(
            "expert_shared_feed_forward_length", int, None
        ),
    )


def _phi3(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    window = fields.take("attention.sliding_window", int, 0)
    return dict(sliding_window=window or None)


def _gemma(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    """Settings of Gemma 2 and 3. The scale of scores follows from the size, as in llama.cpp."""
    hidden, heads, layers, head_dim = (
        fields.given(name)
        for name in (
            "embedding_length",
            "attention.head_count",
            "block_count",
            "attention.key_length",
        )
    )
    is_27b = (file.architecture, layers) in (("gemma2", 46), ("gemma3", 62))
    found = dict(
        query_pre_attn_scalar=hidden / heads if is_27b else float(head_dim or hidden // heads),
        sliding_window=fields.positive("attention.sliding_window", int),
        attn_logit_softcapping=fields.positive("attn_logit_softcapping", float, None),
        final_logit_softcapping=fields.positive("final_logit_softcapping", float, None),
    )
    if file.architecture == "gemma3":
        found |= dict(
            rope_local_base_freq=fields.positive("rope.freq_base_swa", float, 10_000.0),
            rope_theta=fields.positive("rope.freq_base", float, 1_000_000.0),
            sliding_window_pattern=fields.positive("attention.sliding_window_pattern", int, 6),
        )
    return found


def _gpt_oss(file: GGUFFile, fields: Fields) -> dict[str, Any]:
    return dict(
        num_local_experts=fields.positive("expert_count", int),
        num_experts_per_tok=fields.positive("expert_used_count", int),
        sliding_window=fields.positive("attention.sliding_window", int),
        intermediate_size=fields.positive("expert_feed_forward_length", int),
    )


ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", _llama, is_paired=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", _nothing),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", _nothing),
    "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", _experts),
    "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM", _experts),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", _phi3),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", _gemma, norms_add_one=True),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", _gemma, norms_add_one=True),
    "gpt-oss": GGUFArchitecture("GptOssForCausalLM", _gpt_oss),
}
"""The architectures that are read, by the names that llama.cpp has for them. "llama" is Mistral and
Mixtral, too."""
