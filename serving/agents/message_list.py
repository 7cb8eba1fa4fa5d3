"""Lists of messages that an agent edits; `jaxshare.serving.agents.dialogues` makes dialogues of them."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Self, overload

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.compiler.duplicates import duplicate
from jaxshare.serving.agents.dialogue import Message, as_messages

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages."""

HANDLES: Any = "handles"
"""The memo key of the list that collects the handles of children in a value for another agent."""


class MessageList(Sequence[Message]):
    """Messages, and the answers that were asked for last and from which one can be chosen.

    Copies share the messages, which never change.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, content: Any = ()):
        """Makes a list.

        Args:
          content: a text, which is the user's, a message or messages; see `llm`.

        Raises:
          ValueError: something is no message, or has a role that does not exist.
        """
        self._messages = _checked(content)
        self._offered: list[tuple[Any, Message]] = []
        self._owner: Any = None  # the first state of the run that asks in it

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @overload
    def __getitem__(self, part: int) -> Message: ...
    @overload
    def __getitem__(self, part: slice) -> Self: ...
    def __getitem__(self, part: int | slice) -> Message | Self:
        """The message at an index, or a new list of those in a slice."""
        start, stop = self._bounds(part)
        return (
            self._messages[start]
            if not isinstance(part, slice)
            else type(self)(self._messages[start:stop])
        )

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, MessageList) and self._messages == other._messages

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._messages)!r})"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        made = self._copy()
        memo[id(self)] = made
        made._offered = duplicate(self._offered, memo)
        made._owner = None if HANDLES in memo else self._owner
        return made

    def __getstate__(self) -> tuple[Any, ...]:
        return self._messages, self._offered

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._messages, self._offered = state
        self._owner = None

    def _copy(self) -> Self:
        made = type(self).__new__(type(self))
        made._messages, made._offered, made._owner = self._messages, [], None
        return made

    def fork(self) -> Self:
        """Returns a copy that goes on by itself, with the same answers to choose from."""
        made = self._copy()
        made._offered = [*self._offered]
        return made

    def append(self, content: Any) -> None:
        """Adds a text, which is the user's, a message or messages.

        Raises:
          ValueError: something is no message, or has a role that does not exist.
        """
        self._edit(len(self), len(self), _checked(content))

    def drop(self, part: int | slice) -> None:
        """Takes messages out.

        Args:
          part: the index of one, or a slice; negative numbers count from the end.

        Raises:
          IndexError: there is no message with this index.
          ValueError: a slice has steps.
        """
        self._edit(*self._bounds(part), ())

    def replace(self, part: int | slice, content: Any) -> None:
        """Puts a text, which is the user's, a message or messages in the place of messages.

        Args:
          part: the index of one, or a slice; one that is empty inserts.
          content: see `append`.

        Raises:
          IndexError, ValueError: see `drop` and `append`.
        """
        self._edit(*self._bounds(part), _checked(content))

    def choose(self, answer: Any) -> None:
        """Goes on from one of the answers that `llm(..., dialogue=this, n=...)` has given last.

        Args:
          answer: one of the values in its list.

        Raises:
          ValueError: it is none of them, or the dialogue was edited since.
        """
        found = [one for given, one in self._offered if given is answer]
        found = found or [one for given, one in self._offered if given == answer]
        if not found:
            raise ValueError(
                f"{shown(answer)} is none of the {len(self._offered)} answers to choose from; give "
                "one that llm() with n and this dialogue has given last, before any edit"
            )
        self.append(found[0])

    def _edit(self, start: int, stop: int, messages: tuple[Message, ...]) -> None:
        self._messages = (*self._messages[:start], *messages, *self._messages[stop:])
        self._offered = []

    def _bounds(self, part: int | slice) -> tuple[int, int]:
        """The indices of the first message of a part, and of the one after its last."""
        if isinstance(part, slice):
            start, stop, step = part.indices(len(self))
            if step != 1:
                raise ValueError(f"a part of a dialogue has the step {step}; leave it out")
            return start, max(start, stop)
        index = operator.index(part)
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"there is no message {index} in a dialogue of {len(self)}; count from 0, or from "
                "the end with numbers below 0"
            )
        index %= len(self)
        return index, index + 1


def _checked(content: Any) -> tuple[Message, ...]:
    messages = content._messages if isinstance(content, MessageList) else as_messages(content)
    for message in messages:
        if message.role not in ROLES:
            raise ValueError(
                f"a message has the role {message.role!r}; there are {', '.join(ROLES)}"
            )
    return messages


@dataclasses.dataclass(slots=True)
class DialoguePlace:
    """The dialogue that a request asks in and continues, instead of the agent's own.

    Attributes:
      dialogue: as the agent holds it.
      start: the number of its messages when it was asked.
      before: its messages then, and those that the request has led to since.
    """

    dialogue: MessageList
    start: int
    before: tuple[Message, ...]


def place_in(dialogue: Any) -> DialoguePlace | None:
    """Returns the place of a request in a dialogue, if it is given one.

    Raises:
      TypeError: it is no dialogue.
    """
    if dialogue is None:
        return None
    if not isinstance(dialogue, MessageList):
        raise TypeError(
            f"dialogue is {shown(dialogue)}; give a Dialogue, such as Dialogue([messages])"
        )
    return DialoguePlace(dialogue, len(dialogue), dialogue._messages)
