"""The models of the benchmark of decoding, by family: config.json, and what is measured of each."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxshare.models import ModelConfig
from jaxshare.models.tensor_names import expected_tensors, stored_shapes
from scripts.bench.lib import write_checkpoint, write_random
from scripts.bench.parts.decode.report import GOAL_PROMPT, GOALS
from scripts.bench.parts.decode.sides import MODEL


@dataclasses.dataclass(frozen=True)
class BenchFamily:
    """A model of random weights, and its measurement.

    Attributes:
      title: of its table.
      config: its config.json.
      batches, prompt: those that are measured where no others are asked for.
      goals: tokens a second as a multiple of transformers', by batch, with that prompt.
      copied: each row has a copy of one prompt in place of a prompt of its own, which each side
        computes once and copies: transformers' prefill of long prompts of latents takes minutes.
    """

    title: str
    config: Mapping[str, Any]
    goals: Mapping[int, float]
    batches: str = "1,8,64"
    prompt: int = GOAL_PROMPT
    copied: bool = False

    def write(self, folder: Path, seed: int) -> int:
        """Writes the model as a Hugging Face folder; returns the number of its parameters."""
        if self.config is MODEL:
            return write_checkpoint(folder, MODEL, seed)
        shapes = stored_shapes(expected_tensors(ModelConfig.from_json(self.config)))
        return write_random(folder, self.config, shapes, seed)


_MISTRAL = {name: value for name, value in MODEL.items() if not name.endswith("_bias")} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
_PHI = _MISTRAL | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": MODEL["max_position_embeddings"],
    "pad_token_id": None,
}
_MIXTRAL = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = _MISTRAL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 12,
    "max_position_embeddings": 8192,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 12,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
del _DEEPSEEK["head_dim"], _DEEPSEEK["sliding_window"]

FAMILIES = {
    "llama": BenchFamily("Llama", MODEL, GOALS),
    "mistral": BenchFamily("Mistral", _MISTRAL, GOALS),
    "phi": BenchFamily("Phi-3", _PHI, GOALS),
    "moe": BenchFamily("Mixtral, 2 of 8 experts", _MIXTRAL, {1: 2.0, 64: 3.0}),
    "mla": BenchFamily(
        "DeepSeek-V3 with dense layers",
        _DEEPSEEK,
        {1: 3.0, 8: 3.0},
        batches="1,8",
        prompt=4096,
        copied=True,
    ),
}
