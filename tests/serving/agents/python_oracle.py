"""Runs ordinary coroutines natively and as agents, and compares what can be seen of the runs.

The oracle is Python: the coroutine itself, driven by `send` and `throw`, with a deterministic
answer to each request. The k-th state of an agent fired again is the coroutine run from its
beginning with another answer to its k-th call of the model.
"""

import asyncio
import contextvars
import copy
import dataclasses
import re
import zlib
from collections.abc import Callable
from typing import Any

from jaxshare.serving import agents
from jaxshare.serving.agents import Reply, Runtime, State, Supervisor, agent, keeping

_NATIVE: contextvars.ContextVar[bool] = contextvars.ContextVar("native", default=False)


@dataclasses.dataclass
class Asked:
    """A request of a coroutine that is run natively."""

    function: Callable[..., Any] | None
    args: tuple[Any, ...]

    def __await__(self):
        return (yield self)


def copy_some(monkeypatch: Any, every: int | None) -> None:
    """Has a state in so many copied, as if it were cheap, and none of the others; none with None."""
    given = keeping.Past.limit

    def limit(past: keeping.Past, waits: int, can_begin: bool) -> int | None:
        found = given(past, waits, can_begin)
        return found if found is None or (every and waits % every == 1) else 0

    monkeypatch.setattr(keeping.Past, "limit", limit)


def llm(text: str) -> Any:
    """The model's answer, natively or in an agent."""
    return Asked(None, (text,)) if _NATIVE.get() else agents.llm(text)


def tool(function: Callable[..., Any], *args: Any) -> Any:
    """A tool's result, natively or in an agent."""
    return Asked(function, args) if _NATIVE.get() else agents.tool(function, *args)


def answer(text: str, branch: int) -> str:
    """A number of two digits for a prompt, in decimal; branch 1 is a second firing."""
    return str(10 + zlib.crc32(f"{text} {branch}".encode()) % 90)


@dataclasses.dataclass
class Seen:
    """A run: the prompts in order, and (what it ended with, the value or the error)."""

    prompts: list[str]
    end: tuple[str, Any]


def plain(value: Any) -> Any:
    """A form of a value that can be compared with that of another run."""
    if isinstance(value, BaseException):
        return described(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each) for each in value]
    if isinstance(value, dict):
        return type(value).__name__, [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, value))
    return type(value).__name__, re.sub(r"0x[0-9a-f]+", "0x", repr(value))


def described(error: BaseException | None, depth: int = 20) -> Any:
    """(kind, arguments, notes, cause, context, contained errors) of an exception."""
    if error is None or not depth:
        return None
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return (
        type(error).__name__,
        [plain(each) for each in error.args if not isinstance(each, (list, tuple)) or not inside],
        getattr(error, "__notes__", []),
        described(error.__cause__, depth - 1),
        described(error.__context__, depth - 1),
        [described(each, depth - 1) for each in inside],
    )


def native(function: Callable[..., Any], args: tuple[Any, ...], branch_at: int | None) -> Seen:
    """The coroutine, run by Python; its call number `branch_at` gets the other answer."""
    prompts: list[str] = []

    def run() -> Seen:
        _NATIVE.set(True)
        coroutine, value, error = function(*args), None, None
        try:
            while True:
                asked = coroutine.throw(error) if error else coroutine.send(value)
                value, error = None, None
                if asked.function is None:
                    value = answer(asked.args[0], int(len(prompts) == branch_at))
                    prompts.append(asked.args[0])
                    continue
                try:
                    value = asked.function(*copy.deepcopy(asked.args))
                except Exception as raised:
                    error = raised
        except StopIteration as end:
            return Seen(prompts, ("returned", plain(end.value)))
        except BaseException as raised:
            return Seen(prompts, ("raised", described(raised)))

    return contextvars.Context().run(run)


class Again(Supervisor):
    """Follows one path, and fires each of its states that asks the model once more.

    Args:
      late: fires them after the end of the first path, not together with the first firing.
    """

    def __init__(self, late: bool):
        self.late = late

    def init(self, root: State) -> None:
        self._ready, self._again, self._open = [root], list[State](), 1
        self.over, self.accepted, self.ended = False, None, list[State]()

    def fire(self) -> Any:
        ready, self._ready = self._ready, []
        return ready

    def commit(self, state: State) -> None:
        if state.ended:
            self.ended.append(state)
            self._open -= 1
            if self._again:
                self._ready += self._again
                self._open += len(self._again)
                self._again = []
            if not self._open:
                self.over, self.accepted = True, min(self.ended, key=lambda each: each.path)
            return
        if not state.sleeping:
            self._ready.append(state)
        if state.asks_model and not any(state.path):
            if self.late:
                self._again.append(state)
            else:
                self._ready.append(state)
                self._open += 1

    def wake(self, state: State) -> None:
        self._ready.append(state)


class _Model:
    def __init__(self) -> None:
        self.calls: dict[tuple[int, ...], str] = {}

    async def answer(self, call: Any) -> Reply:
        text = call.messages[-1].content
        self.calls[call.state] = text
        return Reply(answer(text, call.state[-1]))


def as_agent(
    function: Callable[..., Any], args: tuple[Any, ...], late: bool, restore: Any = None
) -> tuple[dict[int | None, Seen], dict[int | None, State]]:
    """(the runs of an agent, their last states), by the model call that had its second answer."""
    model, supervisor = _Model(), Again(late)
    made = agent(supervisor=supervisor, restore=restore)(function)

    async def go() -> Any:
        runtime = Runtime(model)
        try:
            await runtime.run(made, *args)
        except BaseException as error:
            if not runtime.runs[0].supervisor.over:
                raise AssertionError(f"the run was not completed: {error!r}") from error
        return runtime.runs[0]

    run = asyncio.run(go())
    seen: dict[int | None, Seen] = {}
    states: dict[int | None, State] = {}
    for state in run.supervisor.ended:
        called = [
            (path, model.calls[path])
            for path in (state.path[:n] for n in range(1, len(state.path) + 1))
            if path in model.calls
        ]
        at = next((n for n, (path, _) in enumerate(called) if path[-1]), None)
        end = (
            ("raised", described(state.error))
            if state.error is not None
            else ("returned", plain(state.value))
        )
        seen[at], states[at] = Seen([text for _, text in called], end), state
    return seen, states


def differences(
    function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]], restore: Any = None
) -> tuple[list[str], int]:
    """(differences of an agent from Python, the number of its states that were fired twice)."""
    first = native(function, arguments(), None)
    expected = {None: first} | {
        k: native(function, arguments(), k) for k in range(len(first.prompts))
    }
    found = []
    for late in (False, True):
        seen, _ = as_agent(function, arguments(), late, restore)
        if seen.keys() != expected.keys():
            found.append(f"fired again: {seen.keys()}, not {expected.keys()}")
        found += [
            f"call {k} answered again, {late=}:\n  {seen[k]}\n  Python {expected[k]}"
            for k in expected
            if k in seen and seen[k] != expected[k]
        ]
    return found, len(first.prompts)
