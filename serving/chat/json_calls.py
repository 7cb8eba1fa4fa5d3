"""One call whose arguments are JSON, in each of the forms in which models write it."""

import json
import re
from typing import Any

from jaxshare.serving.chat.formats import ARGS, SEPARATOR
from jaxshare.serving.chat.json_text import ObjectEnd, read_object
from jaxshare.serving.chat.ledger import CallLedger

_KEYS = ("arguments", "parameters")
_IN_OBJECT = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?P<arguments>\{)'
)
_HEADS = {
    "hermes": _IN_OBJECT,
    "llama3": _IN_OBJECT,
    "deepseek": re.compile(
        rf'\s*function{SEPARATOR}(?P<name>[^"\n]+)\n\s*```(?:json)?\s*(?P<arguments>\{{)'
    ),
    "deepseek-v3.1": re.compile(rf'\s*(?P<name>[^<"\n]+){SEPARATOR}\s*(?P<arguments>\{{)'),
    "mistral": re.compile(
        rf'\s*(?P<name>[^\["\n]+)(?:\[CALL_ID\][^\["\n]*)?{re.escape(ARGS)}\s*(?P<arguments>\{{)'
    ),
}
"""The text of a call up to the first brace of its arguments, in which its name is known."""
_TAILS = {
    "deepseek": re.compile(r"\s*```\s*"),
    "deepseek-v3.1": re.compile(r"\s*"),
    "mistral": re.compile(r"\s*"),
}
"""The text after the arguments, in the forms that name a function before an object of arguments."""
LONGEST_HEAD = 2048
"""The characters of a call in which its name may be known before its end."""


class JsonCall:
    """One call as its text comes; it is started as soon as its name is known.

    Attributes:
      text: the text up to now, without marks around it.
      named: the name is known, and the arguments have begun.
    """

    def __init__(self, form: str, ledger: CallLedger):
        self.text, self.named = "", False
        self._form, self._ledger = form, ledger
        self._end: ObjectEnd | None = None

    def add(self, text: str) -> None:
        """Takes the next piece of the text."""
        # A head that is long is told at the end: matching it again for every piece would be slow.
        wanted = not self.named and len(self.text) < LONGEST_HEAD
        self.text += text
        if wanted and (head := _HEADS[self._form].match(self.text[:LONGEST_HEAD])):
            self.named = True
            if self._ledger.start(_name_in(head["name"], self._form)):
                self._end, text = ObjectEnd(), self.text[head.start("arguments") :]
        if self._end:
            self._ledger.arguments(text[: self._end.feed(text)])

    def close(self) -> None:
        """Completes the call.

        Raises:
          ValueError: it cannot be run, with the reason.
        """
        if self._form in _TAILS:
            name, arguments = self._named_before()
        else:
            name, arguments = call_in(read_object(self.text))
        self._ledger.finish(name, arguments)

    def _named_before(self) -> tuple[str, dict[str, Any]]:
        head = _HEADS[self._form].match(self.text)
        if not head:
            raise ValueError("it has no name with JSON of arguments after it")
        given = self.text[head.start("arguments") :]
        end = ObjectEnd().feed(given)
        if not _TAILS[self._form].fullmatch(given[end:]):
            read_object(given)  # says what is wrong with the JSON, where it is that
            raise ValueError("there is text after the JSON of its arguments")
        return _name_in(head["name"], self._form), read_object(given[:end])


def call_in(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call that is an object.

    Raises:
      ValueError: it has no name, or arguments that are no object.
    """
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    given = [key for key in _KEYS if key in value]
    if len(given) > 1:
        raise ValueError("it has both arguments and parameters")
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # some write the object's text
        arguments = read_object(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    return name, arguments


def is_call(value: dict[str, Any]) -> bool:
    """Returns True for an object with a name and arguments, which a call is even without marks."""
    return isinstance(value.get("name"), str) and any(key in value for key in _KEYS)


def _name_in(text: str, form: str) -> str:
    """The name that a head has; "" for one that is no JSON."""
    if form in _TAILS:
        return text.strip()
    try:
        return json.loads(f'"{text}"')
    except ValueError:
        return ""
