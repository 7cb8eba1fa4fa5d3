"""The requests that agents wait for: `llm`, `tool` and the rest; and the interface of a model."""

import contextvars
import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, Protocol

from jaxshare import Grammar
from jaxshare.argument_checks import as_adapter_name, as_float, as_integer, as_texts, shown
from jaxshare.deprecated import renamed
from jaxshare.serving.agents.answer_options import Options, cached_options
from jaxshare.serving.agents.dialogue import Message, as_messages
from jaxshare.serving.agents.message_list import DialoguePlace, MessageList, place_in
from jaxshare.serving.agents.result_sizes import MOST_BYTES, MOST_CHARACTERS
from jaxshare.serving.chat import (
    BrokenCall,
    FunctionTool,
    Returns,
    ToolCall,
    as_returns,
    as_tools,
)
from jaxshare.serving.engine import SearchPlace


@dataclasses.dataclass(frozen=True)
class Chat:
    """The functions, the type and the template's variables of a request.

    Attributes:
      tools: that the model may call: functions with type hints, and whatever else
        `jaxshare.serving.chat.as_tools` takes. Calls are run one after the other, as by `tool`, each
        in a state of its own: a journal has its result, so that nothing is run twice. Results and
        errors become messages for the model, which is asked again, up to an answer without calls.
      runs_tools: False gives the model's message to the agent instead of its text, with its thinking
        and its calls, if any.
      rounds: the number of answers whose calls are run.
      returns: the type of the value that is made of the answer; see `as_returns`. Where tools are
        offered it is that of the last answer.
      variables: of the chat template, such as {"enable_thinking": False}.
      most_characters: of the result of a call; the model is told of a longer one as of an error.
    """

    tools: tuple[FunctionTool, ...] = ()
    runs_tools: bool = True
    rounds: int = 8
    returns: Returns | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    most_characters: int = MOST_CHARACTERS

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer's text, if calls cannot come before it."""
        return self.returns.grammar if self.returns and not self.tools else None

    def words(self) -> str:
        """Returns what decides about answers, as a text; saved journals have digests of it."""
        parts = (
            [tool.schema() for tool in self.tools],
            self.runs_tools,
            self.returns and self.returns.schema,
            self.variables,
        )
        return json.dumps(parts, sort_keys=True, default=str)

    def value(self, recorded: Any) -> Any:
        """Returns the value that an agent gets, from the one that a journal has."""
        if not self.runs_tools:
            return Message.of(recorded)
        return self.returns.made(recorded) if self.returns else recorded


driven: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxshare_agents_driven", default=False
)
"""True while a coroutine of an agent runs, whose requests come to the runtime."""


class _AgentOnly:
    """A request that only an agent can await, since the runtime handles its waits."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        if driven.get():
            return (yield self)
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
    chat: Chat | None = None
    place: DialoguePlace | None = None


@dataclasses.dataclass(slots=True)
class CallRun(_AgentOnly):
    """A request for the result of the first of some calls, on the way to the answer of `llm`."""

    llm: Llm
    calls: tuple[ToolCall, ...]


@dataclasses.dataclass(slots=True)
class Tool(_AgentOnly):
    """A request for a function's result; see `tool`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout: float | None
    retries: int
    most_bytes: int = MOST_BYTES


@dataclasses.dataclass(slots=True)
class Choose(_AgentOnly):
    """A request for one of some options; see `jaxshare.serving.agents.choose`."""

    options: tuple[Any, ...]
    default: int

    def index(self, firing: int) -> int:
        """The index of a firing's option: the default, then the others, then from the start again."""
        firing %= len(self.options)
        return self.default if not firing else firing - (firing <= self.default)


@dataclasses.dataclass(slots=True)
class Ask(_AgentOnly):
    """A request for a person's answer; see `jaxshare.serving.agents.ask`."""

    question: str
    options: tuple[str, ...]
    returns: Returns | None

    def made(self, value: Any) -> Any:
        """The value that an agent gets, from the one that a journal has."""
        return value if self.returns is None else self.returns.made(value)


