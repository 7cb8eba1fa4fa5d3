"""Llama and Qwen models in Flax, and the files they come from.

    model = jaxshare.models.load("Qwen/Qwen3-0.6B")
"""

from pathlib import Path

from jaxshare.models.config import ModelConfig
from jaxshare.models.fields import ConfigError
from jaxshare.models.generation import Generation
from jaxshare.models.hf import CheckpointError
from jaxshare.models.layers import Decoder
from jaxshare.models.loading import LoadedModel, load, outline
from jaxshare.models.reencoding import reencode, reencode_logits

EMBEDDED = Path(__file__).parent / "embedded"
"""The folder of the small model that comes with the package."""

__all__ = ["EMBEDDED", "CheckpointError", "ConfigError", "Decoder", "Generation", "LoadedModel", "ModelConfig", "load", "outline",
           "reencode", "reencode_logits"]
