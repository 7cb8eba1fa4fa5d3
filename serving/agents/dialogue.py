"""Messages of a dialogue with the model, with thinking, calls of functions and their results."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from jaxshare.argument_checks import as_list, shown
from jaxshare.serving.chat import ToolCall
from jaxshare.serving.chat.dialogue import checked_messages

_TEXTS = ("reasoning", "tool_call_id", "name")
_KEYS = {"role", "content", "reasoning_content", "tool_calls", *_TEXTS}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Message:
    """One message of a dialogue.

    Attributes:
      role: "system", "user", "assistant", or "tool" for the result of a call.
      content: the text.
      reasoning: the text of the model's think block; None if there is none.
      tool_calls: the calls that the model has written.
      tool_call_id, name: of a result, the id of its call and the name of its function.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """Returns a message that shares no mutable part with the given one.

        Args:
          given: a Message; or a dict with a role and a content, and the further keys of chat
            templates: reasoning_content, tool_calls, tool_call_id and name. An assistant's content
            may be None beside calls.

        Raises:
          ValueError: it is no message.
        """
        if isinstance(given, cls):
            if type(given.role) is type(given.content) is str and not given._has_more:
                return given
            given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{shown(given)} is no message: give a text, a Message, or a dict with role and "
                "content"
            )
        if not {"role", "content"} <= given.keys() <= _KEYS:
            raise ValueError(
                "a message has a role and a content; this has "
                f"{', '.join(map(repr, given)) or 'nothing'}"
            )
        return cls(*_checked(given))

    @property
    def _has_more(self) -> bool:
        """True if there is anything but the role and the content."""
        return bool(self.tool_calls) or not (
            self.reasoning is self.tool_call_id is self.name is None
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates take, of types that JSON has."""
        calls = [
            ({"id": call.id} if call.id else {})
            | {
                "type": "function",
                "function": {"name": call.name, "arguments": copy.deepcopy(call.arguments)},
            }
            for call in self.tool_calls
        ]
        more = {
            "reasoning_content": self.reasoning,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        given = {key: value for key, value in more.items() if value is not None}
        return {"role": self.role, "content": self.content, **given}

    def __repr__(self) -> str:
        # Journals have digests of it: that of a message without more must not change.
        fields = [f"role={self.role!r}", f"content={self.content!r}"]
        for name in ("reasoning", "tool_calls", "tool_call_id", "name"):
            if (value := getattr(self, name)) not in (None, ()):
                fields.append(f"{name}={value!r}")
        return f"Message({', '.join(fields)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Message":
        if not self.tool_calls:
            return self
        return dataclasses.replace(self, tool_calls=copy.deepcopy(self.tool_calls, memo))

    def __setstate__(self, state: list[Any]) -> None:
        # A pickle of a former version has the role and the content alone.
        defaults = ("", "", None, (), None, None)
        for field, value in zip(
            dataclasses.fields(self), [*state, *defaults[len(state) :]], strict=True
        ):
            object.__setattr__(self, field.name, value)


def as_messages(content: Any) -> tuple[Message, ...]:
    """Returns what `llm` is given as messages: a text is the user's.

    Raises:
      ValueError: something is no message.
      TypeError: it is neither a text nor a message nor a list.
    """
    if isinstance(content, str):
        return (Message("user", content),)
    if isinstance(content, Message | Mapping):
        content = (content,)
    return tuple(map(Message.of, as_list("content", content)))


def _checked(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields of a message from a dict."""
    role, content = given["role"], given["content"]
    calls = _calls(given) if given.get("tool_calls") else ()
    if content is None and calls:
        content = ""
    texts = {key: given.get(key) for key in _TEXTS}
    if texts["reasoning"] is None:
        texts["reasoning"] = given.get("reasoning_content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"{shown(dict(given))} is no message: its role and its content have to be texts"
        )
    if wrong := [key for key, text in texts.items() if not isinstance(text, str | None)]:
        raise ValueError(f"{wrong[0]} of a message is {shown(texts[wrong[0]])}; give a text")
    return role, content, texts["reasoning"], calls, texts["tool_call_id"], texts["name"]


def _calls(given: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    [message] = checked_messages([dict(given)])
    calls = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            copied = json.loads(json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"a call of {name} has arguments that JSON does not have: {error}"
            ) from None
        calls.append(ToolCall(name, copied, str(call.get("id", ""))))
    return tuple(calls)
