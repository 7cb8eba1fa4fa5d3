"""Families of models in Flax, and the files that they are loaded from.

model = jaxshare.models.load("Qwen/Qwen3-0.6B")
"""

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
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "Generation",
    "LoadedModel",
    "ModelConfig",
    "load",
    "outline",
    "reencode",
    "reencode_logits",
]
