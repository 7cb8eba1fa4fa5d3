"""Workers: streams of one model that write in parallel over a shared cache (Hogwild! Inference)."""

from jaxshare.serving.workers.session import Workers

__all__ = ["Workers"]
