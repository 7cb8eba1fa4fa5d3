"""Frames hold an agent's variables between two waits, and can be copied.

Python's own frames cannot. A `Frame` is a dictionary of the variables by name, and a `Closure` is a
function defined in an agent whose copy uses the variables of the copied frame.
"""

import builtins
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, Self

from jaxshare.serving.agents.compiler.duplicates import duplicate

FRAME = ".frame"
"""The one argument of every compiled piece: no valid Python name, but the compiler accepts it."""


class Frame(dict[str, Any]):
    """The variables of one run of an agent, by name, with the rest of its state at a wait.

    Attributes:
      cells: variables of the functions around the agent, by name.
      position: the index of the instruction to run next.
      handlers: one entry for each try statement under way, outermost first: the instruction to
        continue with, and the number of exceptions being handled when the statement began.
      handling: exceptions that are being handled, outermost first.
      thrown: the exception that the current wait raises.
      tracebacks: exceptions in the frame, with the traceback and context that they had at the start
        of the wait. Copies share exceptions, and Python writes to them when they are raised again;
        `resume` restores both.
      flat: in a snapshot, its lists of constants.
      outside: ids of the functions among the agent's arguments, which copies share.
      options: of the choice that it waits for; a copy has copies that its variables refer to.
      beside: what the runtime keeps with the variables.
      size: of a snapshot, the objects that were copied for it.
    """

    __slots__ = (
        "beside",
        "cells",
        "flat",
        "handlers",
        "handling",
        "options",
        "outside",
        "position",
        "size",
        "thrown",
        "tracebacks",
    )
    builtins = builtins

    def __init__(self, variables: dict[str, Any], cells: "Cells"):
        super().__init__(variables)
        self.cells = cells
        self.position = 0
        self.handlers: tuple[tuple[int, int], ...] = ()
        self.handling: tuple[BaseException, ...] = ()
        self.thrown: BaseException | None = None
        self.tracebacks: Sequence[
            tuple[BaseException, types.TracebackType | None, BaseException | None]
        ] = ()
        self.flat: Sequence[list[Any]] = ()
        self.outside: frozenset[int] = frozenset()
        self.options: tuple[Any, ...] = ()
        self.beside: Any = None
        self.size = 0

    def __missing__(self, name: str) -> Any:
        # The name of a comprehension's variable ends with "." and a number.
        raise UnboundLocalError(
            f"cannot access local variable {name.partition('.')[0]!r} where it is not associated "
            "with a value"
        )

    def free(self, name: str) -> Any:
        """The value of a variable that a function inside the agent uses."""
        if name not in self:
            raise NameError(
                f"cannot access free variable {name!r} where it is not associated with a value in "
                "enclosing scope"
            )
        return self[name]

    def bind(self, name: str, value: Any) -> Any:
        """Binds a name and returns its value, as := does."""
        self[name] = value
        return value

    def unbind(self, name: str) -> None:
        """Deletes a name, as del does."""
        self[name]  # raises as del would
        del self[name]

    def forget(self, name: str) -> None:
        """Deletes a name, bound or not, as the end of an except clause does."""
        self.pop(name, None)

    def take_thrown(self) -> BaseException | None:
        """Returns `thrown`, and clears it."""
        exception, self.thrown = self.thrown, None
        return exception

    def matches(self, kind: Any) -> bool:
        """True if an except clause for `kind` catches the exception that is being handled."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
            raise TypeError(
                "catching classes that do not inherit from BaseException is not allowed"
            )
        return any(k in type(self.handled()).__mro__ for k in kinds)

    def handled(self) -> BaseException:
        """The exception that is being handled."""
        return self.handling[-1]

    def enter(self, manager: Any) -> Any:
        """Starts a with statement."""
        kind = type(manager)
        if not (hasattr(kind, "__enter__") and hasattr(kind, "__exit__")):
            with manager:  # what cannot be entered is an error of Python's
                pass
        return kind.__enter__(manager)

    def leave(self, manager: Any) -> None:
        """Ends a with statement."""
        type(manager).__exit__(manager, None, None, None)

    def swallows(self, manager: Any) -> bool:
        """Ends a with statement by the handled exception; True if the manager suppresses that."""
        exception = self.handled()
        return bool(
            type(manager).__exit__(manager, type(exception), exception, exception.__traceback__)
        )

    @staticmethod
    def closure(function: Any) -> Any:
        """Makes a `Closure` of a function defined in an agent, or of a decorated one, if needed."""
        if isinstance(function, types.FunctionType) and (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__
        ):
            return Closure(function)
        return function

    def empty(self) -> Self:
        """A frame at the same position, without variables."""
        made = type(self).__new__(type(self))
        made.cells, made.position, made.thrown = self.cells, self.position, self.thrown
        made.outside, made.beside, made.options, made.size = self.outside, None, (), 0
        made.handlers, made.handling, made.tracebacks, made.flat = (
            self.handlers,
            self.handling,
            self.tracebacks,
            (),
        )
        return made

    def pause(self) -> None:
        """Saves the tracebacks of its exceptions at the start of a wait."""
        exceptions = self.handling
        for value in self.values():
            if isinstance(value, BaseException):
                exceptions = (*exceptions, value)
        self.tracebacks = (
            [(e, e.__traceback__, e.__context__) for e in exceptions] if exceptions else ()
        )

    def resume(self) -> None:
        """Continues after a wait: restores tracebacks; lists may change from now on."""
        self.flat = self.options = ()
        for exception, traceback, context in self.tracebacks:
            exception.__traceback__, exception.__context__ = traceback, context

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.empty()
        memo[id(self)] = copied
        for name, value in self.items():
            copied[name] = duplicate(value, memo)
        return copied


class Closure:
    """A function inside an agent that a copy of the agent must not share.

    It uses variables of the agent or of a function in it, or has mutable defaults. A copy of it
    uses those of the agent's copy.
    """

    __slots__ = ("__dict__", "_function")  # functools.wraps copies all entries of __dict__

    def __init__(self, function: types.FunctionType):
        functools.update_wrapper(self, function)
        self._function = function
        if inspect.iscoroutinefunction(function):
            inspect.markcoroutinefunction(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Closure":
        copied = Closure.__new__(Closure)
        memo[id(self)] = copied
        old, new = self._function, _function(self._function, memo)
        copied._function = new
        copied.__dict__.update(
            (name, new if value is old else duplicate(value, memo))
            for name, value in vars(self).items()
        )
        return copied


def _function(old: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """A copy of a function with copies of its cells; functions that share a cell still do."""
    cells = tuple(_cell(cell, memo) for cell in old.__closure__ or ())
    new = types.FunctionType(
        old.__code__, old.__globals__, old.__name__, duplicate(old.__defaults__, memo), cells
    )
    new.__kwdefaults__, new.__qualname__, new.__doc__ = (
        duplicate(old.__kwdefaults__, memo),
        old.__qualname__,
        old.__doc__,
    )
    return new


def _cell(old: types.CellType, memo: dict[int, Any]) -> types.CellType:
    if id(old) not in memo:
        memo[id(old)] = new = types.CellType()
        if old != new:  # else it is not bound yet
            new.cell_contents = duplicate(old.cell_contents, memo)
    return memo[id(old)]


class Cells:
    """The variables of the functions around an agent, always current; all its copies share them."""

    def __init__(self, names: Sequence[str], cells: Sequence[Any]):
        self._cells = dict(zip(names, cells, strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise NameError(
                f"cannot access free variable {name!r} where it is not associated with a value in "
                "enclosing scope"
            ) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def bind(self, name: str, value: Any) -> Any:
        self[name] = value
        return value

    def unbind(self, name: str) -> None:
        self[name]
        del self._cells[name].cell_contents

    def forget(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
