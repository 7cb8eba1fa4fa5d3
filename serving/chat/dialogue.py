"""Messages with calls of functions and their results, in the forms that chat templates expect."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxshare.argument_checks import as_list, shown
from jaxshare.serving.chat.answers import ToolCall
from jaxshare.serving.chat.json_text import read_object

Messages = list[dict[str, Any]]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns messages as dicts, with calls of functions in one form.

    Args:
      messages: each with a role. An assistant's may have `tool_calls`: each in OpenAI's form,
        {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}, its inner part,
        or a ToolCall; arguments are an object or its JSON text. A message of the role "tool" has a
        result as its content.

    Raises:
      TypeError, ValueError: a message has another form.
    """
    return [_checked(number, one) for number, one in enumerate(as_list("messages", messages))]


def _checked(number: int, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"message {number} is {shown(given)}; give a dict with role and content")
    message = dict(given)
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"message {number} has the role {shown(role)}; it must be a text")
    if role == "tool" and not isinstance(message.get("content"), str | list | dict):
        raise ValueError(
            f"message {number} has the role tool and the content {shown(message.get('content'))}; "
            "give the result's text"
        )
    if message.get("tool_calls") is None:
        return message
    if role != "assistant":
        raise ValueError(f"message {number} has tool_calls and the role {role}; use assistant")
    calls = as_list(f"tool_calls of message {number}", message.pop("tool_calls"))
    if calls:
        message["tool_calls"] = [_checked_call(number, one) for one in calls]
    return message


def _checked_call(number: int, given: Any) -> dict[str, Any]:
    call = given
    if isinstance(given, ToolCall):
        call = {"id": given.id, "name": given.name, "arguments": given.arguments}
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ValueError(
            f"message {number} has the call {shown(given)}; give a function with its name and "
            "arguments"
        )
    arguments = inner.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = read_object(arguments)
        except ValueError as error:
            raise ValueError(
                f"message {number} has a call of {inner['name']} whose arguments are a text: {error}"
            ) from None
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"message {number} has a call of {inner['name']} with {shown(arguments)}; arguments are "
            "an object"
        )
    function = {"name": inner["name"], "arguments": dict(arguments)}
    number_of_call = {"id": call["id"]} if call.get("id") is not None else {}
    return {**number_of_call, "type": "function", "function": function}


def has_calls(messages: Messages) -> bool:
    """Returns True if there is a message with calls."""
    return any("tool_calls" in message for message in messages)


def forms_of_calls(messages: Messages) -> Iterator[Messages]:
    """Yields messages in all forms in which templates want calls, the most frequent one first.

    Arguments may have to be objects or their text, a missing content absent, empty or None, and ids
    of nine letters and digits, as Mistral's templates have them.
    """
    for given in (messages, [_with_short_ids(message) for message in messages]):
        for as_text in (False, True):
            for contents in ((), ("",), (None,)):
                yield [_in_form(message, as_text, contents) for message in given]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        made["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        made["tool_calls"] = [
            call | ({"id": _short_id(str(call["id"]))} if "id" in call else {})
            for call in message["tool_calls"]
        ]
    return made


def _short_id(id: str) -> str:
    """An id of nine letters and digits: the given one, or its digest."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _in_form(message: dict[str, Any], as_text: bool, contents: tuple[Any, ...]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    made = {key: value for key, value in message.items() if key != "content" or value is not None}
    if contents and not made.get("content"):
        made["content"] = contents[0]
    if as_text:
        made["tool_calls"] = [
            _renamed(call, arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False))
            for call in made["tool_calls"]
        ]
    return made


def with_other_names(messages: Messages) -> Messages:
    """Returns messages in which every call is of a function with another name."""
    return [
        message
        if "tool_calls" not in message
        else message
        | {
            "tool_calls": [
                _renamed(call, name=f"{call['function']['name']}_")
                for call in message["tool_calls"]
            ]
        }
        for message in messages
    ]


def _renamed(call: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return call | {"function": call["function"] | changed}
