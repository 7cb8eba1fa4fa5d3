"""Prompts of workers: what a `format` says, presets for families of models, and how a session's
prompt is put together."""

from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative

__all__ = ["COLLABORATIVE", "PLAIN", "Format", "collaborative"]
