"""The calls of one answer: which are of known functions, how they are numbered, what is told of them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxshare.serving.chat.answers import (
    ArgumentsDelta,
    BrokenCall,
    CallBroken,
    CallFinished,
    CallStarted,
    ChatEvent,
    ToolCall,
)
from jaxshare.serving.chat.tools import FunctionTool


class CallLedger:
    """Judges the calls of an answer, one after the other, and tells of them.

    Attributes:
      calls, broken: those that are complete.
    """

    def __init__(
        self,
        tools: Mapping[str, FunctionTool] | None,
        id_prefix: str,
        tell: Callable[[ChatEvent], None],
    ):
        """Makes an empty ledger.

        Args:
          tools: by name; None takes a call of any name, with any arguments.
          id_prefix: goes before the number of a call in its id.
          tell: takes the events.
        """
        self.calls: list[ToolCall] = []
        self.broken: list[BrokenCall] = []
        self._tools, self._id_prefix, self._tell = tools, id_prefix, tell
        self._started, self._open, self._has_arguments = 0, "", False

    def start(self, name: str) -> bool:
        """Starts the next call and returns True if there is a function of this name."""
        if not name or (self._tools is not None and name not in self._tools):
            return False
        self._started, self._open, self._has_arguments = self._started + 1, name, False
        self._tell(CallStarted(self._started - 1, name, f"{self._id_prefix}{self._started}"))
        return True

    def schema(self, name: str, argument: str) -> Mapping[str, Any]:
        """The JSON schema of a function's argument; an empty one if there is none."""
        known = (self._tools or {}).get(name)
        properties = known.parameters.get("properties", {}) if known else {}
        schema = properties.get(argument)
        return schema if isinstance(schema, Mapping) else {}

    def arguments(self, text: str) -> None:
        """Tells the next piece of the started call's arguments, as JSON."""
        if text:
            self._has_arguments = True
            self._tell(ArgumentsDelta(self._started - 1, text))

    def finish(self, name: str, arguments: dict[str, Any]) -> None:
        """Completes a call.

        Raises:
          ValueError: there is no such function or the arguments do not fit, with the reason; the
            call is to be broken.
        """
        if self._tools is not None:
            if name not in self._tools:
                raise ValueError(
                    f"there is no function {name!r}; there are {', '.join(self._tools) or 'none'}"
                )
            self._tools[name].check(arguments)
        if not self._open:
            self.start(name)
        if not self._has_arguments:
            self.arguments(json.dumps(arguments, ensure_ascii=False))
        self.calls.append(ToolCall(name, arguments, f"{self._id_prefix}{self._started}"))
        self._tell(CallFinished(self._started - 1, self.calls[-1]))
        self._open = ""

    def fail(self, text: str, reason: str) -> None:
        """Breaks a call that was started, or was not."""
        self.broken.append(BrokenCall(text, reason))
        self._tell(CallBroken(self._started - 1 if self._open else None, self.broken[-1]))
        self._open = ""
