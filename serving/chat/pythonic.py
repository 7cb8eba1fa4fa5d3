"""Calls that are written as a Python list of them: `[f(a=1), g(b="x")]`, with literals only."""

import ast
import json
import math
import re
import warnings
from typing import Any

START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(", re.ASCII)
"""The start of a list of calls."""
MAY_START = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?", re.ASCII)
"""A text of which one cannot know yet whether it starts a list of calls."""
NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(", re.ASCII)
MAY_BE_NAME = re.compile(r"\s*(?:[A-Za-z_][\w.]*\s*)?", re.ASCII)
_HIT = re.compile(r"""["'()\[\]{}]""")
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


class CallEnd:
    """Finds where a call in Python ends whose text comes in pieces, from its name."""

    def __init__(self) -> None:
        self.found = False
        self._depth, self._quote, self._escaped = 0, "", False

    def feed(self, text: str) -> int:
        """Returns the number of the next characters that belong to the call."""
        at = 0
        while at < len(text) and not self.found:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            hit = (_IN_STRING[self._quote] if self._quote else _HIT).search(text, at)
            if hit is None:
                return len(text)
            at = hit.end()
            if self._quote:
                self._escaped = hit[0] == "\\"
                self._quote = self._quote if self._escaped else ""
            elif hit[0] in "'\"":
                self._quote = hit[0]
            else:
                self._depth += 1 if hit[0] in "([{" else -1
                self.found = self._depth <= 0
        return at


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call with arguments by name, all of them literals.

    Raises:
      ValueError: it is no such call, with the reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of "\d" in a string
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        told = getattr(error, "msg", str(error))
        raise ValueError(f"it is not valid Python: {told}") from None
    if not isinstance(call, ast.Call) or not (name := _dotted(call.func)):
        raise ValueError("it is no call of a function by its name")
    if call.args:
        raise ValueError("it has an argument without a name")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(
                "it has arguments in **" if keyword.arg is None else f"it has {keyword.arg} twice"
            )
        try:
            arguments[keyword.arg] = _as_json(ast.literal_eval(keyword.value))
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise ValueError(f"its argument {keyword.arg} is no literal that JSON has") from None
    return name, arguments


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _as_json(value: Any) -> Any:
    """A literal with lists for tuples; raises ValueError for what JSON does not have."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key that is no text")
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if not isinstance(value, str | int | float | None):
        raise ValueError("a type that JSON does not have")
    if isinstance(value, str):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value
