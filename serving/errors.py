"""The errors of the engine."""


class EngineError(RuntimeError):
    """The engine cannot accept or finish a request."""


class QueueFullError(EngineError):
    """The queue of waiting requests is full; try again later."""


class ClosedError(EngineError):
    """The engine is shut down."""


class TooLongError(ValueError):
    """A request is too long for the memory or for the model's context."""


class NotANumberError(EngineError):
    """The model's logits for a request are not finite, so nothing can be sampled from them."""
