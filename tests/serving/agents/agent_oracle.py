"""Runs an agent's function both by Python and compiled, and compares what can be seen of the runs.

The oracle is Python itself: the very same function as a coroutine or an asynchronous generator.
Both give the same record: what was awaited and yielded, in order, the result or the exception
with its chain and its lines, and the log that the agent's side effects go to.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxshare.serving.agents.compiler.program import Program, Waiting, compiled, snapshot


class Ask:
    """A request: the answer to `await ask(x)` is x, to `await fail(kind, *args)` an exception."""

    def __init__(self, value: Any, kind: type[BaseException] | None = None):
        self.value, self.kind = value, kind

    def __await__(self):
        return (yield self)

    def __repr__(self):
        return f"Ask({self.value!r})"


def ask(value: Any = None) -> Any:
    return Ask(value)


def fail(kind: type[BaseException], *args: Any) -> Any:
    return Ask(args, kind)


class Throw:
    """An agent that yields one gets the exception back."""

    def __init__(self, kind: type[BaseException], *args: Any):
        self.value, self.kind = args, kind


def note(log: list, value: Any) -> Any:
    """Logs a side effect; returns the value."""
    log.append(value)
    return value


@dataclasses.dataclass
class Seen:
    """The record of one run."""

    events: list[Any]
    result: Any
    log: Any


def described(error: BaseException | None, function: Callable[..., Any]) -> Any:
    """(kind, arguments, lines in the function) of an exception, and of those that led to it."""
    if error is None:
        return None
    lines, trace = [], error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        if (
            code.co_filename == function.__code__.co_filename
            and code.co_name == function.__code__.co_name
        ):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return (
        type(error).__name__,
        plain(error.args, function),
        lines,
        described(error.__cause__, function),
        described(error.__context__, function),
        error.__suppress_context__,
    )


def plain(value: Any, function: Callable[..., Any]) -> Any:
    """A form of a value that can be compared with that of another run."""
    if isinstance(value, BaseException):
        return described(value, function)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each, function) for each in value]
    if isinstance(value, dict):
        return [(plain(k, function), plain(v, function)) for k, v in value.items()]
    if isinstance(value, (Ask, Throw)):
        return (
            type(value).__name__,
            plain(value.value, function),
            value.kind and value.kind.__name__,
        )
    return type(value).__name__, repr(
        sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    )


def _answer(value: Any) -> tuple[Any, BaseException | None]:
    if isinstance(value, (Ask, Throw)) and value.kind:
        return None, value.kind(*value.value)
    # A copy, so that no answer shares the agent's own objects.
    return (copy.deepcopy(value.value) if isinstance(value, Ask) else ("got", value)), None


def _natively(function: Callable[..., Any], args: tuple[Any, ...], events: list[Any]) -> Any:
    """Runs the function as Python does; its result."""
    agent = function(*args)
    is_generator = inspect.isasyncgen(agent)
    answer, error = None, None
    while True:
        step: Any = (
            agent if not is_generator else agent.athrow(error) if error else agent.asend(answer)
        )
        first = is_generator
        while True:
            try:
                value = (
                    step.throw(error)
                    if error and not first
                    else step.send(None if first else answer)
                )
            except StopIteration as end:
                if not is_generator:
                    return end.value
                value = end.value  # the yielded value
                break
            except StopAsyncIteration:
                if is_generator:
                    return None
                raise
            events.append(("await", plain(value, function)))
            (answer, error), first = _answer(value), False
        events.append(("yield", plain(value, function)))
        answer, error = _answer(value)


def native(function: Callable[..., Any], *more: Any) -> Seen:
    events: list[Any] = []
    log: list[Any] = []
    try:
        result = "returned", plain(_natively(function, (log, *more), events), function)
    except BaseException as error:
        result = "raised", described(error, function)
    return Seen(events, result, plain(log, function))


def run(
    program: Program,
    frame: Any,
    events: list[Any],
    answered: tuple[Any, BaseException | None] = (None, None),
    each: Callable[[Any, Any], None] | None = None,
) -> Seen:
    """Runs a compiled agent from a wait, or from its start.

    With `each`, which gets the frame at every wait, a copy of the frame is continued.
    """
    function, events = program.function, events[:]
    try:
        while True:
            value, error = answered
            went = program.throw(frame, error) if error else program.send(frame, value)
            if not isinstance(went, Waiting):
                result = "returned", plain(went.value, function)
                break
            events.append(
                (
                    "yield" if program.instructions[went.position].is_yield else "await",
                    plain(went.value, function),
                )
            )
            if each:
                each(snapshot(frame, program), (events[:], went.value))
                frame = snapshot(frame, program)
            answered = _answer(went.value)
    except BaseException as error:
        result = "raised", described(error, function)
    return Seen(events, result, plain(frame["log"], function))


def differences(function: Callable[..., Any], *more: Any) -> tuple[Seen, list[str]]:
    """(Python's own run, the differences of the compiled agent's runs).

    It is run straight on, copied at every wait, and from each copy.
    """
    expected = native(function, *more)
    program = compiled(function)
    found = []

    def compare(what: str, seen: Seen) -> None:
        for field in ("events", "result", "log"):
            if (got := getattr(seen, field)) != (want := getattr(expected, field)):
                found.append(f"{what}: {field} {got}\n  but Python has {want}")

    compare("straight on", run(program, program.begin(([], *more), {}), []))
    copies: list[tuple[Any, Any]] = []

    def fork(frame: Any, at: Any) -> None:
        copies.append((snapshot(frame, program), at))
        events, value = at
        compare(f"ahead from wait {len(events)}", run(program, frame, events, _answer(value)))

    compare(
        "copied at every wait",
        run(program, snapshot(program.begin(([], *more), {}), program), [], each=fork),
    )
    for frame, (events, value) in copies:
        compare(f"again from wait {len(events)}", run(program, frame, events, _answer(value)))
    return expected, found