@dataclasses.dataclass(slots=True)
class ChildNext(_AgentOnly):
    """A request for the value that a child yields next; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class ChildResult(_AgentOnly):
    """A request for the value that a child returns; `child` is its `Handle`."""

    child: Any


@dataclasses.dataclass(slots=True)
class Together(_AgentOnly):
    """A request for the results of several requests side by side; see `gather` and `first`.

    Attributes:
      parts: requests for answers, tools and children, or each of one part with a timeout.
      mode: "all" for the list of the results, "first" for the one that comes first, "one" for that
        of the only part.
      return_exceptions: an error is the result of its part.
      timeout: seconds for all parts together.
    """

    parts: "tuple[Llm | Tool | Ask | ChildNext | ChildResult | Together, ...]"
    mode: Literal["all", "first", "one"]
    return_exceptions: bool = False
    timeout: float | None = None

    @property
    def asks_model(self) -> bool:
        """True if any part asks the model."""
        return any(
            isinstance(part, Llm) or (isinstance(part, Together) and part.asks_model)
            for part in self.parts
        )


@dataclasses.dataclass(slots=True)
class Yielded:
    """A yielded value; the agent waits to be resumed."""

    value: Any


REQUESTS = (_AgentOnly, Yielded)
"""Types of what an agent waits for that the runtime answers."""

Content = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]


def llm(
    content: Content = (),
    /,
    *,
    dialogue: MessageList | None = None,
    n: int | None = None,
    stop: str | Sequence[str] = (),
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    adapter: str | None = None,
    parse: Callable[[str], Any] | None = None,
    retries: int = 0,
    timeout: float | None = None,
    returns: Any = None,
    tools: Sequence[Any] | None = None,
    run_tools: bool = True,
    rounds: int = 8,
    most_characters: int = MOST_CHARACTERS,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Llm:
    """Requests the model's answer; awaited in an agent, it gives the answer's text.

    The agent's dialogue is continued by the content and the answer.

    Args:
      content: a user's message, or messages; nothing to continue the dialogue as it is.
      dialogue: a `Dialogue` that is asked in and continued instead of the agent's own.
      n: number of answers, sampled side by side; the result is their list, and none becomes part of
        the dialogue, unless it is chosen: `dialogue.choose(answers[2])`.
      stop, max_new_tokens, temperature, top_k, top_p, min_p, adapter: see `Options`.
      parse: converts the text to the result; raises a ValueError for a text that it cannot convert.
      retries: further attempts, with other seeds, after errors, timeouts, or texts not parsed.
      timeout: seconds for one attempt, and for each call of a tool.
      returns, tools, run_tools, rounds, most_characters, chat_template_kwargs: see `Chat`.

    Raises:
      ValueError, TypeError: at once; invalid messages, options, tools or types.
      ParseError: no attempt could be parsed; an AnswerError where `returns` is given.
      TimeoutError: the last attempt took too long.
      RoundsError: the model calls tools again after `rounds` answers with calls.
    """
    if n is not None:
        n = as_integer("n", n, 1, why=": there is at least one answer")
    _check_effort(retries, timeout)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = _options(max_new_tokens, sampling, stop, adapter)
    chat = _chat(returns, tools, run_tools, (rounds, most_characters), chat_template_kwargs)
    _check_combination(chat, n, parse)
    messages, place = as_messages(content), place_in(dialogue)
    return Llm(messages, options, n, parse, retries, timeout, chat, place)


def _options(max_new_tokens: Any, sampling: Mapping[str, Any], stop: Any, adapter: Any) -> Options:
    """The options of a request, in Python's own types."""
    found = {
        name: None if value is None else (as_integer if name == "top_k" else as_float)(name, value)
        for name, value in sampling.items()
    }
    limit = None if max_new_tokens is None else as_integer("max_new_tokens", max_new_tokens, 1)
    # What cannot be hashed is refused before it is looked up.
    named = {"stop": as_texts("stop", stop), "adapter": as_adapter_name(adapter)}
    return cached_options(limit, **found, **named)


_LIMITS = (8, MOST_CHARACTERS)


def _chat(
    returns: Any, tools: Any, run_tools: Any, limits: tuple[Any, Any], variables: Any
) -> Chat | None:
    """The chat of a request; None where all is as by default."""
    if not isinstance(run_tools, bool):
        raise TypeError(f"run_tools is {shown(run_tools)}; it must be True or False")
    rounds = as_integer("rounds", limits[0], 1)
    most_characters = as_integer("most_characters", limits[1], 1)
    if returns is tools is variables is None and run_tools and (rounds, most_characters) == _LIMITS:
        return None
    if variables is not None and not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs is {shown(variables)}; it must be a dict with names")
    offered = as_tools(tools)
    if run_tools and (idle := [one.name for one in offered if one.function is None]):
        raise ValueError(f"the tool {idle[0]} has no function to run; give one, or run_tools=False")
    return Chat(
        offered,
        run_tools,
        rounds,
        None if returns is None else as_returns(returns),
        copy.deepcopy(dict(variables or {})),
        most_characters,
    )


