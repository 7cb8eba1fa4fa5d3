"""Calls of tools on the way to a model's answer: each result, and what an agent waits for next.

An answer with calls leads to a state in which the first call is run, that to the next one, and the
last to a state that asks the model again. The agent's code goes on after an answer without calls.
"""

import dataclasses
from typing import Any

from jaxshare.serving.agents.choices import Picked
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.dialogues import Continuing, said_in
from jaxshare.serving.agents.errors import RoundsError
from jaxshare.serving.agents.model_calls import call_tool
from jaxshare.serving.agents.requests import Ask, CallRun, Choose, Llm, Tool
from jaxshare.serving.agents.result_sizes import check_text
from jaxshare.serving.agents.runs import AgentRun
from jaxshare.serving.chat.tools import as_text, bound, failure


@dataclasses.dataclass(frozen=True)
class Follow:
    """The request that an agent waits for next, before its code goes on."""

    request: Llm | CallRun


async def run_call(request: CallRun) -> tuple[None, tuple[Message, ...]]:
    """(None, the message with the result of a call, or with its error)."""
    call, chat = request.calls[0], request.llm.chat
    assert chat is not None
    offered = {one.name: one for one in chat.tools}
    try:
        if call.name not in offered:
            raise LookupError(f"there is no such function; there are {', '.join(offered)}")
        function, arguments = bound(offered[call.name], call.arguments)
        value = await call_tool(Tool(function, (), arguments, request.llm.timeout, 0))
        text = check_text(as_text(value), chat.most_characters)
    except Exception as error:
        text = failure(call.name, error)
    return None, (Message("tool", text, tool_call_id=call.id, name=call.name),)


def is_final(request: Any) -> bool:
    """Returns True for a request whose outcome is what the agent gets."""
    return not (
        isinstance(request, (CallRun, Choose))
        or (isinstance(request, Ask) and request.returns is not None)
        or (isinstance(request, Llm) and not (request.chat is request.place is None))
    )


def settled(
    run: AgentRun, request: Any, value: Any, messages: tuple[Message, ...]
) -> tuple[Any, tuple[Message, ...]]:
    """(what the agent gets or a `Follow`, the messages that continue the agent's own dialogue).

    Args:
      run: of the agent.
      request: any.
      value, messages: its outcome, as a journal has it.

    Raises:
      RoundsError, ValueError: see `follow`.
    """
    if is_final(request):
        return value, messages
    if isinstance(request, Choose):
        return Picked(value), messages
    if isinstance(request, Ask):
        return request.made(value), messages
    asked = request.llm if isinstance(request, CallRun) else request
    if isinstance(request, CallRun) or asked.chat is not None:
        value = follow(run, request, value, messages)
    if asked.place is None:
        return value, messages
    if isinstance(value, Follow):
        return value, ()
    return Continuing(value, [said_in(asked, value, messages)]), ()


def follow(run: AgentRun, request: Llm | CallRun, value: Any, messages: tuple[Message, ...]) -> Any:
    """Returns what the agent gets for an outcome, or a `Follow`.

    Args:
      run: of the agent.
      request: for which `is_final` is False, for an `Llm` because of its `chat`.
      value, messages: the outcome, as a journal has it.

    Raises:
      RoundsError: the model calls tools, and may not any more.
      ValueError: a type refuses the value that a journal has.
    """
    if isinstance(request, CallRun):
        rest, asked = request.calls[1:], _later(request.llm, messages)
        return Follow(CallRun(asked, rest) if rest else asked)
    chat, last = request.chat, messages[-1] if messages else None
    assert chat is not None
    if request.n is not None:
        return [chat.value(one) for one in value]
    is_broken = last is not None and last.role == "user"  # the model is told that a call is broken
    if not chat.tools or not chat.runs_tools or last is None or not (last.tool_calls or is_broken):
        return chat.value(value)
    if not chat.rounds:
        names = ", ".join(dict.fromkeys(call.name for call in last.tool_calls))
        raise RoundsError(
            f"agent {run.agent.name}: the model calls {names or 'a tool'} again after as many "
            "answers with calls as rounds allows; give more rounds, or fewer tools"
        )
    again = dataclasses.replace(
        _later(request, messages),
        messages=(),
        chat=dataclasses.replace(chat, rounds=chat.rounds - 1),
    )
    return Follow(CallRun(again, last.tool_calls) if last.tool_calls else again)


def _later(request: Llm, messages: tuple[Message, ...]) -> Llm:
    """The request after more messages, which are kept by it if its dialogue is not the agent's own."""
    if (place := request.place) is None:
        return request
    before = (*place.before, *messages)
    return dataclasses.replace(request, place=dataclasses.replace(place, before=before))
