"""`agent`: a coroutine, compiled to a flow graph, with the supervisor that searches it."""

import functools
from collections.abc import Callable
from typing import Any, overload

from jaxshare.serving.agents.compiler.flow_graph import FlowGraph
from jaxshare.serving.agents.compiler.frames import shared
from jaxshare.serving.agents.compiler.program import Program, compiled
from jaxshare.serving.agents.states import Single, Supervisor


@shared
class Agent:
    """A function under @agent. `spawn` runs it beside another agent, `run` by itself.

    Attributes:
      name: the function's name.
      program: the compiled function.
      supervisor: the pattern that the supervisor of each run is copied from.
    """

    def __init__(self, function: Callable[..., Any], supervisor: Supervisor):
        self.program: Program = compiled(function)
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
        return FlowGraph.of(self.program)

    def under(self, supervisor: Supervisor) -> "Agent":
        """The same agent with another supervisor."""
        made = object.__new__(Agent)
        made.__dict__.update(self.__dict__, supervisor=check_supervisor(supervisor))
        return made


@overload
def agent(function: Callable[..., Any], /) -> Agent: ...
@overload
def agent(*, supervisor: Supervisor = ...) -> Callable[[Callable[..., Any]], Agent]: ...


def agent(
    function: Callable[..., Any] | None = None, /, *, supervisor: Supervisor = Single()
) -> Any:
    """Compiles an async def to an agent: a flow graph whose states can be fired again and again.

    Raises:
      TypeError: the function is not an async def, or the supervisor is not a supervisor.
      RefusedError: the function has something that cannot be compiled; the error has the file and
        the line.
    """
    if function is not None and not callable(function):
        raise TypeError(
            f"@agent takes its supervisor by name: @agent(supervisor=...), not {function!r}"
        )
    check_supervisor(supervisor)
    return (
        Agent(function, supervisor)
        if function is not None
        else functools.partial(Agent, supervisor=supervisor)
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
