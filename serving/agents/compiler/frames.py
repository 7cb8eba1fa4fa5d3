"""What holds an agent's variables between two waits, and how it is copied.

Python's own frames cannot be copied. A `Frame` is a dictionary of the variables by name, and a
`Closure` is a function defined in an agent that knows how to be moved to another frame.
"""

import builtins
import copy
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, Self

import jax

FRAME = ".frame"
"""The one argument of every compiled piece. No name of Python's can be spelled like that, and the
compiler does not mind."""


class Frame(dict[str, Any]):
    """The variables of one run of an agent, by name, and what else makes it up between two
    suspensions.

    Attributes:
      cells: of the functions around the agent, by name.
      at: the index of the instruction to run next.
      handlers: of the try statements that are under way, outermost first: the instruction to go on
        with, and how many exceptions were being handled when the statement began.
      handling: exceptions that are being handled, outermost first.
      thrown: what the instruction that was waited for raises.
      tracebacks: exceptions in it, with what they had when it began to wait. Copies share
        exceptions, and Python writes to them when they are raised again; a run puts back what it
        knew.
      flat: of a snapshot, lists in it that hold nothing that changes.
    """

    __slots__ = ("at", "cells", "flat", "handlers", "handling", "thrown", "tracebacks")
    builtins = builtins

    def __init__(self, variables: dict[str, Any], cells: "Cells"):
        super().__init__(variables)
        self.cells = cells
        self.at = 0
        self.handlers: tuple[tuple[int, int], ...] = ()
        self.handling: tuple[BaseException, ...] = ()
        self.thrown: BaseException | None = None
        self.tracebacks: Sequence[
            tuple[BaseException, types.TracebackType | None, BaseException | None]
        ] = ()
        self.flat: Sequence[list[Any]] = ()

    def __missing__(self, name: str) -> Any:
        # A comprehension's variables carry a number.
        raise UnboundLocalError(
            f"cannot access local variable {name.partition('.')[0]!r} where it is not associated "
            "with a value"
        )

    def free(self, name: str) -> Any:
        """A variable, from a function inside the agent."""
        if name not in self:
            raise NameError(
                f"cannot access free variable {name!r} where it is not associated with a value in "
                "enclosing scope"
            )
        return self[name]

    def bind(self, name: str, value: Any) -> Any:
        """Binds a name, and is its value: what := does."""
        self[name] = value
        return value

    def unbind(self, name: str) -> None:
        """What del does."""
        self[name]  # raises as del would
        del self[name]

    def forget(self, name: str) -> None:
        """What the end of an except clause does with the exception's name, bound or not."""
        self.pop(name, None)

    def taken(self) -> BaseException | None:
        """What was thrown, once."""
        exception, self.thrown = self.thrown, None
        return exception

    def matches(self, kind: Any) -> bool:
        """Whether an except clause that names `kind` is for the exception that is being handled."""
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
        """Begins a with statement."""
        kind = type(manager)
        if not (hasattr(kind, "__enter__") and hasattr(kind, "__exit__")):
            raise TypeError(
                f"'{kind.__name__}' object does not support the context manager protocol"
            )
        return kind.__enter__(manager)

    def leave(self, manager: Any) -> None:
        """Ends it."""
        type(manager).__exit__(manager, None, None, None)

    def swallows(self, manager: Any) -> bool:
        """Ends it because of the exception that is being handled; whether that is at an end,
        too."""
        exception = self.handled()
        return bool(
            type(manager).__exit__(manager, type(exception), exception, exception.__traceback__)
        )

    @staticmethod
    def closure(function: Any) -> Any:
        """What a function that is defined in an agent, and what its decorators make of it, is kept
        as."""
        if isinstance(function, types.FunctionType) and (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__
        ):
            return Closure(function)
        if isinstance(function, functools._lru_cache_wrapper) and isinstance(
            function.__wrapped__, Closure
        ):
            name = vars(function.__wrapped__)["__name__"]
            raise TypeError(
                f"functools.cache on {name}, which uses an agent's variables: copies of the agent "
                "would share it; define it outside and give it what it needs"
            )
        return function

    def empty(self) -> Self:
        """Where this frame is, without variables."""
        made = type(self).__new__(type(self))
        made.cells, made.at, made.thrown = self.cells, self.at, self.thrown
        made.handlers, made.handling, made.tracebacks, made.flat = (
            self.handlers,
            self.handling,
            self.tracebacks,
            (),
        )
        return made

    def pause(self) -> None:
        """Notes how exceptions are when it waits."""
        exceptions = self.handling
        for value in self.values():
            if isinstance(value, BaseException):
                exceptions = (*exceptions, value)
        self.tracebacks = (
            [(e, e.__traceback__, e.__context__) for e in exceptions] if exceptions else ()
        )

    def resume(self) -> None:
        """It runs on: its lists may change, and exceptions are again as this run has left them."""
        self.flat = ()
        for exception, traceback, context in self.tracebacks:
            exception.__traceback__, exception.__context__ = traceback, context

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.empty()
        memo[id(self)] = copied
        for name, value in self.items():
            copied[name] = duplicate(value, memo)
        return copied


class Closure:
    """A function inside an agent that uses the agent's variables, or those of a function in it, or
    has defaults that can change.

    A copy uses those of the agent's copy.
    """

    __slots__ = ("__dict__", "_function")  # functools.wraps hands on all of what is in the first

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
    """A copy of a function over copies of its cells; two functions with one cell have one again."""
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
    """Variables of the functions around an agent, as they are at the time of asking. All of its
    copies share them."""

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


CONSTANT = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    types.FunctionType,
    types.ModuleType,
}
_ITERATORS = frozenset(type(iter(source)) for source in (range(0), "", [], ()))
_SHARED = (type, types.ModuleType, BaseException, jax.Array)
"""What never changes, and what is shared by all copies of a state."""


FLAT = "flat"
"""Under this the memo of a copy may have a list, in which the flat lists that were made are put."""


def shared[T](kind: type[T]) -> type[T]:
    """Declares a class whose objects all copies of a state share."""
    CONSTANT.add(kind)
    return kind


def duplicate(value: Any, memo: dict[Any, Any]) -> Any:
    """copy.deepcopy that shares what copies of an agent share, in lists and dictionaries too, and
    moves methods with what they are of."""
    kind = type(value)
    if kind in CONSTANT:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is list:
        memo[id(value)] = made = []
        if CONSTANT.issuperset(map(type, value)):  # an agent can have thousands of children
            made.extend(value)
            memo.get(FLAT, []).append(made)
        else:
            made.extend([duplicate(each, memo) for each in value])
    elif kind is dict:
        memo[id(value)] = made = {}
        made.update([(duplicate(key, memo), duplicate(each, memo)) for key, each in value.items()])
    elif kind is tuple:
        made = tuple([duplicate(each, memo) for each in value])
        # A tuple inside itself was made on the way.
        made = memo.setdefault(id(value), made)
    elif kind in _ITERATORS:
        _, (source,), *at = value.__reduce__()
        # One in what it goes through was made on the way.
        made = memo.setdefault(id(value), iter(duplicate(source, memo)))
        if at and at[0]:
            made.__setstate__(at[0])
    elif isinstance(value, _SHARED):
        return value
    elif kind is types.BuiltinMethodType:
        if isinstance(value.__self__, types.ModuleType | None):
            return value
        # deepcopy would leave it bound to what it belongs to.
        made = getattr(duplicate(value.__self__, memo), value.__name__)
    elif kind is types.MethodType:
        made = types.MethodType(value.__func__, duplicate(value.__self__, memo))
    else:
        made = copy.deepcopy(value, memo)
    return made
