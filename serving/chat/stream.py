"""Reading of answers: think blocks, content and calls of functions, whole or as they are written."""

from collections.abc import Sequence
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.serving.chat.answers import ChatAnswer, ChatEvent, ContentDelta, ThinkingDelta
from jaxshare.serving.chat.formats import THINK, ChatFormat, as_format
from jaxshare.serving.chat.ledger import CallLedger
from jaxshare.serving.chat.page import Page
from jaxshare.serving.chat.prose import Prose
from jaxshare.serving.chat.readers import reader
from jaxshare.serving.chat.tools import as_tools


def parse_answer(
    text: str,
    format: ChatFormat | str = "plain",
    *,
    tools: Sequence[Any] | None = None,
    id_prefix: str = "call_",
) -> ChatAnswer:
    """Reads a whole answer.

    A call ends where its text says so outside of JSON strings: marks that a model quotes in an
    argument are the argument's. A text that has the marks of a call and is none that can be run
    stays in the content as written, and is in `broken` with the reason.

    Args:
      text: as the model has written it, with the texts of special tokens.
      format: of the answer, from `chat_format`, or its name; `ChatFormat.after` says whether the
        prompt has opened a think block already.
      tools: that were offered, as in `as_tools`: a call of another one, or with arguments that do
        not fit, is broken. None takes calls of any name; without any, no text is a call.
      id_prefix: goes before the number of a call, from 1, in its id.

    Raises:
      TypeError, ValueError: there is no such format, or something else is no tool.
    """
    stream = AnswerStream(format, tools=tools, id_prefix=id_prefix)
    stream.feed(text)
    stream.finish()
    return stream.answer


class AnswerStream:
    """Reads an answer as it is written.

    However the text is cut, the pieces of content, of thinking and of arguments, put together, are
    what `parse_answer` gives for the whole. A text that may be the start of a mark is held back
    until it is known.
    """

    def __init__(
        self,
        format: ChatFormat | str = "plain",
        *,
        tools: Sequence[Any] | None = None,
        id_prefix: str = "call_",
    ):
        """Makes a stream; arguments and errors as of `parse_answer`."""
        read, given = as_format(format), None if tools is None else as_tools(tools)
        if not isinstance(id_prefix, str):
            raise TypeError(f"id_prefix is {shown(id_prefix)}; it must be a text")
        offered = None if given is None else {tool.name: tool for tool in given}
        self._events: list[ChatEvent] = []
        self._content: list[str] = []
        self._thinking: list[str] | None = None
        self._is_finished = False
        ledger = CallLedger(offered, id_prefix, self._events.append)
        self._page = Page(self._start, Prose(self._tell_content), ledger)
        self._read = reader("plain" if given == () else read.name, self._page)
        self._thought = Prose(self._tell_thinking)
        self._mark = ""  # that opened the think block
        if read.opened:
            self._think(read.opened)
            self._page.state = self._start_of_thinking

    @property
    def answer(self) -> ChatAnswer:
        """The answer as far as it is known."""
        return ChatAnswer(
            "".join(self._content),
            None if self._thinking is None else "".join(self._thinking),
            tuple(self._page.ledger.calls),
            tuple(self._page.ledger.broken),
        )

    def feed(self, text: str) -> list[ChatEvent]:
        """Takes the next piece of the text, and returns what is known by it.

        Raises:
          TypeError: it is no text.
          ValueError: the stream is finished.
        """
        if not isinstance(text, str):
            raise TypeError(f"the piece is {shown(text)}; it must be a text")
        if self._is_finished:
            raise ValueError("the stream is finished; make another one for another answer")
        self._page.text += text
        return self._run(False)

    def finish(self) -> list[ChatEvent]:
        """Ends the text, and returns what was held back; nothing the second time."""
        if self._is_finished:
            return []
        self._is_finished = True
        told = self._run(True)
        self._page.prose.end()
        return _joined([*told, *self._events])

    def _run(self, final: bool) -> list[ChatEvent]:
        while self._page.state(final):
            pass
        told = _joined(self._events)
        self._events.clear()
        return told

    def _tell_content(self, text: str) -> None:
        self._content.append(text)
        self._events.append(ContentDelta(text))

    def _tell_thinking(self, text: str) -> None:
        assert self._thinking is not None
        self._thinking.append(text)
        self._events.append(ThinkingDelta(text))

    def _think(self, mark: str) -> None:
        self._thinking, self._mark = [], mark
        self._thought.leave_out()  # the mark, and so the whitespace after it
        self._page.state = self._in_thinking

    def _start(self, final: bool) -> bool:
        """Looks for a think block at the start."""
        text = self._page.text.lstrip()
        if mark := next((mark for mark in THINK if text.startswith(mark)), None):
            self._page.text = text[len(mark) :]
            self._think(mark)
        elif not final and any(mark.startswith(text) for mark in THINK):
            return False
        else:
            self._page.state = self._read
        return True

    def _start_of_thinking(self, final: bool) -> bool:
        """Drops the mark of a block that the prompt has opened already."""
        text = self._page.text.lstrip()
        if not final and text != self._mark and self._mark.startswith(text):
            return False
        self._page.text = text.removeprefix(self._mark)
        self._page.state = self._in_thinking
        return True

    def _in_thinking(self, final: bool) -> bool:
        text, mark = self._page.take((THINK[self._mark],), final)
        self._thought.write(text)
        if mark:
            self._page.prose.leave_out()
            self._page.state = self._read
        return bool(mark)


def _joined(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    """The events, with neighbouring pieces of content, and of thinking, as one."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ThinkingDelta) and isinstance(last, ThinkingDelta):
            joined[-1] = ThinkingDelta(last.text + event.text)
        else:
            joined.append(event)
    return joined
