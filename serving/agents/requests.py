"""The requests that agents wait for: `llm`, `tool` and the rest; and the interface of a model."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from jaxshare.argument_checks import as_float, as_integer, as_list, as_texts, shown


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue: the role ("system", "user" or "assistant") and the text."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a model's answer. None leaves an option to the model's own setting.

    Attributes:
      max_new_tokens: limit of the answer's tokens; an engine's is 256 unless its sampler has one.
      temperature, top_k, top_p, min_p: sampling settings.
      stop: the answer ends before the first of these texts.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; an answer has at least one token"
            )
        as_texts("stop", self.stop)


_options = functools.lru_cache(Options)
"""Cached, since most calls of a run have equal options, and checking them takes longer."""


class _AgentOnly:
    """A request that only an agent can await, since the runtime handles its waits."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        name = type(self).__name__.removeprefix("Child").lower()
        raise RuntimeError(
            f"a {name} is waited for outside an agent: decorate the function with @agent and run "
            "it, since what an agent calls cannot wait for it"
        )


@dataclasses.dataclass(slots=True)
class Llm(_AgentOnly):
    """A request for an answer of the model; see `llm`."""

    messages: tuple[Message, ...]
    options: Options
    n: int | None
    parse: Callable[[str], Any] | None
    retries: int
    timeout: float | None


@dataclasses.dataclass(slots=True)
class Tool(_AgentOnly):
    """A request for a function's result; see `tool`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout: float | None
    retries: int


@dataclasses.dataclass(slots=True)
class ChildNext(_AgentOnly):
    """A request for the value that a child yields next; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class ChildResult(_AgentOnly):
    """A request for the value that a child returns; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class Yielded:
    """A yielded value; the agent waits to be resumed."""

    value: Any


Content = str | Message | Mapping[str, str] | Sequence[Message | Mapping[str, str]]


def llm(
    content: Content = (),
    /,
    *,
    n: int | None = None,
    stop: str | Sequence[str] = (),
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    parse: Callable[[str], Any] | None = None,
    retries: int = 0,
    timeout: float | None = None,
) -> Llm:
    """Requests the model's answer; awaited in an agent, it gives the answer's text.

    The agent's dialogue is continued by the content and the answer.

    Args:
      content: a user's message, or messages; nothing to continue the dialogue as it is.
      n: number of answers to the same dialogue, sampled side by side. The result is their list, and
        none becomes part of the dialogue.
      stop, max_new_tokens, temperature, top_k, top_p, min_p: see `Options`.
      parse: converts the text; the result is the converted value then. It raises a ValueError for a
        text that it cannot convert.
      retries: number of further attempts after an error, a timeout, or a text that cannot be
        parsed.
      timeout: seconds for one attempt.

    Raises (where it is awaited):
      ParseError: no attempt could be parsed; it has the last text.
      TimeoutError: the last attempt took too long.

    Raises (at once):
      ValueError: invalid messages or options.
    """
    if n is not None:
        n = as_integer("n", n, 1, why=": there is at least one answer")
    _check_effort(retries, timeout)
    options = _options(
        None if max_new_tokens is None else as_integer("max_new_tokens", max_new_tokens, 1),
        None if temperature is None else as_float("temperature", temperature),
        None if top_k is None else as_integer("top_k", top_k),
        None if top_p is None else as_float("top_p", top_p),
        None if min_p is None else as_float("min_p", min_p),
        as_texts("stop", stop),
    )
    return Llm(_messages(content), options, n, parse, retries, timeout)


def tool(
    function: Callable[..., Any],
    /,
    *args: Any,
    timeout: float | None = None,
    retries: int = 0,
    **kwargs: Any,
) -> Tool:
    """Requests function(*args, **kwargs); awaited in an agent, it gives the function's result.

    The function runs in a thread of its own, or in the event loop if it is an async def. It works
    on copies of its arguments, since a state can be fired again: results have to be returned. Its
    error is raised where it is awaited.

    Args:
      timeout: seconds for one attempt. A thread cannot be stopped: one that hangs is left alone.
      retries: number of further attempts after an error or a timeout.
    """
    if not callable(function):
        raise TypeError(f"a tool is a function and its arguments; {function!r} cannot be called")
    _check_effort(retries, timeout)
    while isinstance(function, functools.partial):
        function, args, kwargs = (
            function.func,
            (*function.args, *args),
            {**function.keywords, **kwargs},
        )
    return Tool(function, args, kwargs, timeout, retries)


def _check_effort(retries: int, timeout: float | None) -> None:
    retries = as_integer("retries", retries)
    if retries < 0 or (timeout is not None and as_float("timeout", timeout) <= 0):
        raise ValueError(
            f"retries is {retries} and timeout {timeout}; retries start at 0, and a timeout is a "
            "number of seconds above 0"
        )


def _messages(content: Content) -> tuple[Message, ...]:
    if isinstance(content, str):
        return (Message("user", content),)
    if isinstance(content, (Message, Mapping)):
        content = (content,)
    made = []
    for message in as_list("content", content):
        if isinstance(message, Mapping):
            if set(message) != {"role", "content"}:
                raise ValueError(
                    "a message has a role and a content; this has "
                    f"{', '.join(map(repr, message)) or 'nothing'}"
                )
            message = Message(message["role"], message["content"])
        if (
            not isinstance(message, Message)
            or not isinstance(message.role, str)
            or not isinstance(message.content, str)
        ):
            raise ValueError(
                f"{shown(message)} is no message: give a text, a Message, or a dict with role and "
                "content"
            )
        made.append(message)
    return tuple(made)


class ParseError(ValueError):
    """No attempt of a model could be parsed; `text` is the last one, `reason` its parse error."""

    def __init__(self, agent: str, attempts: int, text: str, reason: str):
        super().__init__(
            f"agent {agent}: {attempts} answer{'s' * (attempts > 1)} of the model could not be "
            f"parsed ({reason}); the last was {text!r}"
        )
        self.text, self.reason = text, reason


# Models.


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """The input of one model call.

    Attributes:
      messages: the whole dialogue.
      options: options of the answer.
      seed: seed of the sampling: the same for the same state and firing of the same run, whatever
        else happens.
      agent: the name of the calling agent.
      run: id of its run, the path of agents that led to it.
      state: position in the tree of that run: the index of the firing of each state on the path.
    """

    messages: tuple[Message, ...]
    options: Options
    seed: int
    agent: str
    run: str
    state: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answer, and the numbers of tokens generated and read for it."""

    text: str
    new_tokens: int = 0
    prompt_tokens: int = 0


class Model(Protocol):
    """The interface of a model that answers agents."""

    async def answer(self, call: ModelCall) -> Reply:
        """The answer to one call; many calls may be under way."""
        ...
