"""Families of models in Flax, and the files that they are loaded from.

model = jaxshare.models.load("Qwen/Qwen3-0.6B")
"""

from jaxshare.models.adapters.adapter_params import (
    AdapterError,
    AdapterParams,
    LowRank,
    merged,
    new_adapter,
)
from jaxshare.models.adapters.peft_files import load_adapter, save_adapter
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import ConfigError
from jaxshare.models.generation_config import Generation
from jaxshare.models.layers import Decoder
from jaxshare.models.loading import LoadedModel, load, outline
from jaxshare.models.reencoding import reencode, reencode_logits
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.models.sources import EMBEDDED

__all__ = [
    "EMBEDDED",
    "AdapterError",
    "AdapterParams",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "Generation",
    "LoadedModel",
    "LowRank",
    "ModelConfig",
    "load",
    "load_adapter",
    "merged",
    "new_adapter",
    "outline",
    "reencode",
    "reencode_logits",
    "save_adapter",
]
