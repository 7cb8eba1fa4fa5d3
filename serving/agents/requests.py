"""What an agent can wait for, and what a model is to the agents: `llm`, `tool`, and the requests
that they make."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue: who speaks ("system", "user" or "assistant"), and what."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a model's answer. What is None is as the model has it.

    Attributes:
      max_new_tokens: at most so many.
      temperature, top_k, top_p, min_p: of sampling.
      stop: the answer ends before the first of these texts.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; an answer has at least one token"
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is {self.stop!r}, but it must be texts that are not empty")


_options = functools.lru_cache(Options)
"""Most calls of a run have the same ones, and checking them takes longer than finding them."""


class _AgentOnly:
    """Something to wait for that only an agent can, whose waits are the runtime's."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        name = type(self).__name__.removeprefix("Child").lower()
        raise RuntimeError(
            f"a {name} is waited for outside an agent: decorate the function with @agent and run "
            "it, since what an agent calls cannot wait for it"
        )


@dataclasses.dataclass(slots=True)
class Llm(_AgentOnly):
    """An answer of the model: see `llm`."""

    messages: tuple[Message, ...]
    options: Options
    n: int | None
    parse: Callable[[str], Any] | None
    retries: int
    timeout: float | None


@dataclasses.dataclass(slots=True)
class Tool(_AgentOnly):
    """A function's result: see `tool`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout: float | None
    retries: int


@dataclasses.dataclass(slots=True)
class ChildNext(_AgentOnly):
    """The value that a child yields next; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class ChildResult(_AgentOnly):
    """What a child returns; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class Yielded:
    """What an agent has yielded; it waits to be resumed."""

    value: Any


Content = str | Message | Mapping[str, str] | Sequence[Message | Mapping[str, str]]


def llm(
    content: Content = (),
    /,
    *,
    n: int | None = None,
    stop: str | Sequence[str] = (),
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    parse: Callable[[str], Any] | None = None,
    retries: int = 0,
    timeout: float | None = None,
) -> Llm:
    """To be awaited in an agent: continues its dialogue by this and the model's answer, and is that
    answer's text.

    Args:
      content: a user's message, or messages; nothing to go on as it is.
      n: so many answers to the same, side by side: a list of them, and none becomes part of the
        dialogue.
      stop, max_new_tokens, temperature, top_k, top_p, min_p: see `Options`.
      parse: makes what is wanted of the text, which is then what this is; a ValueError says that it
        cannot.
      retries: how often the model is asked anew where it fails, takes too long, or cannot be
        parsed.
      timeout: of one attempt, in seconds.

    Raises (where it is awaited):
      ParseError: no attempt could be parsed; it has the last text.
      TimeoutError: no attempt was in time.

    Raises (at once):
      ValueError: messages or options that cannot be.
    """
    if n is not None and n < 1:
        raise ValueError(f"n is {n}; there is at least one answer")
    _check_effort(retries, timeout)
    options = _options(
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        (stop,) if isinstance(stop, str) else tuple(stop),
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
    """To be awaited in an agent: function(*args, **kwargs), in a thread of its own, or in the event
    loop where it is an async def.

    It works on copies of its arguments, since a state can be fired again: what is to be kept has to
    be returned. What it raises is raised where it is awaited.

    Args:
      timeout: in seconds. A thread cannot be stopped: one that hangs is left alone.
      retries: how often it is called anew where it raises or takes too long.
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
    if retries < 0 or (timeout is not None and timeout <= 0):
        raise ValueError(
            f"retries is {retries} and timeout {timeout}; retries begin at 0, and a timeout is a "
            "number of seconds above 0"
        )


def _messages(content: Content) -> tuple[Message, ...]:
    if isinstance(content, str):
        return (Message("user", content),)
    if isinstance(content, (Message, Mapping)):
        content = (content,)
    made = []
    for message in content:
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
                f"{message!r} is no message: give a text, a Message, or a dict with role and "
                "content"
            )
        made.append(message)
    return tuple(made)


class ParseError(ValueError):
    """No attempt of a model could be parsed. `text` is the last one, `reason` what parse said of
    it."""

    def __init__(self, agent: str, attempts: int, text: str, reason: str):
        super().__init__(
            f"agent {agent}: {attempts} answer{'s' * (attempts > 1)} of the model could not be "
            f"parsed ({reason}); the last was {text!r}"
        )
        self.text, self.reason = text, reason


# Models.


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """What a model is asked.

    Attributes:
      messages: the whole dialogue.
      options: of the answer.
      seed: of what is random in it: the same for the same state and firing of the same run,
        whatever else happens.
      agent: the name of the agent that asks.
      run: which of its runs, the path of agents that led there.
      state: its position in the tree of that run: which firing of each state on the way.
    """

    messages: tuple[Message, ...]
    options: Options
    seed: int
    agent: str
    run: str
    state: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answer, and how many tokens it wrote and read for it."""

    text: str
    new_tokens: int = 0
    prompt_tokens: int = 0


class Model(Protocol):
    """What agents ask."""

    async def answer(self, call: ModelCall) -> Reply:
        """The answer to one call; many may be under way."""
        ...
