"""The engine: serves requests of workers, branches and agents at any time, and keeps what they may
reuse (Hive, sections 6 to 8)."""

from jaxshare.deprecated import renamed
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.engine import Engine
from jaxshare.serving.engine.stream import Stream, TokenChunk
from jaxshare.serving.engine.stream_group import StreamGroup
from jaxshare.serving.engine.tracing import RequestTracer
from jaxshare.serving.errors import (
    ClosedError,
    EngineError,
    NotANumberError,
    NoTokenError,
    QueueFullError,
    TooLongError,
)
from jaxshare.serving.kvcache.policy import SearchPlace
from jaxshare.serving.logits_cache.hotspot import Hotspot

__all__ = [
    "ClosedError",
    "Completion",
    "Engine",
    "EngineError",
    "Hotspot",
    "NoTokenError",
    "NotANumberError",
    "QueueFullError",
    "RequestTracer",
    "SearchPlace",
    "Stream",
    "StreamGroup",
    "TokenChunk",
    "TooLongError",
]

__getattr__ = renamed(
    __name__,
    {
        "End": "jaxshare.FinishReason",
        "Piece": "jaxshare.serving.engine.stream.TokenChunk",
        "RequestOutput": "jaxshare.serving.engine.completion.Completion",
    },
)
