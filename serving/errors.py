"""Errors of what is served."""


class EngineError(RuntimeError):
    """The engine cannot take a call, or could not end it."""


class QueueFullError(EngineError):
    """As many calls wait as the engine lets wait; try again later."""


class ClosedError(EngineError):
    """The engine takes no calls any more."""


class TooLongError(ValueError):
    """A call that would never fit into the memory or the model's context."""


class NotANumberError(EngineError):
    """The model's logits for a call were not numbers, so nothing can be sampled from them."""
