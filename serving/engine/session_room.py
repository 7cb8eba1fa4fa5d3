"""The sessions that fit in the memory that a model's devices have free."""

from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.free_memory import cache_free_bytes

_PART = 0.6
"""The part of the free memory that sessions may take; programs need some of the rest."""


def sessions_that_fit(model: LoadedModel, tokens: int) -> int:
    """The number of sessions of so many tokens that an engine of the model has memory for."""
    return int(cache_free_bytes(model) * _PART) // max(1, tokens * token_bytes(model))


def engine_bytes(model: LoadedModel, tokens: int) -> int:
    """The bytes (`Engine(kv_bytes=)`) of memory for so many tokens."""
    return tokens * token_bytes(model)
