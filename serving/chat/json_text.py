"""Reading of JSON that a model has written, as it comes and when it is complete."""

import json
import re
from typing import Any

from jaxshare.argument_checks import shown

_IN_STRING = re.compile(r'["\\]')
_BRACKET = re.compile(r'["{}\[\]]')
_BEFORE_MARK = re.compile(r'["<]')


class ObjectEnd:
    """Finds where an object ends whose text comes in pieces, from its first brace."""

    def __init__(self) -> None:
        self.found = False
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int:
        """Returns the number of the next characters that belong to the object."""
        at = 0
        while at < len(text) and not self.found:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            hit = (_IN_STRING if self._in_string else _BRACKET).search(text, at)
            if hit is None:
                return len(text)
            at = hit.end()
            if self._in_string:
                self._escaped, self._in_string = hit[0] == "\\", hit[0] != '"'
            elif hit[0] == '"':
                self._in_string = True
            else:
                self._depth += 1 if hit[0] in "{[" else -1
                self.found = self._depth <= 0
        return at


class StopMark:
    """Finds the first of several marks outside strings, in a text that comes in pieces.

    A mark in a string is an argument's text: what a model quotes cannot end its call and begin
    another.
    """

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks, self._in_string = marks, False

    def feed(self, text: str, final: bool) -> tuple[int, str | None]:
        """Returns the number of characters before a mark, and the mark.

        Without a mark, the characters that are before none, whatever follows; they are not given
        again. `final`: nothing follows.
        """
        at = 0
        while at < len(text):
            if self._in_string:
                hit = _IN_STRING.search(text, at)
                if hit is None:
                    break
                if hit[0] == '"':
                    self._in_string, at = False, hit.end()
                elif hit.end() == len(text) and not final:
                    return hit.start(), None
                else:
                    at = hit.end() + 1
                continue
            hit = _BEFORE_MARK.search(text, at)
            if hit is None:
                break
            at = hit.start()
            if mark := next((mark for mark in self._marks if text.startswith(mark, at)), None):
                return at, mark
            if not final and any(mark.startswith(text[at:]) for mark in self._marks):
                return at, None
            self._in_string, at = hit[0] == '"', hit.end()
        return len(text), None


def read_object(text: str) -> dict[str, Any]:
    """Reads a JSON object; see `read_json`.

    Raises:
      ValueError: with the reason: `read_json` refuses it, or it is no object.
    """
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def read_json(text: str) -> Any:
    """Reads JSON; strings may have line breaks in them, as models write them.

    Raises:
      ValueError: with the reason: it is no valid JSON, or has a name twice in an object, a number
        that is not finite, or half of a character.
    """
    try:
        value = json.loads(
            text, strict=False, object_pairs_hook=_unique, parse_constant=_not_finite
        )
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is not valid JSON: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it is not valid JSON: it has half of a character") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name)} is in an object twice")
        made[name] = value
    return made


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
