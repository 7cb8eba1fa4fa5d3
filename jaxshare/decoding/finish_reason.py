"""The reasons why rows, requests and sessions end."""

import enum
from typing import Any

from jaxshare.deprecated import warn_renamed


class _FinishReasons(enum.EnumType):
    """Finds the members of `FinishReason` by their former names, too."""

    def __getattr__(cls, name: str) -> Any:
        former = {"BUDGET": "LENGTH", "FULL": "CACHE_FULL", "NOT_A_NUMBER": "ERROR"}
        if name not in former:
            raise AttributeError(f"{cls.__name__} has no member {name!r}")
        warn_renamed(f"FinishReason.{name}", f"FinishReason.{former[name]}")
        return cls[former[name]]


class FinishReason(enum.IntEnum, metaclass=_FinishReasons):
    """The reason why a row, a request or a session is not running.

    `str()` of one is what commands print: "stop", "cache_full".
    """

    RUNNING = 0
    STOP = 1
    """A stop token was sampled."""
    LENGTH = 2
    """As many tokens were sampled, or passes run, as were asked for."""
    CACHE_FULL = 3
    """The row's block is full, or the one that its steps move to."""
    UNUSED = 4
    PAUSED = 5
    """Set by the host."""
    STEP = 6
    """The row's step has ended and no opening of the next one is prepared."""
    ANSWER = 7
    """There is an answer."""
    ERROR = 8
    """Logits were not finite, so that nothing could be sampled; or, of a request, an exception."""
    STOP_TEXT = 9
    """The text contains one of the request's stop texts; found by the host."""
    CANCELLED = 10
    """The caller has cancelled the request."""
    NO_TOKEN = 11
    """Bans and a grammar left no token to sample; of a request, an exception."""

    def __str__(self) -> str:
        return self.name.lower()
