"""Dialogues as values: an agent holds as many as it wants, edits them and asks in any of them.

    d = Dialogue({"role": "system", "content": "You review patches."})
    answers = await llm("Name a weakness.", dialogue=d, n=4)
    d.choose(max(answers, key=len))
    await d.summarise(slice(0, -2))

A dialogue is an ordinary variable: a state that is fired again has it as it was, and an agent that
is given one gets a copy.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.message_list import MessageList
from jaxshare.serving.agents.requests import Llm, Together, llm
from jaxshare.serving.agents.runs import AgentRun, Firing, current_firing, spawn

_SHORTEN = (
    "Summarise {what} in as few words as you can, so that the work can go on from your summary: what "
    "was asked, found and decided. Write the summary and nothing else."
)


class Dialogue(MessageList):
    """Messages of a dialogue with the model, in which an agent asks by `llm(..., dialogue=this)`."""

    async def summarise(
        self,
        part: int | slice | None = None,
        *,
        ask: str | None = None,
        by: Agent | None = None,
        role: str = "user",
        **options: Any,
    ) -> str:
        """Puts a summary in the place of a part; awaited in an agent, it gives the summary.

        The request to the model begins with the dialogue up to the end of the part, which an engine
        has in its cache.

        Args:
          part: the index of a message, or a slice; default all after the system's messages.
          ask: the request for a summary; default one of our own.
          by: an agent that makes the summary instead: it is spawned with a `Dialogue` of the part,
            and returns a text.
          role: of the message with the summary.
          options: see `llm`, such as max_new_tokens.

        Raises:
          ValueError: there is nothing in the part.
          IndexError: there is no message with this index.
          TypeError: `by` is no agent, or has not returned a text.
        """
        first = next((i for i, one in enumerate(self) if one.role != "system"), len(self))
        start, stop = self._bounds(slice(first, None) if part is None else part)
        if start == stop:
            raise ValueError(
                f"there is nothing to summarise in messages {start} to {stop} of a dialogue of "
                f"{len(self)}; give a part with messages"
            )
        if by is None:
            what = f"the last {stop - start} messages" if start > first else "the dialogue above"
            shortened = _Aside(self._messages[:stop])
            text = await llm(ask or _SHORTEN.format(what=what), dialogue=shortened, **options)
        else:
            text = await spawn(by, Dialogue(self._messages[start:stop]))
        if not isinstance(text, str):
            raise TypeError(f"a summary is {shown(text)}; it must be a text")
        self.replace(slice(start, stop), Message(role, text))
        return text


class _Aside(Dialogue):
    """A dialogue that an agent does not work in."""


def current_dialogue() -> Dialogue:
    """Returns the agent's own dialogue, which `llm` without `dialogue` continues.

    What is done to it holds for the requests that follow.

    Raises:
      RuntimeError: called outside an agent.
    """
    now = current_firing.get()
    if now is None:
        raise RuntimeError("current_dialogue() is for the code of an agent; call it in one")
    own = now.own
    if not isinstance(own, Dialogue):
        now.own = own = Dialogue()
        own._messages, own._owner = now.dialogue, now.run.root
    return own


def check_owner(run: AgentRun, dialogue: MessageList) -> None:
    """Raises a ValueError for a dialogue that another agent asks in."""
    dialogue._owner = dialogue._owner or run.root
    if dialogue._owner is not run.root:
        raise ValueError(
            f"agent {run.agent.name} asks in a dialogue of agent {dialogue._owner.agent}; give the "
            "agent a copy as an argument, or fork() the dialogue"
        )


# What the runtime does about dialogues that an agent holds.


class Said(NamedTuple):
    """The messages that continue one dialogue.

    Attributes:
      index: of the dialogue among those that were asked in.
      messages: for the dialogue.
      answers: the values of the answers to choose from, whose messages come last; None if there is
        one answer, which is a part of the dialogue.
    """

    index: int
    messages: tuple[Message, ...]
    answers: list[Any] | None


@dataclasses.dataclass(slots=True)
class Continuing:
    """The value of a wait that continues dialogues."""

    value: Any
    said: list[Said]


def said_in(request: Llm, value: Any, messages: tuple[Message, ...]) -> Said:
    """The messages that continue the dialogue of a request, after its last answer."""
    place = request.place
    assert place is not None
    messages = (*place.before[place.start :], *messages)
    return Said(0, messages, None if request.n is None else value)


@dataclasses.dataclass(slots=True)
class Held:
    """The dialogues of an agent's code that the runtime has to know; copied with its variables.

    Attributes:
      own: the agent's own, if it was asked for as a value.
      last: the one that was asked in last, if that is another one.
      asked: those that the current wait asks in, one for each part of it.
    """

    own: MessageList | None = None
    last: MessageList | None = None
    asked: tuple[MessageList | None, ...] = ()


def resumed(held: Held | None, now: Firing, value: Any) -> Any:
    """Continues dialogues before an agent's code goes on; returns the value that it gets."""
    if held is None:
        return value
    now.own = held.own
    if held.own is not None and held.own._messages != now.dialogue:
        held.own._edit(0, len(held.own), now.dialogue)
    if not isinstance(value, Continuing):
        return value
    for index, messages, answers in value.said:
        dialogue = held.asked[index]
        assert dialogue is not None
        if answers is None:
            dialogue.append(messages)
        else:
            said = len(messages) - len(answers)
            dialogue.append(messages[:said])
            dialogue._offered = list(zip(answers, messages[said:], strict=True))
    return value.value


def paused(held: Held | None, now: Firing, request: Any) -> Held | None:
    """The dialogues after an agent's code has come to a wait, or to its end with None."""
    asked = _asked_in(request)
    if held is None and now.own is None and all(each is None for each in asked):
        return None
    last = held and held.last
    if isinstance(request, Llm) and request.place is None:
        last = None
    for each in asked:
        if each is not None and not isinstance(each, _Aside):
            last = each
    return Held(now.own, None if last is now.own else last, asked)


def dialogues_of(
    held: Held | None, now: Firing
) -> tuple[tuple[Message, ...], tuple[Message, ...] | None]:
    """(the dialogue that an agent works in, its own one if that is another one)."""
    own = held.own._messages if held and held.own is not None else now.dialogue
    return (own, None) if held is None or held.last is None else (held.last._messages, own)


def _asked_in(request: Any) -> tuple[MessageList | None, ...]:
    """The dialogues that a request asks in: one for each part, with None for others; or ()."""
    if isinstance(request, Llm):
        return (request.place.dialogue,) if request.place else ()
    if isinstance(request, Together):
        return tuple([next(iter(_asked_in(part)), None) for part in request.parts])
    return ()


def check_apart(parts: Iterable[Any]) -> None:
    """Raises a ValueError if two parts of a wait ask in the same dialogue."""
    found: list[MessageList] = []
    for part in parts:
        for each in _asked_in(part):
            if any(each is one for one in found):
                raise ValueError(
                    "two parts of one wait ask in the same dialogue; give one of them a fork() of it"
                )
            if each is not None:
                found.append(each)
