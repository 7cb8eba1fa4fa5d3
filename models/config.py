"""ModelConfig: everything about a model that changes its numbers, read from `config.json`."""

import dataclasses

from jaxshare.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of a decoder. Hashable, so that it can be static under jit. No field that config.json sets has a default."""

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
