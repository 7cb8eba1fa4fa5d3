"""Answers of chats as they are sampled: thinking, content and calls, whole and in pieces.

Chats and responses write them in different forms; what is read is the same.
"""

import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import Any

from jaxshare.serving.chat import (
    AnswerStream,
    CallFinished,
    ChatEvent,
    ChatFormat,
    ContentDelta,
    ThinkingDelta,
    chat_format,
)
from jaxshare.serving.http.generation.tool_choice import Offer


@dataclasses.dataclass(frozen=True)
class WrittenCall:
    """A call in an answer: its id, the name of the function, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class WrittenAnswer:
    """An answer: thinking, or None; content; calls in order."""

    thinking: str | None
    content: str
    calls: tuple[WrittenCall, ...]


@dataclasses.dataclass(frozen=True)
class AnswerDelta:
    """The next piece of an answer, of one kind.

    Attributes:
      thinking, content: the text; "" for another kind.
      call: the number of the call that it is about; None for another kind.
      started: the id and the name of that call, with its first piece.
      arguments: the piece of its arguments.
    """

    thinking: str = ""
    content: str = ""
    call: int | None = None
    started: tuple[str, str] | None = None
    arguments: str = ""


def format_of(tokenizer: Any, given: str | None, tools: Sequence[Any], tail: str) -> ChatFormat:
    """Returns the form of the answers to a prompt.

    Args:
      tokenizer: of the model.
      given: the name of a form; None for the one that the chat template tells.
      tools: that are offered.
      tail: the end of the prompt as text, which may have opened a think block.
    """
    if given is not None:
        return ChatFormat(given).after(tail)
    try:
        more = {"tools": [tool.schema() for tool in tools]} if tools else {}
        template = tokenizer.get_chat_template(**more)
    except ValueError:  # several by name, and none of them the default
        template = None
    return chat_format(template if isinstance(template, str) else None).after(tail)


class AnswerReader:
    """Reads one answer as its text comes.

    A call in the model's own form is given when it is complete and valid, because a piece of it that
    has been sent cannot be taken back; the text of another one is content.
    """

    def __init__(self, format: ChatFormat, offer: Offer):
        """Makes a reader of answers in this form to this offer."""
        self._offer, self._prefix = offer, f"call_{secrets.token_hex(12)}_"
        self._stream = AnswerStream(format, tools=offer.tools, id_prefix=self._prefix)
        self._forced: list[str] = []
        self._calls: list[WrittenCall] = []
        self._content = ""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes the next piece of the text; returns what is known by it."""
        if not self._offer.is_forced:
            return self._deltas(self._stream.feed(text))
        is_first = not self._forced and bool(text)
        self._forced.append(text)
        if self._offer.named is None or not text:
            return []
        started = (f"{self._prefix}1", self._offer.named.name) if is_first else None
        return [AnswerDelta(call=0, started=started, arguments=text)]

    def finish(self) -> list[AnswerDelta]:
        """Ends the text; returns the rest."""
        if not self._offer.is_forced:
            deltas = self._deltas(self._stream.finish())
            self._content = self._stream.answer.content
            return deltas
        text = "".join(self._forced)
        if self._offer.named is not None:
            if text:
                self._calls = [WrittenCall(f"{self._prefix}1", self._offer.named.name, text)]
            return []
        calls = self._offer.calls(text)
        if calls is None:  # it was cut off
            self._content = text
            return [AnswerDelta(content=text)]
        return [self._call(name, arguments) for name, arguments in calls]

    def answer(self) -> WrittenAnswer:
        """Returns the whole answer, after `finish`."""
        thinking = None if self._offer.is_forced else self._stream.answer.thinking
        return WrittenAnswer(thinking, self._content, tuple(self._calls))

    def _deltas(self, events: Sequence[ChatEvent]) -> list[AnswerDelta]:
        found = []
        for event in events:
            if isinstance(event, ContentDelta):
                found.append(AnswerDelta(content=event.text))
            elif isinstance(event, ThinkingDelta):
                found.append(AnswerDelta(thinking=event.text))
            elif isinstance(event, CallFinished) and (self._offer.parallel or not self._calls):
                arguments = json.dumps(event.call.arguments, ensure_ascii=False)
                found.append(self._call(event.call.name, arguments))
        return found

    def _call(self, name: str, arguments: str) -> AnswerDelta:
        """Adds a complete call."""
        number = len(self._calls)
        call = WrittenCall(f"{self._prefix}{number + 1}", name, arguments)
        self._calls.append(call)
        return AnswerDelta(call=number, started=(call.id, name), arguments=arguments)
