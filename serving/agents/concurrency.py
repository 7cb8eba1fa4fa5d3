"""Waiting for several things at once in an agent: `gather`, `first`, `wait_for`, `as_completed`.

The names and meanings are those of asyncio, for what agents wait for: answers of the model, tools
and children. One wait is one state: firing it again asks for all its parts again.
"""

import dataclasses
import inspect
from collections.abc import AsyncGenerator
from typing import Any

from jaxshare.argument_checks import as_float, shown
from jaxshare.serving.agents.agent import agent
from jaxshare.serving.agents.dialogues import check_apart
from jaxshare.serving.agents.requests import Ask, ChildNext, ChildResult, Llm, Together, Tool
from jaxshare.serving.agents.runs import Handle, current_firing, spawn
from jaxshare.serving.agents.together import First

Part = Llm | Tool | Ask | ChildNext | ChildResult | Handle | Together


def gather(*parts: Part, return_exceptions: bool = False) -> Together:
    """Requests several results side by side; awaited in an agent, it gives their list.

    Answers continue the agent's dialogue each for itself, and none becomes part of it.

    Args:
      parts: of `llm`, `tool`, `child.next()`, `child.result()`, children, and `wait_for` of these.
      return_exceptions: an error is the result of its part; else the first one is raised, and what
        is under way is ended, but for children.

    Raises:
      TypeError: a part is something else, such as a coroutine.
    """
    return Together(_as_parts("gather", parts), "all", return_exceptions)


def first(*parts: Part, return_exceptions: bool = False) -> Together:
    """Requests the result of the part that has one first; awaited, it gives a `First`.

    The other parts are ended, but for children, which go on: what they yield can be awaited later.

    Args:
      parts, return_exceptions: see `gather`.

    Raises:
      ValueError: there is no part.
      TypeError: a part is something else, such as a coroutine.
    """
    if not parts:
        raise ValueError("first() waits for one of its parts; give at least one")
    return Together(_as_parts("first", parts), "first", return_exceptions)


def wait_for(part: Part, timeout: float) -> Together:
    """Requests a result within a time; awaited, it gives that, or raises a TimeoutError.

    An answer or a tool that takes longer is ended; a child goes on.

    Args:
      part: see `gather`; or `gather` or `first` themselves.
      timeout: seconds.

    Raises:
      ValueError: the timeout is not above 0.
      TypeError: the part is something else, such as a coroutine.
    """
    if not as_float("timeout", timeout) > 0:
        raise ValueError(f"timeout is {timeout}; give a number of seconds above 0")
    if isinstance(part, Together) and part.timeout is None:
        return dataclasses.replace(part, timeout=timeout)
    return Together(_as_parts("wait_for", [part]), "one", timeout=timeout)


async def as_completed(
    *parts: Part, return_exceptions: bool = False
) -> AsyncGenerator[First, None]:
    """Gives the results of parts as they come: `async for index, value in as_completed(...)`.

    Each part but a child is a child of its own, which ends when the loop is left.

    Args:
      parts, return_exceptions: see `gather`.
    """
    now = current_firing.get()
    if now is None:
        raise RuntimeError("as_completed() is for the code of an agent")
    before, made = now.dialogue if now.own is None else tuple(now.own), []
    waits: dict[int, Any] = {}
    for index, part in enumerate(_as_parts("as_completed", parts)):
        if isinstance(part, (ChildNext, ChildResult)):
            waits[index] = part
        else:
            made.append(spawn(waits_for, _continued(part, before)))
            waits[index] = made[-1].result()
    try:
        while waits:
            index, value = await first(*waits.values(), return_exceptions=return_exceptions)
            index = [*waits][index]
            del waits[index]
            yield First(index, value)
    finally:
        for child in made:
            child.cancel()


@agent
async def waits_for(part):
    """Waits for one part of `as_completed`."""
    return await part


def _continued(part: Any, before: Any) -> Any:
    """A request for a child, which has no dialogue of its own to continue."""
    if isinstance(part, Llm):
        if part.place is not None:
            raise TypeError(
                "as_completed() cannot continue a dialogue that is given to llm(); use gather() or "
                "first()"
            )
        return dataclasses.replace(part, messages=(*before, *part.messages))
    if isinstance(part, Together):
        parts = tuple(_continued(each, before) for each in part.parts)
        return dataclasses.replace(part, parts=parts)
    return part


def _as_parts(caller: str, parts: Any) -> tuple[Any, ...]:
    found = []
    for part in parts:
        if isinstance(part, Handle):
            part = part.result()
        if isinstance(part, Together) and part.mode != "one":
            raise TypeError(
                f"{caller}() has a gather() or first() among its parts; give their parts to one "
                "call, or make an agent of it and spawn that"
            )
        if not isinstance(part, (Llm, Tool, Ask, ChildNext, ChildResult, Together)):
            if inspect.iscoroutine(part):
                part.close()
            raise TypeError(
                f"{caller}() waits for llm(), tool(), ask() and children, not for {shown(part)}; make an "
                "agent of a coroutine and spawn it, or a tool of what needs asyncio"
            )
        found.append(part)
    check_apart(found)
    return tuple(found)
