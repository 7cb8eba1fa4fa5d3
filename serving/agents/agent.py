"""`agent`: a coroutine, compiled to a flow graph, with the supervisor that searches it."""

import dis
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, overload

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.compiler.duplicates import shared
from jaxshare.serving.agents.compiler.flow_graph import FlowGraph
from jaxshare.serving.agents.compiler.program import (
    Program,
    bound_arguments,
    check_function,
    compiled,
)
from jaxshare.serving.agents.compiler.variables import RefusedError
from jaxshare.serving.agents.states import Single, Supervisor


@shared
class Agent:
    """A function under @agent. `spawn` runs it beside another agent, `run` by itself.

    Attributes:
      name: the function's name.
      function: the function itself.
      program: the compiled function; None if states are always restored by replay, by choice or
        because it cannot be compiled.
      restore: "copy" or "replay", the only way in which a state is restored; None for a copy where
        there can be one that is worth it, and else a replay; see `keeping`.
      supervisor: the pattern that the supervisor of each run is copied from.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        supervisor: Supervisor,
        restore: Literal["copy", "replay"] | None = None,
    ):
        check_function(function)
        self.function, self.restore = function, restore
        self.program: Program | None = None
        if restore == "copy" or (restore is None and not depends_on_identity(function)):
            try:
                self.program = compiled(function)
            except RefusedError:
                if restore == "copy":
                    raise
        self.supervisor = supervisor
        functools.update_wrapper(self, function)
        self.name = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self.name} is an agent: spawn({self.name}, ...) runs it from another agent, "
            f"run({self.name}, ...) by itself"
        )

    def __repr__(self) -> str:
        return f"<agent {self.name}, supervised by {type(self.supervisor).__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Agent":
        return self

    @functools.cached_property
    def graph(self) -> FlowGraph:
        """The flow graph of its states."""
        return FlowGraph.of(self.program or compiled(self.function))

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the function."""
        return inspect.signature(self.function)

    @property
    def file(self) -> str:
        """The file with the function."""
        return self.function.__code__.co_filename

    def is_same_as(self, other: "Agent") -> bool:
        """True for an agent of the same function, under any supervisor, or of a later copy of it."""
        return (self.file, self.function.__qualname__) == (
            other.file,
            other.function.__qualname__,
        )

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises a TypeError for arguments that do not fit the function."""
        bound_arguments(self.name, self.signature, args, kwargs)

    def under(self, supervisor: Supervisor) -> "Agent":
        """The same agent with another supervisor."""
        made = object.__new__(Agent)
        made.__dict__.update(self.__dict__, supervisor=check_supervisor(supervisor))
        return made


@overload
def agent(function: Callable[..., Any], /) -> Agent: ...
@overload
def agent(
    *, supervisor: Supervisor = ..., restore: Literal["copy", "replay"] | None = None
) -> Callable[[Callable[..., Any]], Agent]: ...


def agent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    supervisor: Supervisor = Single(),
    restore: Literal["copy", "replay"] | None = None,
) -> Any:
    """Makes an async def an agent: a flow graph whose states can be fired again and again.

    The first firing of a state goes on with the agent's own variables. Another one needs the state
    as it was: a copy of it, or a replay, which runs the function again from its beginning with the
    outcomes that were recorded and so repeats what it did between its waits.

    Args:
      supervisor: searches the agent's states.
      restore: "copy" or "replay" to allow one of them alone; None for a copy where everything in
        the state can be copied and that costs little for the waits of its path, and else a replay.

    Raises:
      TypeError: the function is not an async def, or the supervisor is not a supervisor.
      ValueError: `restore` is none of these.
      RefusedError: with restore="copy", the function has something that cannot be compiled; the
        error has the file and the line.
    """
    if restore not in (None, "copy", "replay"):
        raise ValueError(f"restore is {shown(restore)}; give 'copy', 'replay' or None")
    if function is not None and not callable(function):
        raise TypeError(
            f"@agent takes its supervisor by name: @agent(supervisor=...), not {function!r}"
        )
    check_supervisor(supervisor)
    return (
        Agent(function, supervisor, restore)
        if function is not None
        else functools.partial(Agent, supervisor=supervisor, restore=restore)
    )


_LOOKS_INSIDE = {
    *("id", "inspect", "isfunction", "FunctionType", "__code__", "__closure__"),
    *("__defaults__", "__kwdefaults__"),
}
"""Names by which a function can tell its compiled code, or a copy, from its own."""


def depends_on_identity(function: Callable[..., Any]) -> bool:
    """True if a function defines a class, looks inside functions or is decorated."""
    return hasattr(function, "__wrapped__") or any(
        each.opname == "LOAD_BUILD_CLASS" or each.argval in _LOOKS_INSIDE
        for each in dis.get_instructions(function.__code__)
        if isinstance(each.argval, str) or each.opname == "LOAD_BUILD_CLASS"
    )


def check_supervisor(supervisor: Any) -> Supervisor:
    """Checks that this is a supervisor, an object with the four callbacks, and returns it."""
    missing = [
        name
        for name in ("init", "fire", "commit", "wake")
        if not callable(getattr(supervisor, name, None))
    ]
    if missing or isinstance(supervisor, type):
        problem = (
            f"{supervisor!r} has no {', '.join(missing)}"
            if missing
            else f"{supervisor!r} is a class; make an instance of it"
        )
        raise TypeError(
            f"a supervisor is an object with the callbacks init, fire, commit and wake; {problem}"
        )
    return supervisor
