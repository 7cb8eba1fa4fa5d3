"""The items of a response's input as messages."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxshare.serving.http.errors import bad_request, unsupported
from jaxshare.serving.http.generation.messages import ChatMessage, TextPart

_MOST_ITEMS = 4096


class InputItem(BaseModel):
    """An item of the input: a message, a call, a call's result, or thinking, which is left out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[TextPart], Field(max_length=1024)] | None = None


Input = str | Annotated[list[InputItem], Field(min_length=1, max_length=_MOST_ITEMS)]


def messages_of(given: Input, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of an input.

    Args:
      given: a text, which a user says, or items.
      earlier: messages before it, which have the names of functions whose results are given.

    Raises:
      ApiError: an item has another form.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    made: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        if item.type == "message":
            if item.role is None:
                raise bad_request(f"input item {number} has no role", "input")
            made.append(ChatMessage(role=item.role, content=item.content).as_dict(number))
        elif item.type == "function_call":
            _add_call(made, _call(item, number))
        elif item.type == "function_call_output":
            made.append(_result(item, number, [*earlier, *made]))
        elif item.type != "reasoning":
            raise unsupported(
                f"input.{number} of type {item.type[:32]}",
                "items are messages, function_call and function_call_output",
            )
    if not made:
        raise bad_request("input has no message; give at least one", "input")
    return made


def _call(item: InputItem, number: int) -> dict[str, Any]:
    if not item.name or not item.call_id:
        raise bad_request(f"input item {number} is a call without call_id or name", "input")
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _add_call(made: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Adds a call to the assistant's message before it, or to a new one."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": None})
    made[-1].setdefault("tool_calls", []).append(call)


def _result(item: InputItem, number: int, before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    calls = {call["id"]: call for one in before for call in one.get("tool_calls", ())}
    if item.call_id is None or item.output is None:
        raise bad_request(
            f"input item {number} is a call's result without call_id or output", "input"
        )
    if item.call_id not in calls:
        raise bad_request(f"input item {number} is the result of a call that is not there", "input")
    return ChatMessage(
        role="tool",
        content=item.output,
        name=calls[item.call_id]["function"]["name"],
        tool_call_id=item.call_id,
    ).as_dict(number)
