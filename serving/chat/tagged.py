"""Calls of Qwen3-Coder: a function and its parameters in tags, with values that are not quoted."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxshare.serving.chat.formats import MARKS
from jaxshare.serving.chat.json_calls import LONGEST_HEAD
from jaxshare.serving.chat.json_text import read_json
from jaxshare.serving.chat.page import Page

_START, _END = MARKS["hermes"].start, MARKS["hermes"].end
_FUNCTION, _PARAMETER, _NAME = "<function=", "<parameter=", re.compile(r"([^<>\n]+)>")
_MAY_BE_NAME = re.compile(r"[^<>\n]*")
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_MOST_SPACE = 64
"""Whitespace between the end of a parameter and what follows it."""
_WORDS = {"True": True, "False": False, "None": None, "null": None}
"""Values as Python writes them, which templates do."""
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class TaggedCalls:
    """Calls in `<tool_call>`, anywhere in the content.

    A value ends at `</parameter>` where another parameter or the end of the function follows: other
    marks that it quotes are its own.
    """

    def __init__(self, page: Page):
        self._page = page

    def read(self, final: bool) -> bool:
        """Reads content up to the next call."""
        text, mark = self._page.take((_START,), final)
        self._page.prose.write(text)
        if mark:
            self._open()
        return bool(mark)

    def _open(self) -> None:
        self._written, self._problem = [_START], ""
        self._name, self._parameter, self._value = "", "", []
        self._arguments: dict[str, Any] = {}
        self._is_started = False
        self._page.state = self._before_function

    def _skip(self, count: int) -> str:
        text = self._page.skip(count)
        self._written.append(text)
        return text

    def _skip_space(self) -> str:
        """Skips whitespace, and returns the text after it."""
        text = self._page.text.lstrip()
        self._skip(len(self._page.text) - len(text))
        return text

    def _named(self, mark: str) -> str | None:
        """The name in a tag that is next in the text; None while it is not complete.

        Raises:
          ValueError: there is another text.
        """
        text = self._page.text
        if name := text.startswith(mark) and _NAME.match(text, len(mark)):
            self._skip(name.end())
            return name[1].strip()
        inner = text.removeprefix(mark)
        is_open = inner != text and len(text) < LONGEST_HEAD and _MAY_BE_NAME.fullmatch(inner)
        if mark.startswith(text) or is_open:
            return None
        raise ValueError(f"there is no {mark}NAME> where it should be")

    def _before_function(self, final: bool) -> bool:
        self._skip_space()
        try:
            name = self._named(_FUNCTION)
        except ValueError as error:
            return self._break(str(error))
        if name is None:
            return final and self._break("it ends before a function's name")
        self._name, self._is_started = name, self._page.ledger.start(name)
        self._page.state = self._before_parameter
        return True

    def _before_parameter(self, final: bool) -> bool:
        text = self._skip_space()
        if text.startswith(_END_FUNCTION):
            self._skip(len(_END_FUNCTION))
            self._page.state = self._after_function
            return True
        if _END_FUNCTION.startswith(text):
            return final and self._break("it ends before its function does")
        try:
            name = self._named(_PARAMETER)
        except ValueError as error:
            return self._break(str(error))
        if name is None:
            return final and self._break("it ends before its function does")
        self._parameter, self._value = name, []
        self._page.state = self._in_value
        return True

    def _in_value(self, final: bool) -> bool:
        text, mark = self._page.take((_END_PARAMETER,), final)
        self._written.append(text)
        self._value.append(text)
        if not mark:
            return final and self._break(f"its parameter {self._parameter} has no end")
        self._written.append(mark)
        self._page.state = self._after_value
        return True

    def _after_value(self, final: bool) -> bool:
        """Decides whether a parameter has ended, or quotes its end."""
        rest = self._page.text[: _MOST_SPACE + 16].lstrip()
        space = len(self._page.text[: _MOST_SPACE + 16]) - len(rest)
        marks = (_PARAMETER, _END_FUNCTION)
        if space <= _MOST_SPACE and rest.startswith(marks):
            self._add("".join(self._value))
            self._page.state = self._before_parameter
            return True
        if space <= _MOST_SPACE and not final and any(mark.startswith(rest) for mark in marks):
            return False
        self._value.append(_END_PARAMETER)
        self._page.state = self._in_value
        return True

    def _add(self, text: str) -> None:
        """Takes a parameter; of a wrong one, the problem."""
        name, ledger = self._parameter, self._page.ledger
        try:
            if name in self._arguments:
                raise ValueError(f"it has {name} twice")
            value = read_value(
                text.removeprefix("\n").removesuffix("\n"), ledger.schema(self._name, name)
            )
        except ValueError as error:
            self._problem = self._problem or f"its parameter {name}: {error}"
            return
        separator = ", " if self._arguments else "{"
        self._arguments[name] = value
        if self._is_started and not self._problem:
            pair = (
                f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
            )
            ledger.arguments(separator + pair)

    def _after_function(self, final: bool) -> bool:
        text = self._skip_space()
        if not text.startswith((_END, _START)) and not (final and not text):
            waits = not final and any(mark.startswith(text) for mark in (_END, _START))
            return not waits and self._break("there is text after its function")
        if text.startswith(_END):
            self._skip(len(_END))
        self._page.settle(self._close, "".join(self._written))
        self._page.state = self.read
        return True

    def _close(self) -> None:
        if self._problem:
            raise ValueError(self._problem)
        if self._is_started and self._arguments:
            self._page.ledger.arguments("}")
        self._page.ledger.finish(self._name, self._arguments)

    def _break(self, reason: str) -> bool:
        self._problem = self._problem or reason
        self._page.state = self._broken
        return True

    def _broken(self, final: bool) -> bool:
        """Reads on to where a broken call ends."""
        text, mark = self._page.take((_END, _START), final)
        self._written.append(text)
        if not mark and not final:
            return False
        self._written.append(mark if mark == _END else "")
        self._page.settle(self._close, "".join(self._written))
        self._page.state = self.read
        if mark == _START:
            self._open()
        return bool(mark)


def read_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Returns the value of a parameter that is not quoted.

    Args:
      text: of the value.
      schema: of the parameter. Where it lets texts through, or tells no type, the value is the text,
        but for null where that is a type of it; otherwise the text is JSON, or True, False or None.

    Raises:
      ValueError: it is no valid JSON.
    """
    types = _types_of(schema)
    if "null" in types and text in ("null", "None"):
        return None
    if not types or "string" in types:
        text.encode()  # a UnicodeEncodeError, for half of a character, is a ValueError
        return text
    return _WORDS[text] if text in _WORDS else read_json(text)


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of the types that a schema lets through; none if it does not tell."""
    found: set[str] = set()
    if (named := schema.get("type")) is not None:
        found |= {named} if isinstance(named, str) else {*named}
    elif values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        found |= {_TYPES.get(type(value), "object") for value in values}
    elif parts := schema.get("anyOf") or schema.get("oneOf"):
        each = [_types_of(part) if isinstance(part, Mapping) else set() for part in parts]
        found = set().union(*each) if all(each) else set()
    return found | {"null"} if found and schema.get("nullable") is True else found
