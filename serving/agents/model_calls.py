"""Model calls and tool calls of agents: attempts, timeouts, and threads that may hang."""

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jax

from jaxshare.seeds import stream_seed
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.dialogues import check_owner
from jaxshare.serving.agents.errors import AgentError, AnswerError, ParseError
from jaxshare.serving.agents.requests import (
    Chat,
    Llm,
    ModelCall,
    Reply,
    Tool,
)
from jaxshare.serving.agents.result_sizes import check_value
from jaxshare.serving.agents.runs import AgentRun, Host
from jaxshare.serving.agents.search_places import search_place
from jaxshare.serving.agents.states import State
from jaxshare.serving.agents.streaming import answered


class UsedUpError(Exception):
    """The budget does not allow another model call."""


async def call_model(
    runtime: Host, run: AgentRun, state: State, request: Llm, path: tuple[int, ...]
) -> tuple[Any, tuple[Message, ...]]:
    """(the model's answer, or the list of n answers; the messages that continue the dialogue).

    Raises the error of the last attempt, with several answers that of the first one that failed;
    and
      UsedUpError: the run's budget has no model call left for it.
    """
    place = request.place
    if place is not None:
        check_owner(run, place.dialogue)
    messages = (*(state.own_dialogue if place is None else place.before), *request.messages)
    if not messages:
        raise ValueError(
            f"agent {run.agent.name} asks the model in line {state.line}, but there is nothing in "
            "its dialogue"
        )
    count = request.n or 1
    check_budget(run, count)
    spend(run, count)
    if request.n is None:
        value, reply = await _answer(runtime, run, state, request, path, messages, 0)
        return value, (*request.messages, *_answer_messages(request, reply, messages))
    calls = [
        _answer(runtime, run, state, request, path, messages, number) for number in range(count)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    if errors := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise next((error for error in errors if isinstance(error, UsedUpError)), errors[0])
    found = [answer for answer in answers if isinstance(answer, tuple)]
    offered = [
        message
        for _, reply in found
        if place is not None
        for message in _answer_messages(request, reply, messages)
    ]
    return [value for value, _ in found], (*request.messages, *offered)


async def _answer(
    runtime: Host,
    run: AgentRun,
    state: State,
    request: Llm,
    path: tuple[int, ...],
    messages: tuple[Message, ...],
    number: int,
) -> tuple[Any, Reply]:
    """(the value of one answer, the answer), after as many attempts as needed to parse it."""
    text, reason, chat = "", "", request.chat or _PLAIN
    firing = path
    while firing[-1] < 0:  # the last steps below 0 are parts of one wait
        firing = firing[:-1]
    for attempt in range(request.retries + 1):
        if attempt:
            check_budget(run, 1)
            spend(run, 1)
        call = ModelCall(
            messages,
            request.options,
            _call_seed(runtime.seed, run.id, path, number, attempt),
            run.agent.name,
            run.id,
            firing,
            chat.tools,
            chat.variables,
            chat.grammar,
            functools.partial(_next_call_seed, runtime.seed, run.id, path, number, attempt),
            search_place(run, state, firing),
        )
        try:
            reply = await _reply(runtime, request, call, (run.id, path, number, attempt))
        except Exception as error:
            if attempt < request.retries:
                continue
            if isinstance(error, TimeoutError) and not str(error) and request.timeout is not None:
                raise _timeout_error(
                    f"the model has not answered agent {run.agent.name} in line {state.line}",
                    request.timeout,
                ) from None
            raise
        spend(run, 0, reply.new_tokens, reply.prompt_tokens, _cost(run, reply))
        text = reply.text
        try:
            return _value(request, chat, reply, messages), reply
        except ValueError as error:
            reason = str(error)
    error_type = ParseError if chat.returns is None else AnswerError
    raise error_type(run.agent.name, request.retries + 1, text, reason)


async def _reply(
    runtime: Host, request: Llm, call: ModelCall, part: tuple[str, tuple[int, ...], int, int]
) -> Reply:
    """The model's answer to one call.

    If the firing needs several answers, a journal has this one before the others have come.
    """
    journal = runtime.journal if request.n is not None or request.retries else None
    if journal is not None and (known := journal.reply(part)):
        return known
    async with runtime.call_slots or contextlib.nullcontext():
        asked = answered(runtime.model, call, runtime.on_token)
        reply = await _within(request.timeout, asked)
    if not isinstance(reply, Reply):
        raise TypeError(
            f"the model's answer has to be a Reply, but {type(runtime.model).__name__} gave "
            f"{reply!r}"
        )
    if journal is not None:
        journal.record_reply(part, reply)
    return reply


_PLAIN = Chat()


def _value(request: Llm, chat: Chat, reply: Reply, messages: tuple[Message, ...]) -> Any:
    """The value of an answer as a journal has it; None for one whose calls are to be run.

    Raises:
      ValueError: the answer cannot be parsed.
    """
    if not chat.runs_tools:
        return _answer_messages(request, reply, messages)[0].as_dict()
    if chat.tools and (reply.tool_calls or reply.broken):
        return None
    if chat.returns is not None:
        if reply.is_cut:
            limit = request.options.max_new_tokens
            remedy = "give more max_new_tokens" if limit is None else f"max_new_tokens is {limit}"
            raise ValueError(f"it was cut after {reply.new_tokens} tokens; {remedy}")
        return chat.returns.read(reply.text)
    return reply.text if request.parse is None else request.parse(reply.text)


def _answer_messages(
    request: Llm, reply: Reply, messages: tuple[Message, ...]
) -> tuple[Message, ...]:
    """The model's message; and what it is told if it has only calls that cannot be run.

    Ids of calls are unique in the dialogue, and have nine letters and digits, as some templates want.
    """
    chat = request.chat or _PLAIN
    if not chat.tools:
        return (Message("assistant", reply.text, reply.reasoning or None),)
    first = 1 + sum(len(message.tool_calls) for message in messages)
    calls = tuple(
        dataclasses.replace(call, id=f"call{number:05}")
        for number, call in enumerate(reply.tool_calls, first)
    )
    answer = Message("assistant", reply.text, reply.reasoning or None, calls)
    if calls or not reply.broken or not chat.runs_tools:
        return (answer,)
    told = "\n".join(f"This call cannot be run: {call.reason}" for call in reply.broken)
    return answer, Message("user", told)


spent_by_firing: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "jaxshare_agents_recording", default=None
)
"""[model calls, new tokens, prompt tokens, cost] of the current firing, if a journal records it."""


