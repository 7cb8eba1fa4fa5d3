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


class RefusedInputError(ValueError):
    """The input of a job, or a setting of it, cannot be used, and trying again would not help."""


class TooLongError(ValueError):
    """A request is too long for the memory or for the model's context."""


class SamplingError(EngineError):
    """Nothing could be sampled for a request.

    Attributes:
      after: what came before, such as "24 tokens".
    """

    after = ""
    _MESSAGE = "nothing could be sampled for {what} after {after}"

    @classmethod
    def of(cls, what: str, after: str) -> Self:
        """The error for `what`, such as "prompt 3", after so much, such as "24 tokens"."""
        error = cls(cls._MESSAGE.format(what=what, after=after))
        error.after = after
        return error


class NotANumberError(SamplingError):
    """The model's logits are not finite, so that nothing can be sampled from them."""

    _MESSAGE = (
        "the model's logits for {what} are not numbers after {after}; its weights, or its dtype, "
        "cannot serve this prompt"
    )


class NoTokenError(SamplingError):
    """A request's grammar and its bans leave no token to sample."""

    _MESSAGE = (
        "no token is left to sample for {what} after {after}: what its grammar admits there its "
        "sampler forbids; take the forbidden tokens, bad words or n-grams away"
    )