def _check_combination(chat: Chat | None, n: int | None, parse: Any) -> None:
    if chat is None:
        return
    if parse is not None and chat.returns is not None:
        raise ValueError("parse and returns both make the result of an answer; give one of them")
    if chat.tools and chat.runs_tools and n is not None:
        raise ValueError(
            f"n is {n}, and each answer would call tools of its own; leave n out, or give "
            "run_tools=False"
        )
    if not chat.runs_tools and (parse or chat.returns):
        raise ValueError(
            f"{'parse' if parse else 'returns'} makes the result of an answer, and with "
            "run_tools=False that is the message with its calls; give one of them"
        )


def tool(
    function: Callable[..., Any],
    /,
    *args: Any,
    timeout: float | None = None,
    retries: int = 0,
    most_bytes: int = MOST_BYTES,
    **kwargs: Any,
) -> Tool:
    """Requests function(*args, **kwargs); awaited in an agent, it gives the function's result.

    The function runs in a thread of its own, or in the event loop if it is an async def. It works
    on copies of its arguments, since a state can be fired again: results have to be returned. Its
    error is raised where it is awaited. A run that goes on after a kill calls it again if it was
    under way; `call_key` is for effects that may come only once.

    Args:
      function: a function, or one with a schema, such as the tool of an MCP server.
      timeout: seconds for one attempt. A thread cannot be stopped: one that hangs is left alone.
      retries: number of further attempts after an error or a timeout.
      most_bytes: of the result; one with more is an error, since states and journals keep it.
    """
    if not callable(function):
        raise TypeError(f"a tool is a function and its arguments; {function!r} cannot be called")
    _check_effort(retries, timeout)
    while isinstance(function, functools.partial | FunctionTool):
        if isinstance(function, FunctionTool):
            function = functools.partial(function.runnable())
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    most_bytes = as_integer("most_bytes", most_bytes, 1)
    return Tool(function, args, kwargs, timeout, retries, most_bytes)


def _check_effort(retries: int, timeout: float | None) -> None:
    retries = as_integer("retries", retries)
    if retries < 0 or (timeout is not None and as_float("timeout", timeout) <= 0):
        raise ValueError(
            f"retries is {retries} and timeout {timeout}; retries start at 0, and a timeout is a "
            "number of seconds above 0"
        )


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
      tools: that the model may call.
      chat_template_kwargs: further variables of the chat template.
      grammar: what the text of the answer has to be; a model that cannot constrain its answers may
        ignore it, since they are checked anyway.
      make_next_seed: makes `next_seed`, which only a model that computes ahead asks for.
      place: of the call in its run's search; None where nothing is known of the states to come.
    """

    messages: tuple[Message, ...]
    options: Options
    seed: int
    agent: str
    run: str
    state: tuple[int, ...]
    tools: tuple[FunctionTool, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grammar: Grammar | None = None
    make_next_seed: Callable[[], int] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    place: SearchPlace | None = None

    @property
    def next_seed(self) -> int | None:
        """The seed of this call in the state's next firing, if there is one."""
        return None if self.make_next_seed is None else self.make_next_seed()


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
      text: without thinking and calls of tools.
      new_tokens, prompt_tokens: the numbers of tokens generated and read for it.
      reasoning: the text of its think block; None if there is none.
      tool_calls: its calls of the tools that were offered; their ids do not matter.
      broken: those of its calls that cannot be run; `text` has them as they were written.
      is_cut: it has ended because there were no more tokens for it.
      cost: its price, in the unit of `Budget.money`; None if the model does not know it.
    """

    text: str
    new_tokens: int = 0
    prompt_tokens: int = 0
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()
    is_cut: bool = False
    cost: float | None = None


class Model(Protocol):
    """The interface of a model that answers agents."""

    async def answer(self, call: ModelCall) -> Reply:
        """The answer to one call; many calls may be under way."""
        ...


__getattr__ = renamed(__name__, {"ParseError": "jaxshare.serving.agents.errors.ParseError"})