def spend(
    run: AgentRun, calls: int, new_tokens: int = 0, prompt_tokens: int = 0, cost: float = 0.0
) -> None:
    """Counts model calls, tokens and prices of a run, for the runs above it, too."""
    run.calls += calls
    run.new_tokens += new_tokens
    run.prompt_tokens += prompt_tokens
    run.cost += cost
    for each in _with_runs_above(run):
        each.total.add(calls, new_tokens, prompt_tokens, cost)
    if spent := spent_by_firing.get():
        more = calls, new_tokens, prompt_tokens, cost
        spent[:] = [before + here for before, here in zip(spent, more, strict=True)]


def check_budget(run: AgentRun, count: int) -> None:
    """Raises UsedUpError if the budget of a run, or of one above it, has not `count` calls left."""
    for each in _with_runs_above(run):
        if used_up := each.supervisor.budget.used_up(each.total, count):
            whose = "" if each is run else f" of agent {each.agent.name}, which it is a part of"
            raise UsedUpError(f"{used_up}{whose}")


def _with_runs_above(run: AgentRun) -> Iterator[AgentRun]:
    """A run, the one that has spawned it, and so on."""
    above: AgentRun | None = run
    while above is not None:
        yield above
        above = above.parent


def _cost(run: AgentRun, reply: Reply) -> float:
    """The price of an answer; raises an AgentError if a budget needs it and there is none."""
    if reply.cost is not None:
        return reply.cost
    for each in _with_runs_above(run):
        if each.supervisor.budget.money is not None:
            raise AgentError(
                f"the budget of agent {each.agent.name} has money, but the model "
                f"{type(run.runtime.model).__name__} gives no cost with its answers; wrap it in "
                "Priced, or bound calls or tokens"
            )
    return 0.0


