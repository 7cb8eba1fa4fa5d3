"""ModelConfig: every setting that changes a model's numbers, read from `config.json`."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxshare.argument_checks import as_integer
from jaxshare.models import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi,
    qwen,
    qwen_moe,
    smollm,
)
from jaxshare.models.config_fields import Family, Fields, read_json
from jaxshare.models.layer_types import same_everywhere
from jaxshare.models.mla import MLA
from jaxshare.models.moe import MoE
from jaxshare.models.quantisation.settings import read_quantisation
from jaxshare.models.rope_config import read_rope
from jaxshare.rope import Rope

_MODULES = (
    llama,
    qwen,
    qwen_moe,
    phi,
    mistral,
    mixtral,
    gemma,
    deepseek,
    smollm,
    olmo,
    olmoe,
    granite,
    glm,
    gpt_oss,
)
FAMILIES = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}

_MAX_LAYERS = 10_000
"""More than any model has; each takes time to compile."""

# Settings found in real Llama and Qwen files that do not change the model's numbers.
_NO_EFFECT = frozenset(
    {
        # tokens and text generation
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "use_cache",
        "tokenizer_class",
        "max_sequence_length",
        "model_max_length",
        "tokenizer_model_max_length",
        "tokenizer_padding_side",
        "prefix",
        "task_specific_params",
        # training
        "initializer_range",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "classifier_dropout",
        "gradient_checkpointing",
        "unsloth_fixed",
        "unsloth_version",
        "finetuning_task",
        # storage and computation of the numbers, not their values; `chunk_size_feed_forward`
        # splits a product into parts
        "dtype",
        "torch_dtype",
        "use_bfloat16",
        "chunk_size_feed_forward",
        "use_flash_attn",
        "use_flash_attention",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation_internal",
        "_flash_attn_2_enabled",
        "fused_qkv",
        "tf_legacy_loss",
        "torchscript",
        "transformers.js_config",
        # names, outputs, labels; code in a checkpoint (auto_map) is never run
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "auto_map",
        "custom_pipelines",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_router_logits",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
        "tie_last_hidden_states",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    }
)


_OF_IMAGES = frozenset(
    {
        "vision_config",
        "image_token_index",
        "image_token_id",
        "boi_token_index",
        "eoi_token_index",
        "mm_tokens_per_image",
        "spatial_merge_size",
        "vision_feature_layer",
        "projector_hidden_act",
        "multimodal_projector_bias",
    }
)
"""Settings of images, in checkpoints whose language model is read alone."""


class LayerForm(NamedTuple):
    """The ways in which layers of one model differ. Layers of one form are traced once.

    Attributes:
      rope: the rotation of its queries and keys.
      window: tokens that a token sees, itself included; 0 for all.
      is_sparse: it has experts in place of one MLP.
    """

    rope: Rope
    window: int
    is_sparse: bool


@dataclasses.dataclass(frozen=True, repr=False)
class ModelConfig:
    """The shape and variant of a decoder.

    Hashable, so that it can be static under jit. A field with a default is of the families that
    differ from Llama in it.

    Attributes:
      rope: the rotation for the whole context, max_positions.
      max_positions: the longest text, in tokens.
      short_rope: the rotation for runs of at most short_positions tokens, in models that have
        another one for them (longrope); see for_context.
      short_positions: 0 where there is no short_rope.
      activation: of the MLP's gate, "silu" or "gelu_tanh".
      norm_placement: "pre" for norms of the inputs of attention and MLP, "post" for norms of their
        outputs, "both".
      norm_adds_one: norms multiply by 1 + scale, in float32.
      qk_norm: queries and keys are normed head by head.
      qk_norm_whole: they are normed over all heads together.
      qkv_clip: queries, keys and values are bounded to [-qkv_clip, qkv_clip], after norms over all
        heads together and before the rotation; 0 leaves them as they are.
      score_scale: of attention scores; None is head_dim ** -0.5.
      attention_softcap, logit_softcap: scores and logits are softcap * tanh(x / softcap); 0 leaves
        them as they are.
      attention_sinks: each head has a score beside those of all keys, whose value is 0.
      embedding_multiplier: of embeddings, rounded to their dtype.
      residual_multiplier: of the outputs of attention and MLP.
      logit_divisor: of logits.
      windows: for each layer the tokens that a token sees, itself included, 0 for all; empty where
        no layer has a window.
      layer_ropes: for each layer its rotation; empty where all have `rope`.
      rope_interleaved: the checkpoint rotates pairs (2 i, 2 i + 1); its rows are reordered when
        they are read.
      moe: the mixture of experts of layers that have one.
      sparse_layers: for each layer whether it has experts; empty where none has.
      mla: the sizes of multi-head latent attention, in models that have it. num_kv_heads is then 1,
        and head_dim what a cache keeps of a token, `mla.cached_dim`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    short_rope: Rope | None = None
    short_positions: int = 0
    activation: str = "silu"
    norm_placement: str = "pre"
    norm_adds_one: bool = False
    qk_norm_whole: bool = False
    qkv_clip: float = 0.0
    score_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_sinks: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    windows: tuple[int, ...] = ()
    layer_ropes: tuple[Rope, ...] = ()
    rope_interleaved: bool = False
    moe: MoE | None = None
    sparse_layers: tuple[bool, ...] = ()
    mla: MLA | None = None

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | os.PathLike) -> "ModelConfig":
        """Reads a config.json as transformers 4 or 5 writes it.

        Args:
          source: its contents, the file, or its folder.

        Raises:
          FileNotFoundError: no such file.
          ConfigError: a field that is missing or wrong, or an unknown one that may change the
            model's numbers.
        """
        if isinstance(source, Mapping):
            return _from_fields(Fields(source, "config.json"))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: a model folder holds a config.json, as in Hugging Face "
                "checkpoints"
            )
        return _from_fields(Fields(read_json(path), str(path)))

    @property
    def value_dim(self) -> int:
        """The size of a cached value (`jaxshare.cache_config.CacheConfig`)."""
        return 0 if self.mla else self.head_dim

    def __repr__(self) -> str:
        """The fields, without those of other families: identities of saved files are made of it."""
        fields = ", ".join(f"{name}={value!r}" for name, value in self.described().items())
        return f"{type(self).__qualname__}({fields})"

    def described(self) -> dict[str, Any]:
        """The fields by their names, without those of other families that have their defaults."""
        names = [field.name for field in dataclasses.fields(self)]
        later = {*names[names.index("activation") :]}
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in later or getattr(self, field.name) != field.default
        }

    @property
    def mlp_numbers(self) -> int:
        """The numbers of a token that the widest MLP of a layer has at once: units of gate and up,
        and the outputs of experts."""
        moe = self.moe
        if moe is None:
            return 2 * self.intermediate_size
        of_experts = moe.top_k * (2 * moe.expert_size + self.hidden_size) + 2 * moe.shared_size
        return max(2 * self.intermediate_size, of_experts)

    @property
    def scale(self) -> float:
        """The scale of attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    def layer_form(self, layer: int) -> LayerForm:
        """Returns the form of a layer."""
        return LayerForm(
            self.layer_ropes[layer] if self.layer_ropes else self.rope,
            self.windows[layer] if self.windows else 0,
            self.sparse_layers[layer] if self.sparse_layers else False,
        )

    @property
    def layer_forms(self) -> tuple[LayerForm, ...]:
        """The form of each layer."""
        return tuple(map(self.layer_form, range(self.num_layers)))

    def only(self, layer: int) -> "ModelConfig":
        """Returns the configuration of a model that has one of the layers alone."""
        by_layer = "windows", "layer_ropes", "sparse_layers"
        one = {name: getattr(self, name)[layer : layer + 1] for name in by_layer}
        return dataclasses.replace(self, num_layers=1, **one)

    def for_context(self, positions: int) -> "ModelConfig":
        """Returns the configuration for runs of at most `positions` tokens, prompt and answer.

        It differs from this one only for longrope, whose rotation depends on whether a text exceeds
        the original context. Cached keys are shared between rows of all lengths, so the rotation is
        chosen once for a whole run, not while a text grows.

        Raises:
          ValueError: not between 1 and max_positions.
        """
        positions = as_integer("positions", positions)
        if not 1 <= positions <= self.max_positions:
            raise ValueError(
                f"a context of {positions} tokens was requested, but the model takes 1 to "
                f"{self.max_positions}"
            )
        if self.short_rope is None or positions > self.short_positions:
            return self
        return dataclasses.replace(
            self,
            rope=self.short_rope,
            max_positions=self.short_positions,
            short_rope=None,
            short_positions=0,
        )


def _from_fields(fields: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields = _text(fields, family) if family.text_type else fields
    hidden_size, num_heads = (
        fields.positive("hidden_size", int),
        fields.positive("num_attention_heads", int),
    )
    num_layers = fields.positive("num_hidden_layers", int, most=_MAX_LAYERS)
    specific = family.read(fields, hidden_size, num_heads, num_layers)
    if num_heads % specific["num_kv_heads"]:
        raise fields.error(
            "num_key_value_heads", f"it must divide num_attention_heads, {num_heads}"
        )
    _check_fixed(fields, family, num_layers, specific)
    rotary = specific.pop("rotary_dim", specific["head_dim"])
    max_positions = fields.positive("max_position_embeddings", int)
    if "rope" not in specific:
        specific |= read_rope(fields, rotary, max_positions, family.default_theta)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=fields.positive("rms_norm_eps", float),
        max_positions=max_positions,
        tie_embeddings=fields.take("tie_word_embeddings", bool, family.tied_by_default),
        **specific,
    )
    fields.finish(_NO_EFFECT)
    return config


def _architecture(fields: Fields) -> str:
    names = fields.take("architectures", list)
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise fields.error(
            "architectures",
            f"only {', '.join(FAMILIES)} are supported; docs/adding_a_model.md says what another "
            "one takes",
        )
    family = FAMILIES[names[0]]
    types = family.model_type, *family.other_types
    if fields.take("model_type", str, family.model_type) not in types:
        raise fields.error("model_type", f"for {names[0]} it must be {' or '.join(types)}")
    return names[0]


def _text(fields: Fields, family: Family) -> Fields:
    """Returns the settings of the language model in a checkpoint of texts and images."""
    values = {**family.text_defaults, **fields.take("text_config", dict)}
    if (tied := fields.take("tie_word_embeddings", bool, None)) is not None:
        values.setdefault("tie_word_embeddings", tied)
    if (quantised := fields.take("quantization_config", dict, None)) is not None:
        values.setdefault("quantization_config", quantised)
    fields.finish(_NO_EFFECT | _OF_IMAGES)
    text = Fields(values, fields.source, "text_config.")
    if text.take("model_type", str, family.text_type) != family.text_type:
        raise text.error("model_type", f"only {family.text_type} is supported")
    return text


def _check_fixed(
    fields: Fields, family: Family, num_layers: int, specific: Mapping[str, Any]
) -> None:
    """Checks fields that must have one value in families that do not read them."""
    if "activation" not in specific and fields.take("hidden_act", str, "silu") not in (
        "silu",
        "swish",
    ):
        raise fields.error("hidden_act", "only silu (also called swish) is supported")
    if not fields.take("is_causal", bool, True):
        raise fields.error("is_causal", "only causal models are supported")
    if "windows" not in specific:
        same_everywhere(fields, num_layers, None)
    read_quantisation(fields, family.quantizations)
