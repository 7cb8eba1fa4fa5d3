"""Prompts of workers: formats, presets for families of models, and the tokens of a session."""

from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative

__all__ = ["COLLABORATIVE", "PLAIN", "Format", "collaborative"]