def _call_seed(seed: int, run: str, path: tuple[int, ...], number: int, attempt: int) -> int:
    """The seed of one model call, which depends only on the position of the call in the program."""
    return stream_seed(seed, "call", run, len(path), *path, number, attempt)


def _next_call_seed(seed: int, run: str, path: tuple[int, ...], number: int, attempt: int) -> int:
    """The seed of the same call in the next firing of its state."""
    return _call_seed(seed, run, _next_firing(path), number, attempt)


def _next_firing(path: tuple[int, ...]) -> tuple[int, ...]:
    """The path of the same call in the next firing of its state.

    The last step is the number of the firing; those below 0 after it are parts of one wait.
    """
    last = max((i for i, step in enumerate(path) if step >= 0), default=None)
    return path if last is None else (*path[:last], path[last] + 1, *path[last + 1 :])


async def call_tool(request: Tool) -> Any:
    """The value that a tool returns; raises the error of its last attempt.

    Raises:
      ResultError: the value is too large, which further attempts would not change.
    """
    value = await _tool_value(request)
    check_value(_name_of(request.function), value, request.most_bytes)
    return value


def _name_of(function: Any) -> str:
    """The name of a tool, for errors."""
    return getattr(function, "__name__", repr(function))


async def _tool_value(request: Tool) -> Any:
    function, arguments = request.function, (request.args, request.kwargs)
    immutable = ATOMS.issuperset(map(type, (*request.args, *request.kwargs.values())))
    for attempt in itertools.count():
        args, kwargs = arguments if immutable else private_copy(arguments)
        try:
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                type(function).__call__
            ):
                return await _within(request.timeout, function(*args, **kwargs))
            found = in_thread(lambda args=args, kwargs=kwargs: function(*args, **kwargs))
            return await _within(request.timeout, _whole(found))
        except Exception as error:
            if attempt < request.retries:
                continue
            if isinstance(error, TimeoutError) and not str(error) and request.timeout is not None:
                raise _timeout_error(
                    f"the tool {_name_of(function)} has not ended",
                    request.timeout,
                ) from None
            raise


async def _within[T](timeout: float | None, awaitable: Awaitable[T]) -> T:
    if timeout is None:
        return await awaitable
    async with asyncio.timeout(timeout):
        return await awaitable


async def _whole(found: Awaitable[Any]) -> Any:
    """The value of a function that may give a coroutine, as one around an async function does."""
    value = await found
    return await value if inspect.iscoroutine(value) else value


def _timeout_error(failure: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"{failure} within {timeout} second{'s' * (timeout != 1)}")


def in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    """Runs a function in a daemon thread, which lets the program end even if the function hangs."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(value)

    def target() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = context.run(function), None
        except BaseException as error:
            # A future cannot hold a StopIteration.
            outcome = (
                None,
                RuntimeError(f"a tool raised {error!r}")
                if isinstance(error, StopIteration)
                else error,
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=target, daemon=True, name="jaxshare-tool").start()
    return future


ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, range))
"""Types without mutable parts."""
_SHARED = (type, types.FunctionType, types.ModuleType, BaseException, jax.Array)


def is_constant(value: Any) -> bool:
    """True if all agents and all copies of a state share this value, as far as its type shows."""
    kind = type(value)
    return (
        kind in ATOMS
        or (kind is tuple and ATOMS.issuperset(map(type, value)))
        or issubclass(kind, _SHARED)
    )


def private_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy of a value, or the value itself if it cannot be copied."""
    if is_constant(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
