"""The sizes of tools' results, which are bounded before a dialogue or a journal has them."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxshare.serving.agents.errors import AgentError

MOST_BYTES = 2**28
"""The default bound of what a tool returns to an agent, which journals and states keep."""
MOST_CHARACTERS = 200_000
"""The default bound of a tool's result in a dialogue, some 50,000 tokens of English."""
_ITEM = 32
"""Bytes that are counted for an item of a list, beside those of its data."""


class ResultError(AgentError):
    """A tool has returned more than may be kept; the error has the bound."""


def check_value(name: str, value: Any, most: int) -> None:
    """Raises ResultError if a tool's result has more than `most` bytes, before it is copied.

    Counts texts, bytes and arrays, and those in lists, dicts and the like, up to the bound.
    """
    counted, seen = _bytes_of(value), {id(value)}
    rest = [value]
    while rest and counted <= most:
        one = rest.pop()
        parts = _PARTS[type(one)](one) if type(one) in _PARTS else ()
        counted += _ITEM * len(parts)
        if counted > most:
            break
        for part in parts:
            if type(part) not in _SCALARS and id(part) not in seen:
                seen.add(id(part))
                counted += _bytes_of(part)
                rest.append(part)
    if counted > most:
        raise ResultError(
            f"the tool {name} has returned more than {most:,} bytes, which states and journals would "
            "keep; return less, such as the path of a file, or give tool a larger most_bytes"
        )


def check_text(text: str, most: int) -> str:
    """Returns the text of a tool's result for the dialogue.

    Raises:
      ResultError: it has more than `most` characters.
    """
    if len(text) > most:
        raise ResultError(
            f"the result has {len(text):,} characters, and at most {most:,} (most_characters of llm) "
            "come into the dialogue; ask for less"
        )
    return text


_SCALARS = {type(None), bool, int, float, complex}
_PARTS: dict[type, Callable[[Any], Sequence[Any]]] = {
    dict: lambda one: (*one.keys(), *one.values()),
    **dict.fromkeys((list, tuple), lambda one: one),
    **dict.fromkeys((set, frozenset, collections.deque), tuple),
}


def _bytes_of(value: Any) -> int:
    """The bytes of a value's own data."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return value.nbytes if isinstance(value, np.ndarray | jax.Array | memoryview) else 0
