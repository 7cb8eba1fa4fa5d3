"""The errors of the engine, of which `NotANumberError` is also that of branches and workers.

`InUseError` is that of every output.
"""

from typing import Self


class EngineError(RuntimeError):
    """The engine cannot accept or finish a request."""


class QueueFullError(EngineError):
    """The queue of waiting requests is full; try again later."""


class ClosedError(EngineError):
    """The engine is shut down."""


class InUseError(ValueError):
    """Another process, or another part of this one, is writing the same output."""


class TooLongError(ValueError):
    """A request is too long for the memory or for the model's context."""


class NotANumberError(EngineError):
    """The model's logits are not finite, so that nothing can be sampled from them.

    Attributes:
      after: what came before them, such as "24 tokens".
    """

    after = ""

    @classmethod
    def of(cls, what: str, after: str) -> Self:
        """The error for `what`, such as "prompt 3", after so much, such as "24 tokens"."""
        error = cls(
            f"the model's logits for {what} are not numbers after {after}; its weights, or its "
            "dtype, cannot serve this prompt"
        )
        error.after = after
        return error
