"""An answer with its thinking and its calls of functions, and the events by which it is streamed."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that a model has written.

    Attributes:
      name: of the function.
      arguments: by name, of types that JSON has.
      id: of the call, unique within an answer.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenCall:
    """A text that has the marks of a call and cannot be run: `text` as written, and the `reason`."""

    text: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A model's answer, read by `parse_answer` or `AnswerStream`.

    Attributes:
      content: the text for the reader. Whitespace beside a think block or a call is left out where
        there is no text on both sides; everything else is as written, broken calls included.
      thinking: the text of the think block, without whitespace around it; None if there is none.
      tool_calls: the calls that can be run, in order.
      broken: the calls that cannot, in order.
    """

    content: str
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Returns the assistant's message that continues the dialogue, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next piece of `ChatAnswer.content`."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """The next piece of `ChatAnswer.thinking`."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a known function has begun; `index` counts the started calls from 0.

    It may still break: run a function only after `CallFinished`.
    """

    index: int
    name: str
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next piece of the JSON text of a started call's arguments."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallFinished:
    """A started call is complete and can be run."""

    index: int
    call: ToolCall


@dataclasses.dataclass(frozen=True, slots=True)
class CallBroken:
    """A call cannot be run, and its text follows as content; `index` is None if it had not started."""

    index: int | None
    call: BrokenCall


ChatEvent = ContentDelta | ThinkingDelta | CallStarted | ArgumentsDelta | CallFinished | CallBroken
