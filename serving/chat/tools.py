"""Functions that models may call: their schemas, and how they are run."""

import asyncio
import dataclasses
import enum
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare.argument_checks import as_list, shown
from jaxshare.serving.chat.answers import ChatAnswer
from jaxshare.serving.chat.docstrings import described
from jaxshare.serving.chat.schemas import (
    check_schema,
    converted,
    hints_of,
    problem,
    schema_of,
    validator,
)

_OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
}
"""The parts of a schema that let arguments in which `properties` does not name."""


@dataclasses.dataclass(frozen=True)
class FunctionTool:
    """A function that is offered to a model.

    Attributes:
      name: of letters, digits, `_`, `-` and `.`.
      description: for the model.
      parameters: the JSON schema of the arguments, an object.
      function: runs a call; None for one that is run elsewhere.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                f"the name of a tool is {shown(self.name)}; use letters, digits, _, - and ."
            )
        if not isinstance(self.description, str):
            raise TypeError(
                f"the description of {self.name} is {shown(self.description)}; it must be a text"
            )
        if not isinstance(self.parameters, Mapping):
            raise TypeError(
                f"the parameters of {self.name} are {shown(self.parameters)}; give a JSON schema"
            )
        try:
            check_schema(self.parameters)
        except ValueError as error:
            raise ValueError(f"the parameters of {self.name} cannot be used: {error}") from None
        if self.function is not None and not callable(self.function):
            raise TypeError(
                f"the function of {self.name} is {shown(self.function)}; it cannot be called"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function.

        Raises:
          NoFunctionError: there is none.
        """
        return self.runnable()(*args, **kwargs)

    def runnable(self) -> Callable[..., Any]:
        """Returns the function.

        Raises:
          NoFunctionError: there is none.
        """
        if self.function is None:
            raise NoFunctionError(f"the tool {self.name} has no function to run; give one")
        return self.function

    def schema(self) -> dict[str, Any]:
        """Returns the description of the function in OpenAI's form, which chat templates take."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Checks arguments, of types that JSON has, against the parameters.

        Raises:
          ValueError: they do not fit, with the reason.
        """
        if told := problem(self._validator, dict(arguments)):
            raise ValueError(f"its arguments do not fit: {told}")

    @functools.cached_property
    def _validator(self) -> Any:
        closed = "properties" in self.parameters and not _OPEN & {*self.parameters}
        return validator({**self.parameters, **({"additionalProperties": False} if closed else {})})


class NoFunctionError(ValueError):
    """A tool is to be run that has no function."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolResult:
    """The text of a call's result, or of its error."""

    text: str
    is_error: bool = False


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Makes a tool of a function with type hints.

    The description is the docstring up to its first section, and those of the arguments are in its
    section "Args:" (Google's form). An argument with a default may be left out by the model.

    Raises:
      TypeError: it is no function with a name, or an argument has no type hint, no name, or a type
        that has no JSON schema.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise TypeError(f"{shown(function)} is no tool: give a function that has a name")
    text, texts = described(inspect.getdoc(function) or "")
    hints = hints_of(function)
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.POSITIONAL_ONLY, argument.VAR_POSITIONAL):
            raise TypeError(
                f"the argument {argument.name} of {name} has to be given by position; models give "
                "arguments by name"
            )
        if argument.name not in hints:
            raise TypeError(f"the argument {argument.name} of {name} has no type hint; give one")
        try:
            made = schema_of(hints[argument.name])
        except TypeError as error:
            raise TypeError(f"the argument {argument.name} of {name}: {error}") from None
        if argument.kind is argument.VAR_KEYWORD:
            schema["additionalProperties"] = made
            continue
        if described_as := texts.get(argument.name):
            made["description"] = described_as
        schema["properties"][argument.name] = made
        if argument.default is argument.empty:
            required.append(argument.name)
    return FunctionTool(name, text, schema | ({"required": required} if required else {}), function)


def as_tools(tools: Any) -> tuple[FunctionTool, ...]:
    """Returns tools of every kind as such; None as none.

    Making them checks their schemas: where many answers are read, make them once.

    Args:
      tools: each a FunctionTool, a function (see `tool`), or a description in OpenAI's form,
        {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}, or
        its inner part.

    Raises:
      TypeError, ValueError: something is no tool, or two have the same name.
    """
    made = tuple(map(_as_tool, [] if tools is None else as_list("tools", tools)))
    names = [one.name for one in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools have the name {twice}; give each its own")
    return made


def _as_tool(given: Any) -> FunctionTool:
    if isinstance(given, FunctionTool):
        return given
    if not isinstance(given, Mapping):
        return tool(given)
    inner = given.get("function", given)
    if given.get("type", "function") != "function" or not isinstance(inner, Mapping):
        raise ValueError(
            f"{shown(given)} is no tool: its type has to be 'function', with the function's name, "
            "description and parameters"
        )
    known = {"name", "description", "parameters"}
    fields = {key: value for key, value in inner.items() if key in known and value is not None}
    return FunctionTool(**{"name": None, **fields})


def call(tool: Any, arguments: Mapping[str, Any]) -> ToolResult:
    """Runs a tool with a model's arguments.

    The arguments are checked and then converted to the types in the function's signature: 3.0 to an
    int, values to members of enums, objects to dataclasses. A coroutine is run to its end, in an
    event loop of its own: call it in a thread where a loop runs already.

    Args:
      tool: one of those that `as_tools` takes, with a function.
      arguments: by name, of types that JSON has.

    Returns:
      The result as text: a text as it is, anything else as JSON. Arguments that do not fit and an
      error of the function are results, too, and name the error.

    Raises:
      NoFunctionError: the tool has no function.
    """
    one = _as_tool(tool)
    try:
        function, given = bound(one, arguments)
        value = function(**given)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return ToolResult(as_text(value))
    except NoFunctionError:
        raise
    except Exception as error:
        return ToolResult(failure(one.name, error), True)


def bound(tool: FunctionTool, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], dict]:
    """Returns the function of a tool, and its arguments as it takes them.

    Raises:
      NoFunctionError: the tool has no function.
      ValueError: the arguments do not fit, with the reason.
    """
    function = tool.runnable()
    tool.check(arguments)
    hints = hints_of(function)
    given = {
        name: converted(value, hints[name]) if name in hints else value
        for name, value in arguments.items()
    }
    return function, given


def failure(name: str, error: Exception) -> str:
    """Returns what a model is told of an error of a tool of this name."""
    return f"{name} has failed: {type(error).__name__}: {error}"


def tool_messages(answer: ChatAnswer, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Runs the calls of an answer, and returns the messages of their results in the order of calls.

    They follow `ChatAnswer.message` in the dialogue. See `call` for errors of functions.

    Raises:
      ValueError: a tool that is called has no function, or is none of these.
    """
    known = {one.name: one for one in as_tools(tools)}
    if unknown := [one.name for one in answer.tool_calls if one.name not in known]:
        raise ValueError(
            f"the answer calls {unknown[0]}, but the tools are {', '.join(known) or 'none'}; give "
            "those that were offered"
        )
    return [
        {
            "role": "tool",
            "name": one.name,
            "tool_call_id": one.id,
            "content": call(known[one.name], one.arguments).text,
        }
        for one in answer.tool_calls
    ]


async def _awaited(value: Any) -> Any:
    return await value


def as_text(value: Any) -> str:
    """Returns a result as text: a text as it is, anything else as JSON."""
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Returns a value of a type that JSON has for one of another type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if not isinstance(value, type) and hasattr(value, "model_dump"):  # of pydantic
        return value.model_dump(mode="json")
    return str(value)
